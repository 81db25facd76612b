"""benchmark and verify: ratios by a clock that is faked, verdicts at their thresholds,
flags that arrive.
"""

import numpy as np
import pytest

from experiments.benchmarking import maps, memory, papers, passes
from experiments.benchmarking.rows import Goal
from experiments.benchmarking.setup import Bench, random_model, random_sentences
from jmat.checkpoint import parameters
from jmat.models.flops import block_flops
from jmat.studies.early_exit.thresholds import ID_LAMBDAS, LAMBDAS
from jmat.studies.verify import differences
from jmat.studies.verify.differences import PaddedTokens, SiteDifference
from tests.empty import empty_model
from tests.inside import call, loaded
from tests.test_reference import REFERENCE

# --- the benchmark's rows -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    model = random_model("tiny", folder, dtype="float32")
    split = random_sentences(30, 211, seed=1), random_sentences(20, 211, seed=2)
    return Bench(model, folder, "float32", *split, 120, 300, 128, 2, 2)


@pytest.fixture
def taken(monkeypatch):
    """Times by contender, for `in_turn`, which then runs none of them; a single call
    takes 7 s.
    """
    times = {}
    for module in (passes, papers, maps):
        monkeypatch.setattr(
            module, "in_turn", lambda works, *_, **__: {name: times[name] for name in works}
        )
        monkeypatch.setattr(module, "seconds", lambda work: 7.0, raising=False)
    monkeypatch.setattr(passes.rivals, "installed", lambda name: False)
    return times


def find(rows, metric, **wanted):
    (row,) = [
        row
        for row in rows
        if row["metric"] == metric and all(row[key] == wanted[key] for key in wanted)
    ]
    return row


def test_lambdas_cost_one_pass_and_not_many(bench, taken):
    taken |= {"jmat": [0.5, 0.25], "one": [0.1, 0.2], "pass": [2.0, 1.0], "reading": [3.0, 4.0]}
    rows = papers.early_exit_rows(bench)
    count = len(LAMBDAS) + len(ID_LAMBDAS)
    row = find(rows, "ratio")
    assert (row["value"], row["low"], row["high"]) == (count * 1 / 0.25, count * 4, count * 4)
    assert row["met"] == (count * 4 >= 50)
    row = find(rows, f"{count} lambdas")
    assert row["value"] == pytest.approx((1 + 3 + 0.25) / (1 + 3 + 0.1))
    assert row["met"]
    assert find(rows, "all included")["value"] == pytest.approx(count * 1 / 4.25)
    assert find(rows, "seconds", of="reading")["value"] == 3


def test_capture_counts_real_tokens_and_the_work_of_the_blocks(bench, taken):
    taken |= {"jmat": [4.0, 2.0], "jmat, padded": [3.0, 5.0], "matmul": [1.0, 0.5]}
    rows = passes.capture_rows(bench)
    # what follows the position that is read does not matter
    lengths = (bench.eval.positions + 1).astype(np.float64)
    flops = bench.config.layers * block_flops(bench.config, lengths, (lengths + 1) / 2).sum()
    D, F, N = 32, 128, 128
    peak = 2 * N * (4 * D * D + 2 * D * F) / 0.5
    assert find(rows, "tokens_per_second")["value"] == lengths.sum() / 2
    assert find(rows, "share of peak")["value"] == pytest.approx(flops / 2 / peak)
    assert find(rows, "compile_seconds")["value"] == 5
    assert (
        0 <= find(rows, "padding_waste")["value"] < find(rows, "padding_waste_padded")["value"] < 1
    )
    assert find(rows, "ratio")["value"] is None


def test_pairs_are_extrapolated_from_those_that_are_timed(bench, taken):
    taken |= {"jmat": [2.0, 1.0], "other": [8.0, 6.0]}
    goal = Goal(5)
    rows = maps._against_pairs("fit", bench, lambda: None, "other", lambda i, j: None, goal)
    pairs = 3 * 4 / 2  # of 3 blocks
    row = find(rows, "ratio")
    assert (row["value"], row["low"], row["high"]) == (pairs / 2 * 6, pairs / 2 * 4, pairs / 2 * 6)
    assert row["met"]
    assert find(rows, "seconds", of="other")["pairs"] == 2
    assert find(rows, "seconds", of="jmat")["pairs"] == pairs
    assert find(rows, "compile_seconds")["value"] == 6
    assert maps._sample(bench) == [(0, 1), (2, 3)]
    missing = maps._against_pairs("fit", bench, lambda: None, "other", None, goal)
    assert find(missing, "ratio")["value"] is None


def test_streaming_rows_hold_speed_against_the_peak_and_memory_against_what_is_allowed(
    bench, taken, monkeypatch
):
    taken |= {"jmat": [4.0, 2.0], "matmul": [1.0, 0.5], "matmul float64": [1.0, 2.0]}
    sizes = {"growth": 3_000_000_000, "weights": 500_000_000, "statistics": 100}
    monkeypatch.setattr(memory, "measure", lambda *_: sizes)
    rows = passes.streaming_rows(bench)
    assert find(rows, "tokens_per_second")["value"] == 300 / 2
    assert find(rows, "map_seconds")["value"] == 2
    row = find(rows, "memory", map="streaming")
    assert (row["value"], row["met"]) == (3e9 / 2e9, False)
    predicted = find(rows, "pass", map="cost")
    assert predicted["value"] == pytest.approx(2 / predicted["predicted_seconds"])
    assert find(rows, "maps", map="cost")["measured_seconds"] == 2


def test_the_suite_is_held_against_its_own_capture(bench, monkeypatch):
    turns = iter([{"capture": 100.0, "maps": 1.0}, {"capture": 2.0, "maps": 3.0, "r2": 2.0}])
    monkeypatch.setattr(papers, "suite", lambda bench: next(turns))
    rows = papers.suite_rows(bench)
    row = find(rows, "ratio")
    assert (row["value"], row["met"]) == (3.5, False)
    assert find(rows, "seconds", of="maps")["value"] == 3


@pytest.mark.parametrize("smoke", [False, True])
def test_flags_of_the_benchmark_arrive(monkeypatch, smoke):
    benches = []

    def part(bench):
        benches.append(bench)
        return [
            {
                "map": "fit",
                "metric": "ratio",
                "value": 2.0,
                "goal": ">= 5",
                "met": False,
                "other": "x",
                "jmat": "y",
            }
        ]

    given = {
        "num_sentences": 31,
        "num_fit": 77,
        "positions": 333,
        "sampled_pairs": 5,
        "repeats": 2,
        "seed": 6,
    }
    with loaded("benchmark") as script:
        monkeypatch.setattr(script, "PARTS", dict.fromkeys(("streaming", "fit"), part))
        more = ["--smoke"] if smoke else []
        outcome = call(
            "benchmark",
            *more,
            model=None,
            shape="tiny",
            parts="fit",
            peak_tflops=2.5,
            tokens_per_batch=96,
            **given,
        )
    (bench,) = benches
    assert (bench.sampled, bench.repeats, bench.peak) == (5, 2, 2.5e12)
    sizes = (
        bench.num_fit,
        bench.positions,
        bench.tokens_per_batch,
        bench.fit.num_sentences,
        bench.eval.num_sentences,
    )
    assert sizes == ((200, 500, 256, 60, 20) if smoke else (77, 333, 96, 31, 10))
    for split, seed in ((bench.fit, 7), (bench.eval, 8)):
        np.testing.assert_array_equal(
            split.tokens, random_sentences(split.num_sentences, 211, seed).tokens
        )
    again = random_model("tiny", outcome.out, dtype="float32", seed=6)
    same = [
        np.array_equal(value, parameters(again)[name])
        for name, value in parameters(bench.model).items()
    ]
    assert all(same)
    assert "met" not in outcome.rows[0]
    assert "MISSED" not in outcome.printed  # sizes so small say nothing


# --- verify ---------------------------------------------------------------------------------------


def compared(monkeypatch, off, rounding):
    """The verdict where logits are off by so many of their standard deviations, and
    rounding by so many.
    """
    random = np.random.default_rng(0)
    embed, logits = random.standard_normal((1, 4, 8)) * 3, random.standard_normal((1, 4, 8)) * 5
    unit = (logits[0] - logits[0].mean(-1, keepdims=True)).std()
    shifted = lambda by: logits + by * unit * (np.arange(8) == 0)  # noqa: E731
    values = {"reference": logits, "rounded": shifted(rounding)}
    monkeypatch.setattr(
        differences, "run_reference", lambda model, *_: {"embed": embed, "logits": values[model]}
    )
    monkeypatch.setattr(
        differences, "run", lambda *_, **__: (None, {"embed": embed, "logits": shifted(off)})
    )
    batch = PaddedTokens(np.zeros((1, 4), np.int32), np.ones((1, 4), bool))
    return differences.compare(empty_model(), "reference", lambda: "rounded", [batch])


@pytest.mark.parametrize(
    ("off", "rounding", "verdict"),
    [
        (0.99e-4, 0, "MATCH"),
        (1.01e-4, 0, "WRONG"),
        (1.01e-4, 1.3e-5, "PRECISION"),
        (0.5, 0.0624, "WRONG"),
        (0.5, 0.0626, "PRECISION"),
    ],
)
def test_verdicts_at_their_thresholds(monkeypatch, off, rounding, verdict):
    found = compared(monkeypatch, off, rounding)
    assert found.verdict == verdict
    assert found.sites[1].difference == pytest.approx(off, rel=1e-6)
    assert found.sites[1].rounding == pytest.approx(rounding if off > 1e-4 else 0, rel=1e-6)
    assert found.first == ("logits" if verdict == "WRONG" else None)
    assert found.tokens == 4
    rows = differences.report_rows(found)
    assert {row["verdict"] for row in rows} == {verdict}
    assert [row["value"] for row in rows if row.get("site") == "logits"] == [
        found.sites[1].difference,
        found.sites[1].rounding,
    ]
    assert [row["value"] for row in rows if row["metric"] == "largest"] == [found.largest]
    assert [row["value"] for row in rows if row["metric"] == "same_top_1"] == [found.same_top_1]


def test_a_difference_is_in_units_of_its_coordinate_but_no_less_than_the_median_ones():
    expected = np.array([[3.0, 0.1, 1.0], [-3.0, 0.1, -1.0]])
    got = expected + np.array([[0.3, 0.0, 0.0], [0.0, 0.02, 0.0]])
    mask = np.ones((1, 2), bool)
    wide = differences._relative({"embed": got[None]}, {"embed": expected[None]}, mask)
    assert wide["embed"] == pytest.approx(max(0.3 / 3, 0.02 / 1))
    assert SiteDifference("a", 1e-4, 0.0).explained
    assert not SiteDifference("a", 1.001e-4, 0.0).explained


def test_verify_runs_on_the_text_in_the_dtype_that_is_asked_for():
    outcome = call("verify", "--text=Returns the name of the file.", dtype="bfloat16")
    rows = outcome.rows
    assert {row["verdict"] for row in rows} == {"PRECISION"}
    assert "PRECISION: the logits differ by more than 0.0001" in outcome.printed
    tokenizer_counts = {row["n"] for row in rows}
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(REFERENCE / "gpt2")("Returns the name of the file.")[
        "input_ids"
    ]
    lengths = [-(-len(ids) // part) for part in (8, 3, 1)]
    assert tokenizer_counts == {lengths[-1] + 2 * sum(lengths)}
