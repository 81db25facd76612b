"""Costs on paper, ratios of benchmarks, verdicts and shares, as numbers worked out by
hand.
"""

import numpy as np
import pytest

from experiments.benchmarking.rows import Goal, paired_row, ratio_row, seconds_rows
from experiments.pretraining.reported import reported
from jmat import models
from jmat.forward import run
from jmat.models import cost
from jmat.studies.routes import bytes_in_words
from jmat.studies.verify import differences as verify
from jmat.studies.verify.differences import FACTOR, TOLERANCE, PaddedTokens, SiteDifference

D, L, H, F, N = 8, 3, 2, 20, 1000
FIELDS = {"n_embd": D, "n_layer": L, "n_head": H, "n_inner": F, "vocab_size": 50, "n_positions": 16}
CONFIG = models.config_from_hf({"model_type": "gpt2", **FIELDS})


@pytest.mark.parametrize(("targets", "pairs"), [("final", 3), ("all", 6)])
def test_operations_seconds_and_bytes(targets, pairs):
    machine = cost.Machine(
        "m", peak=1e9, peak_float64=1e6, memory=1, chips=4, share=0.5, factor_share=0.25
    )
    found = cost.streaming_cost(
        CONFIG, N, machine, targets=targets, row_length=32, tokens_per_batch=256
    )
    # projections, feed-forward, scores and weighted sums over a row
    block = 2 * (4 * D * D + 2 * D * F) + 4 * D * 32
    factors = L * (9 + 8 / 3) * D**3
    flops = {
        "capture": L * N * block,
        "statistics": 2 * D * D * N * (L + pairs),
        "fit": factors + 6 * D**3 * pairs,
    }
    assert found.flops == pytest.approx(flops)
    assert found.seconds == pytest.approx({
        "capture": flops["capture"] / (4 * 0.5 * 1e9),
        "statistics": flops["statistics"] / (4 * 0.5 * 1e6),
        "fit": factors / (0.25 * 1e6) + 6 * D**3 * pairs / (0.5 * 1e6),
    })  # fmt: skip
    parameters = 50 * D + 16 * D + L * (4 * D + 4 * (D * D + D) + 2 * D * F + F + D) + 2 * D
    values = [(L + 1) * D * 4, max(2 * F * 4, H * 32 * 8, 2 * 8 * D)]
    assert found.bytes == {
        "weights": 4 * parameters,
        "statistics": 8 * (D * D * (L + pairs) + (3 * D + 1) * (L + 1)),
        "batch": 64 * sum(values),
    }
    assert found.memory == sum(found.bytes.values())


@pytest.mark.parametrize(("model_type", "kept"), [("gpt2", 2), ("llama", 3)])
def test_a_batch_holds_the_hidden_layer_before_and_after_its_activation(model_type, kept):
    """`kept` arrays as wide as the feed-forward part: one more where it is gated."""
    size = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 9}
    wide = {"n_inner": 500} if model_type == "gpt2" else {"intermediate_size": 500}
    config = models.config_from_hf({"model_type": model_type, **size, **wide})
    assert cost.batch_bytes(config, 7, 5) == 7 * 4 * (3 * 8 + kept * 500)


def test_bytes_in_words():
    assert [bytes_in_words(size) for size in (1.5e9, 1e9, 2e7, 1e6, 300e3)] == [
        "1.5 GB", "1.0 GB", "20 MB", "1 MB", "300 kB",
    ]  # fmt: skip


# --- benchmarks -----------------------------------------------------------------------------------


def test_a_ratio_is_of_best_times_and_its_ends_of_turns():
    taken = {"jmat": [2.0, 4.0, 3.0], "rival": [5.0, 4.0, 9.0]}
    row = paired_row("part", taken, "rival", Goal(3.0), scale=2)
    assert row["value"] == 2 * 4.0 / 2.0
    assert (row["low"], row["high"], row["n"]) == (2 * 4.0 / 4.0, 2 * 9.0 / 3.0, 3)
    assert (row["jmat"], row["other"], row["goal"], row["met"]) == (
        "2 s",
        "rival 8 s",
        ">= 3",
        True,
    )
    assert [r["value"] for r in seconds_rows("part", taken)] == [2.0, 4.0]


@pytest.mark.parametrize(
    ("goal", "ratio", "met"),
    [
        (Goal(2), 2, True),
        (Goal(2), 1.9, False),
        (Goal(2, at_most=True), 2, True),
        (Goal(2, at_most=True), 2.1, False),
    ],
)
def test_a_goal_that_is_just_reached_is_met(goal, ratio, met):
    assert ratio_row("part", "ratio", ratio, "a", "b", goal)["met"] is met


# --- verdicts -------------------------------------------------------------------------------------


def test_what_explains_a_difference():
    assert SiteDifference("s", TOLERANCE, 0.0).explained
    assert not SiteDifference("s", 1.01 * TOLERANCE, 0.0).explained
    assert SiteDifference("s", FACTOR * 0.01, 0.01).explained
    assert not SiteDifference("s", 1.01 * FACTOR * 0.01, 0.01).explained


def test_differences_are_in_units_of_what_is_expected():
    rng = np.random.default_rng(0)
    mask = np.array([[True, True, False]])
    stream = rng.normal(size=(1, 3, 5)) * np.array([1, 1, 1, 100, 0.01])
    scores = rng.normal(7, 2, size=(1, 3, 9))
    off = {"block.0": stream.copy(), "logits": scores.copy()}
    off["block.0"][0, 1, 3] += 3.0
    off["logits"][0, 0, 4] -= 0.5
    off["logits"][0, 2] += 99  # padding
    found = verify._relative(off, {"block.0": stream, "logits": scores}, mask)
    real = stream[0, :2]
    assert found["block.0"] == pytest.approx(3.0 / np.sqrt((real[:, 3] ** 2).mean()))
    centred = scores[0, :2] - scores[0, :2].mean(-1, keepdims=True)
    assert found["logits"] == pytest.approx(0.5 / centred.std())


def test_shares_and_largest_difference_are_over_all_batches(gpt2, monkeypatch):
    """The reference is the model itself but for one logit of a batch, and another most
    likely token in the other.
    """
    batches = [
        PaddedTokens(np.array([[1, 2, 3]], np.int32), np.ones((1, 3), bool)),
        PaddedTokens(np.array([[4, 5, 6]], np.int32), np.array([[True, True, False]])),
    ]

    def reference(_, tokens, mask, positions):
        scores = np.array(run(gpt2, tokens, mask=mask, keep=("logits",))[1]["logits"], np.float64)
        if tokens[0, 0] == 1:
            scores[0, 1, 0] -= 50.0
        else:
            scores[0, 0, 7] += 40.0
        return {"logits": scores}

    monkeypatch.setattr(verify, "run_reference", reference)
    found = verify.compare(gpt2, None, lambda: None, batches)
    assert found.tokens == 5
    assert found.same_top_1 == pytest.approx(4 / 5)
    assert found.largest == pytest.approx(50.0, rel=1e-4)
    assert (found.verdict, found.first) == ("WRONG", "logits")


# --- studies --------------------------------------------------------------------------------------


def test_a_study_reports_the_rows_that_it_names():
    rows = [
        {"map": "mat", "layer": 1, "target": 2, "metric": "linearity", "value": 0.1},
        {"map": "attn", "layer": 1, "metric": "linearity", "value": 0.2},
        {"map": "ridge", "layer": 3, "metric": "accuracy", "value": 0.3},
        {"map": "mat", "confidence": "gap", "metric": "layers_saved@0.95", "value": 0.4},
        {"map": "mat", "confidence": "entropy", "metric": "layers_saved@0.95", "value": 0.5},
        {"map": "id", "confidence": "gap", "metric": "layers_saved@0.95", "value": 0.6},
    ]
    wanted = {"linearity": ("mat",), "accuracy": ("ridge",), "layers_saved@0.95": ("mat", "id")}
    found = reported("cosine", {"rows": rows}, wanted)
    assert [(row["map"], row["of"], row["value"], row.get("target")) for row in found] == [
        ("cosine", "mat", 0.1, 2),
        ("cosine", "ridge", 0.3, 3),
        ("cosine, mat", "mat", 0.4, None),
        ("cosine, id", "id", 0.6, None),
    ]
