"""Small pieces at their ends: odd halves, short lines, unlike texts, large numbers,
half of an interval.
"""

import json
import types

import numpy as np
import pytest

from experiments.benchmarking import memory
from experiments.benchmarking.maps import relative
from experiments.benchmarking.setup import random_model, shape_config
from jmat.checkpoint import parameters
from jmat.checkpoint.load import find
from jmat.checkpoint.tokenizer import load_tokenizer
from jmat.data import sampling
from jmat.data.encoding import SpecialTokens
from jmat.data.sampling import skipped_tokens
from jmat.maps.files import MapsInfo
from jmat.maps.solution import Solution
from jmat.maps.types import Identity, Linear
from jmat.models import cost
from jmat.report.notes import NO_INTERVAL, estimate
from jmat.report.tables import format_table
from jmat.runtime import mesh
from jmat.runtime.digests import model_hash
from jmat.runtime.errors import sentence
from jmat.runtime.progress import _bar
from jmat.studies.cross_corpus.rows import check_sizes, over_layers
from jmat.studies.early_exit.curves import calibration_rows
from jmat.studies.early_exit.thresholds import Outcome
from jmat.studies.peek.page import percent
from jmat.studies.peek.predictions import _shown
from jmat.studies.probe.labels import token_classes
from jmat.studies.prune.plans import _without
from jmat.studies.prune.surgery import load_pruned, save_pruned
from jmat.studies.r2 import Target, resamples
from jmat.studies.tasks import scoring as tasks
from jmat.studies.tasks import study
from tests.inside import NOTE, call, text


@pytest.mark.parametrize("sentences", [11, 12])
def test_a_lambda_is_calibrated_on_the_even_sentences_and_verified_on_the_odd_ones(sentences):
    rows = np.repeat(np.arange(sentences), 2)  # two examples a sentence, of which the first counts
    outcome = Outcome(np.full((2, 2 * sentences), 3), np.ones((2, 2 * sentences)))
    outcomes = {(name, "gap"): ((0.2, 0.4), outcome) for name in ("mat", "id")}
    found = calibration_rows(outcomes, rows, delta=0.9, epsilon=0.5)
    n = {(row["map"], row["metric"]): row["n"] for row in found}
    for name in ("mat", "id"):
        assert n[name, "calibrated_lambda"] == -(-sentences // 2)
        assert n[name, "disagreement"] == n[name, "layers"] == sentences // 2


def test_lines_and_tokens_that_are_not_scored_do_not_count(gpt2, monkeypatch):
    """A line of one token predicts nothing, and one that is read in pieces is still one
    line.
    """
    words = {"a": [5], "b": [5, 6, 7], "c": [*range(300)]}
    length = gpt2.config.num_positions
    monkeypatch.setattr(tasks, "special_tokens", lambda *_, **__: None)

    def cut(ids):
        return [np.asarray(ids[at : at + length], np.int32) for at in range(0, len(ids), length)]

    monkeypatch.setattr(
        tasks, "encode_pieces", lambda lines, *_: [cut(words[line]) for line in lines]
    )
    (row,) = tasks.text_rows(gpt2, load_tokenizer(find(gpt2.name)), "name", ["a", "b", "c", "a"])
    pieces = -(-300 // length)
    assert (row["n"], row["lines"], row["text"]) == (2 + 300 - pieces, 2, "name")


CLASSES = {
    "Ġword": "word",
    "piece": "piece",
    "Ġx86": "word",
    "Ġ86x": "number",
    "12": "number",
    "Ġ(": "punctuation",
}
CLASSES |= {"Ġ": "punctuation", "é2": "piece"}


def test_the_class_of_a_token_is_that_of_its_first_letter():
    pieces = list(CLASSES)
    tokenizer = types.SimpleNamespace(
        convert_ids_to_tokens=lambda token: pieces[token],
        convert_tokens_to_string=lambda names: names[0].replace("Ġ", " "),
    )
    assert token_classes(np.array([*range(len(pieces)), -1]), tokenizer).tolist() == [
        *CLASSES.values(),
        "end",
    ]


SHARES = {
    1.0: "100 %",
    0.0999: "10.0 %",
    0.1: "10 %",
    0.0951: "9.5 %",
    0.0051: "0.5 %",
    0.0011: "0.1 %",
}
SHARES |= {0.00099: "< 0.1 %", 0.0: "< 0.1 %", 0.994: "99 %"}


@pytest.mark.parametrize(("share", "said"), SHARES.items())
def test_shares_have_two_digits_and_the_smallest_are_not_nought(share, said):
    assert percent(share) == said


def test_no_size_is_larger_than_the_smallest_corpus_has_examples():
    given = {
        "positions_per_sentence": 2,
        "protocol": "jmat",
        "num_fit": 40,
        "num_eval": 20,
        "skip_first": 12,
    }
    with pytest.raises(
        ValueError, match=r"sizes has 1000; expected 1 to (.*), the fit examples of the smallest"
    ) as few:
        call("cross_corpus", corpora=[text(), text(seed=1)], sizes="1000", **given)
    least = int(str(few.value).partition("1 to ")[2].partition(",")[0])
    counts = []
    for path in (text(), text(seed=1)):
        with pytest.raises(ValueError, match="sizes has 1000") as alone:
            call("cross_corpus", corpora=[path], sizes="1000", **given)
        counts.append(int(str(alone.value).partition("1 to ")[2].partition(",")[0]))
    assert least == min(counts) < max(counts)


@pytest.mark.parametrize(
    ("platform", "wanted"), [("cpu", 1024), ("gpu", 3 * 4096), ("tpu", 3 * 4096)]
)
def test_every_accelerator_has_its_own_share_of_a_batch(platform, wanted):
    assert mesh.usual_batch.__wrapped__([types.SimpleNamespace(platform=platform)] * 3) == wanted


def test_memory_grows_by_what_is_above_the_start(tmp_path, monkeypatch):
    random_model("tiny", tmp_path, dtype="float32")
    monkeypatch.setattr(memory, "_resident", {"VmRSS": 700, "VmHWM": 1000}.get)
    found = memory._main(str(tmp_path), "bfloat16", "40", "64")
    config = shape_config("tiny")
    assert found == {
        "growth": 300,
        "weights": 2 * cost.parameter_count(config),
        "statistics": cost.statistics_bytes(config, "all"),
    }


@pytest.mark.parametrize(
    ("available", "last"), [(200, [200]), (250, [250]), (300, [250, 300]), (8001, [8000, 8001])]
)
def test_sizes_by_default_double_up_to_all_examples(available, last):
    found = check_sizes([], available)
    assert found[-len(last) :] == last
    assert found[:-1] == [size for size in (250, 500, 1000, 2000, 4000, 8000) if size < available]
    assert check_sizes([9, 3, 9], 10) == [3, 9]


def test_a_mean_over_layers_has_no_value_where_a_layer_has_none():
    label = {"map": "mat", "fit_corpus": "a", "eval_corpus": "b", "n_fit": 9}
    values = {"r2": [0.5, None, 0.25], "surprisal": [1.0, 3.0, 8.0], "kl": [None, None, None]}
    rows = [
        {**label, "layer": layer, "metric": metric, "value": value}
        for metric in values
        for layer, value in enumerate(values[metric])
    ]
    found = {row["metric"]: row["value"] for row in over_layers(rows)}
    assert found == {"r2": None, "surprisal": 4.0, "kl": None}


def test_every_text_and_task_has_its_own_rows(tmp_path, monkeypatch):
    texts, files = {"one": ["a b"], "two": ["c d", "e f"]}, {"text": [], "tasks": []}
    for name, lines in texts.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
        (tmp_path / f"{name}.jsonl").write_text(
            f'{{"context": "{name}", "choices": ["a", "b"], "answer": 0}}'
        )
        files["text"].append(tmp_path / f"{name}.txt")
        files["tasks"].append(tmp_path / f"{name}.jsonl")
    asked = []

    def rows(kind):
        def of_one(model, tokenizer, name, content, **_):
            asked.append(
                (name, content if kind == "text" else [question.prompt for question in content])
            )
            return [{kind: name, "metric": "perplexity", "value": 1.0, "note": NOTE}]

        return of_one

    monkeypatch.setattr(study, "text_rows", rows("text"))
    monkeypatch.setattr(study, "task_rows", rows("task"))
    outcome = call("tasks", **files)
    wanted = [(str(path), texts[path.stem]) for path in files["text"]]
    assert asked == wanted + [(str(path), [path.stem]) for path in files["tasks"]]
    assert [row.get("text", row.get("task")) for row in outcome.rows] == [name for name, _ in asked]


@pytest.mark.parametrize(
    "ends", [(np.nan, np.nan), (0.25, np.inf), (-np.inf, 0.75), (np.nan, 0.75), (0.25, np.nan)]
)
def test_there_is_no_half_of_an_interval(ends):
    assert estimate(0.5, 0.25, 0.75) == {"value": 0.5, "low": 0.25, "high": 0.75}
    assert estimate(0.5, *ends) == {"value": 0.5, "note": NO_INTERVAL}


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [
        ([1, 9, 5, 9, 2], 1),
        ([1, 5, 6, 2], 2),
        ([1, 5, 2, 2], 1),
        ([1, 2], 1),
        ([5, 9], 1),
        ([9, 5], 0),
    ],
)
def test_the_terminal_shows_the_first_mask_or_the_last_word(tokens, shown):
    tokenizer = types.SimpleNamespace(mask_token_id=9, all_special_ids=[1, 2, 9])
    assert _shown(np.array(tokens, np.int32), tokenizer) == shown
    without = types.SimpleNamespace(mask_token_id=None, all_special_ids=[1, 2])
    words = [at for at, token in enumerate(tokens) if token not in (1, 2)]
    assert _shown(np.array(tokens, np.int32), without) == (words[-1] if words else len(tokens) - 1)


@pytest.mark.parametrize(
    ("value", "said"),
    [(9999.9994, "9999.999"), (1e4, "1.00e+04"), (-2.5e4, "-2.50e+04"), (-1, "-1.000")],
)
def test_large_figures_are_shortened_on_both_sides_of_zero(value, said):
    table = format_table([{"layer": 0, "map": "mat", "metric": "r2", "value": value}])
    assert table.splitlines()[-1].split() == ["0", said]


def test_errors_are_relative_to_what_is_exact():
    exact = np.array([[3.0, 0.0], [0.0, 4.0]])
    assert relative(2 * exact, exact) == pytest.approx(1.0)
    assert relative(np.zeros((2, 2)), exact) == pytest.approx(1.0)
    assert relative(exact + np.eye(2)[::-1] * [[1.0], [0.0]], exact) == pytest.approx(0.2)


def test_coordinates_that_vary_at_the_first_position_alone_are_told_of_behind_it():
    random = np.random.default_rng(0)
    target, positions = (
        random.standard_normal((12, 3)),
        np.array([0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    )
    target[3:, 1] = 7.0
    rows = Target(target, resamples(positions)).rows({}, target + 0.1)
    notes = {row["metric"]: row.get("note") for row in rows}
    assert notes.pop("r2_no_first").startswith("1 of 3 coordinates of the target do not vary")
    assert set(notes.values()) == {None}


def test_bos_is_not_read_though_nobody_calls_it_special(monkeypatch):
    tokenizer = load_tokenizer(find("gpt2-docs"))
    monkeypatch.setattr(type(tokenizer), "all_special_ids", [1, 2])
    monkeypatch.setattr(sampling.encoding, "special_id", lambda _, name: {"unk": 2}[name])
    before = lambda *_, masked: SpecialTokens((5,), ())  # noqa: E731
    monkeypatch.setattr(sampling.encoding, "special_tokens", before)

    def skipped(masked, skip):
        return set(skipped_tokens(tokenizer, masked=masked, skip_special=skip))

    assert skipped(False, None) == skipped(True, None) == skipped(False, True) == {1, 5}
    assert skipped(False, False) == set()


def test_what_stood_in_for_parts_of_a_removed_block_goes_with_it():
    sites = dict.fromkeys(
        ("block.1.ffn", "block.2", "block.3.ffn", "block.4", "block.10"), Identity()
    )
    assert set(_without(sites, (1, 2))) == {
        "block.1",
        "block.2",
        "block.3.ffn",
        "block.4",
        "block.10",
    }
    assert set(_without(sites, (3, 5))) == {
        "block.1.ffn",
        "block.2",
        "block.3",
        "block.4",
        "block.10",
    }


@pytest.mark.parametrize("method", ["map", "distil"])
def test_a_pruned_model_says_how_its_maps_were_made(gpt2, tmp_path, method):
    maps = {(1, 3): Linear(np.eye(64, dtype=np.float32))}
    info = MapsInfo("name", model_hash(parameters(gpt2)), "din2023", "docs", 9, 0, "float32")
    save_pruned(tmp_path, gpt2, method, [2, 1], maps, info)
    about = json.loads((tmp_path / "pruned.json").read_text("utf-8"))
    assert about == {"method": method, "removed": [1, 2], "blocks": "1-2"}
    assert set(load_pruned(tmp_path)[2]) == {"block.1", "block.2"}


FEW, DEPENDENT = "fewer examples than dimensions", "linearly dependent input coordinates"
LEAST, RIDGE = "the minimum-norm solution is used", "ridge 0.5 makes it unique"


@pytest.mark.parametrize(
    ("n", "bias", "rank", "ridge", "said"),
    [
        (3, False, 3, 0.0, f"rank 3 of 4: {FEW}; {LEAST}"),
        (4, False, 3, 0.0, f"rank 3 of 4: {DEPENDENT}; {LEAST}"),
        (4, True, 3, 0.0, f"rank 3 of 4: {FEW}; {LEAST}"),  # the bias takes one example
        (5, True, 3, 0.5, f"rank 3 of 4: {DEPENDENT}; {RIDGE}"),
        (9, True, 4, 0.5, "full rank 4 from 9 examples, condition number 1.2e+01"),
    ],
)
def test_a_fit_says_what_its_examples_do_not_determine(n, bias, rank, ridge, said):
    weights, ends = np.zeros((4, 2), np.float32), np.zeros(2, np.float32) if bias else None
    found = Solution(weights, ends, np.int32(rank), np.float32(12.0), None, n, ridge)
    assert found.describe() == said


def test_errors_of_the_system_name_the_file_and_bars_what_is_done():
    assert sentence(OSError(2, "No such file", "a/b.txt")) == "'a/b.txt': No such file."
    assert sentence(OSError(28, "No space left")) == "No space left"
    assert sentence(ValueError("mine")) == "mine"
    assert (
        _bar("a < b", 3, 7, 2.04)
        == '<div><progress value="3" max="7"></progress> a &lt; b: 3 of 7, 2.0 s</div>'
    )
    assert _bar("x", 3, None, 0.0) == "<div>x: 3, 0.0 s</div>"
    assert '<progress value="0" max="1">' in _bar("x", 0, 0, 0.0)
