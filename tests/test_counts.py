"""Figures' n where the parts that are counted differ: odd halves, short lines, few examples, unlike texts."""

import types

import numpy as np
import pytest

from jmat import cost, mesh, tasks
from jmat.benchmark import memory
from jmat.benchmark.setup import random_model, shape_config
from jmat.cross_corpus import check_sizes, over_layers
from jmat.early_exit.report import calibration_rows
from jmat.early_exit.thresholds import Outcome
from jmat.peek.page import percent
from jmat.probe import token_classes
from tests.inside import NOTE, call, loaded, text


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
    """A line of one token predicts nothing, and one that is read in pieces is still one line."""
    words = {"a": [5], "b": [5, 6, 7], "c": [*range(300)]}
    length = gpt2.config.num_positions
    monkeypatch.setattr(tasks, "special_tokens", lambda *_, **__: None)
    cut = lambda ids: [np.asarray(ids[at : at + length], np.int32) for at in range(0, len(ids), length)]  # noqa: E731
    monkeypatch.setattr(tasks, "encode_pieces", lambda lines, *_: [cut(words[line]) for line in lines])
    (row,) = tasks.text_rows(gpt2, None, "name", ["a", "b", "c", "a"])
    pieces = -(-300 // length)
    assert (row["n"], row["lines"], row["text"]) == (2 + 300 - pieces, 2, "name")


CLASSES = {"Ġword": "word", "piece": "piece", "Ġx86": "word", "Ġ86x": "number", "12": "number", "Ġ(": "punctuation"}
CLASSES |= {"Ġ": "punctuation", "é2": "piece"}


def test_the_class_of_a_token_is_that_of_its_first_letter():
    pieces = list(CLASSES)
    tokenizer = types.SimpleNamespace(
        convert_ids_to_tokens=lambda token: pieces[token],
        convert_tokens_to_string=lambda names: names[0].replace("Ġ", " "),
    )
    assert token_classes(np.array([*range(len(pieces)), -1]), tokenizer).tolist() == [*CLASSES.values(), "end"]


SHARES = {1.0: "100 %", 0.0999: "10.0 %", 0.1: "10 %", 0.0951: "9.5 %", 0.0051: "0.5 %", 0.0011: "0.1 %"}
SHARES |= {0.00099: "< 0.1 %", 0.0: "< 0.1 %", 0.994: "99 %"}


@pytest.mark.parametrize(("share", "said"), SHARES.items())
def test_shares_have_two_digits_and_the_smallest_are_not_nought(share, said):
    assert percent(share) == said


def test_no_size_is_larger_than_the_smallest_corpus_has_examples():
    given = {"positions_per_sentence": 2, "protocol": "jmat", "num_fit": 40, "num_eval": 20, "skip_first": 12}
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


@pytest.mark.parametrize(("platform", "wanted"), [("cpu", 1024), ("gpu", 3 * 4096), ("tpu", 3 * 4096)])
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


@pytest.mark.parametrize(("available", "last"), [(200, [200]), (250, [250]), (300, [250, 300]), (8001, [8000, 8001])])
def test_sizes_by_default_double_up_to_all_examples(available, last):
    found = check_sizes([], available)
    assert found[-len(last) :] == last
    assert found[:-1] == [size for size in (250, 500, 1000, 2000, 4000, 8000) if size < available]
    assert check_sizes([9, 3, 9], 10) == [3, 9]


def test_a_mean_over_layers_has_no_value_where_a_layer_has_none():
    label = {"map": "mat", "fit_corpus": "a", "eval_corpus": "b", "n_fit": 9}
    values = {"r2": [0.5, None, 0.25], "surprisal": [1.0, 3.0, 5.0], "kl": [None, None, None]}
    rows = [{**label, "metric": metric, "value": value} for metric in values for value in values[metric]]
    found = {row["metric"]: row["value"] for row in over_layers(rows)}
    assert found == {"r2": None, "surprisal": 3.0, "kl": None}


def test_every_text_and_task_has_its_own_rows(tmp_path, monkeypatch):
    texts, files = {"one": ["a b"], "two": ["c d", "e f"]}, {"text": [], "tasks": []}
    for name, lines in texts.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
        (tmp_path / f"{name}.jsonl").write_text(f'{{"context": "{name}", "choices": ["a", "b"], "answer": 0}}')
        files["text"].append(tmp_path / f"{name}.txt")
        files["tasks"].append(tmp_path / f"{name}.jsonl")
    asked = []

    def rows(kind):
        def of_one(model, tokenizer, name, content, **_):
            asked.append((name, content if kind == "text" else [question.prompt for question in content]))
            return [{kind: name, "metric": "perplexity", "value": 1.0, "note": NOTE}]

        return of_one

    with loaded("tasks") as script:
        monkeypatch.setattr(script, "text_rows", rows("text"))
        monkeypatch.setattr(script, "task_rows", rows("task"))
        outcome = call("tasks", **files)
    wanted = [(str(path), texts[path.stem]) for path in files["text"]]
    assert asked == wanted + [(str(path), [path.stem]) for path in files["tasks"]]
    assert [row.get("text", row.get("task")) for row in outcome.rows] == [name for name, _ in asked]
