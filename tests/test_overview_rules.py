"""Every claim is decided by all of its figures, at its published bounds, and says the
figures that decide it.
"""

import pytest

from jmat.studies.overview.claims import CLAIMS, verdicts
from jmat.studies.overview.rules import Evidence

L = 4
METRICS = ("precision@1", "precision@5", "precision@10")
# By layer, 0 .. L; each figure with an interval of its own.
MAT = {"precision@1": [0.3, 0.55, 0.62, 0.7, 1.0], "precision@5": [0.1, 0.71, 0.66, 0.8, 1.0],
       "precision@10": [0.2, 0.81, 0.85, 0.9, 1.0]}  # fmt: skip
LENS = [0.05, 0.28, 0.6, 0.4, 1.0]
PAIRS = [(i, j) for i in range(L) for j in range(i + 1, L + 1)]
STEPS = {
    "linearity": [0.992, 0.994, 0.99, 0.998],
    "linearity_held_out": [0.95, 0.9, 0.85, 0.97],
    "linearity_without_residual_held_out": [0.5, 0.7, -0.25, 0.6],
    "contribution_norm": [0.2, 0.94, 0.4, 0.3],
}
PRUNED = {  # of the whole model, of one block less, of two
    ("map", "perplexity"): [40.0, 47.0, 41.5],
    ("map", "kl"): [0.0, 0.5, 0.2],
    ("delete", "kl"): [0.0, 0.1, 0.35],
    ("distil", "kl"): [0.0, 0.6, 0.09],
}


def row(value, width=0.03, **fields):
    return {"value": value, "low": value - width, "high": value + width / 2, "n": 9} | fields


def evidence(**changes):
    """Figures of which no two are equal; `changes` are lists that take their places."""
    jump = [
        row(value, map=kind, layer=layer, target=L, metric=metric)
        for kind, of in (
            ("mat", MAT | changes.get("mat", {})),
            ("id", dict.fromkeys(METRICS, LENS)),
        )
        for metric in METRICS
        for layer, value in enumerate(of[metric])
    ]
    jump += [row(9.0, map="mat", layer=0, target=L, metric="surprisal")]
    r2 = [
        row(0.5 + 0.04 * k, map="mat", layer=i, target=j, metric="r2")
        for k, (i, j) in enumerate(PAIRS)
    ]
    worse = changes.get("identity", [0.45 - 0.05 * k for k in range(len(PAIRS))])
    r2 += [
        row(v, map="id", layer=i, target=j, metric="r2")
        for v, (i, j) in zip(worse, PAIRS, strict=True)
    ]
    r2 += [row(0.99, map="id", layer=0, target=1, metric="r2_weighted")]
    saved = {"mat": 0.31, "id": 0.27, "mat - id": 0.041} | changes.get("saved", {})
    exits = [
        row(value + more, map=kind, confidence=confidence, metric=metric)
        for kind, value in saved.items()
        for confidence, metric, more in (
            ("entropy", "layers_saved@0.95", 0.2), ("gap", "layers_saved@0.90", 0.1), ("gap", "layers_saved@0.95", 0)
        )
    ]  # fmt: skip
    parts = {"mat": [1.0] * 5, "mat_attn": [0.5, 0.8, 0.9, 0.98, 1.0], "mat_ffn": [0.6, 0.7, 0.76, 0.9, 1.0],
             "mat_ln1_ln2": [0.2, 0.5, 0.9, 0.98, 1.0]} | changes.get("parts", {})  # fmt: skip
    replaced = [
        row(value, map=kind, layer=layer, target=L, metric="precision@1")
        for kind, values in parts.items()
        for layer, value in enumerate(values)
    ]
    linear = [
        row(value, map="mat", layer=layer, target=layer + 1, metric=metric)
        for metric, values in (STEPS | changes.get("steps", {})).items()
        for layer, value in enumerate(values)
    ]
    linear += [row(0.1, map="mat", layer=0, target=2, metric=metric) for metric in STEPS]
    linear += [row(0.1, map="attn", layer=0, metric=metric) for metric in STEPS]
    pruned = [
        row(value, method=method, removed=k, blocks=("none", "2", "1-2")[k], metric=metric)
        for (method, metric), values in (PRUNED | changes.get("pruned", {})).items()
        for k, value in enumerate(values)
    ]
    rows = {
        "layer_jump": jump,
        "r2": r2,
        "early_exit": exits,
        "submodule_ablation": replaced,
        "linearity": linear,
    }
    return Evidence(rows | {"prune": pruned}, L, True, "linearity")


def decided(seen):
    """Verdict and figures by the first words of each claim."""
    return {
        " ".join(each.statement.split()[:5]): (each.verdict, each.figures)
        for each in verdicts(seen)
    }


SAID = {
    "A linear map reads the": "Intervals are apart at 3 of 4 layers; precision@1 of the map is 0.30 to 0.70, of the "
    "logit lens 0.05 to 0.60.",
    "The advantage of the map": "The differences are 2.0 to 30.0 points, 21.0 on average; 3 of 4 layers have 15 or "
    "more.",
    "Early layers already hold much": "At layers 1 to 2: precision@1 0.55 to 0.62; precision@5 0.66 to 0.71; "
    "precision@10 0.81 to 0.85.",
    "A linear map of a": "Intervals are apart for 10 of 10 pairs; r2 of the map is 0.50 to 0.86, of the identity 0.00 "
    "to 0.45.",
    "Early exit by the map": "Share of the blocks saved: map 0.310 [0.280, 0.325], logit lens 0.270 [0.240, 0.285]; "
    "difference 0.041 [0.011, 0.056].",
    "Of the sub-modules, attention bears": "Mean precision@1: attention 0.795, feed-forward 0.740, layer norms 0.645.",
    "The step from a layer": "In sample 0.994 on average (0.990 to 0.998); held out 0.917 (0.850 to 0.970).",
    "Without the residual stream, the": "Lower at 4 of 4 steps; held out with the residual 0.850 to 0.970, without "
    "-0.250 to 0.700.",
    "A block adds little to": "Below 1 at 4 of 4 steps (0.20 to 0.94; the largest is of block 1).",
    "The most linear blocks can": "Without blocks 1-2: perplexity 41.5 [41.5, 41.5], of the whole model 40.0 [40.0, "
    "40.0], +3.8 %.",
    "A linear map in the": "Without blocks 1-2, KL in nats: map 0.200 [0.170, 0.215], delete 0.350 [0.320, 0.365].",
    "Distillation of the maps wins": "Without blocks 1-2, KL in nats: distil 0.090 [0.060, 0.105], map 0.200 [0.170, "
    "0.215].",
}  # fmt: skip


@pytest.mark.parametrize("claim", SAID)
def test_the_figures_that_decide_are_said(claim):
    assert decided(evidence())[claim] == ("holds", SAID[claim])


def ramp(metric, layer, value):
    """The figures of the map with another one at one layer."""
    return {metric: [*MAT[metric][:layer], value, *MAT[metric][layer + 1 :]]}


BOUNDS = [
    # At more than half of the layers, and not at half of them.
    ("A linear map reads the", {"mat": ramp("precision@1", 3, 0.44)}, False),
    ("The advantage of the map", {"mat": ramp("precision@1", 1, 0.429)}, False),
    ("The advantage of the map", {"mat": ramp("precision@1", 1, 0.43001)}, True),
    # The lowest published figures count as reached; the embedding and the second half do not
    # matter.
    ("Early layers already hold much", {"mat": ramp("precision@1", 1, 0.28)}, True),
    ("Early layers already hold much", {"mat": ramp("precision@1", 2, 0.279)}, False),
    ("Early layers already hold much", {"mat": ramp("precision@5", 2, 0.52)}, True),
    ("Early layers already hold much", {"mat": ramp("precision@5", 1, 0.519)}, False),
    ("Early layers already hold much", {"mat": ramp("precision@10", 1, 0.62)}, True),
    ("Early layers already hold much", {"mat": ramp("precision@10", 2, 0.619)}, False),
    ("Early layers already hold much", {"mat": ramp("precision@1", 3, 0.1)}, True),
    # One pair whose intervals meet.
    ("A linear map of a", {"identity": [0.45] * 9 + [0.835]}, False),
    ("A linear map of a", {"identity": [0.45] * 9 + [0.81]}, True),
    # An interval that holds 0.
    ("Early exit by the map", {"saved": {"mat - id": 0.029}}, False),
    ("Early exit by the map", {"saved": {"mat - id": 0.031}}, True),
    ("Of the sub-modules, attention bears", {"parts": {"mat_ffn": [0.8, 0.8, 0.8, 0.8, 0.0]}}, False),
    ("Of the sub-modules, attention bears", {"parts": {"mat_ln1_ln2": [0.9, 0.9, 0.9, 0.9, 0.0]}}, False),
    ("The step from a layer", {"steps": {"linearity": [0.99, 0.99, 0.99, 0.9899]}}, False),
    ("The step from a layer", {"steps": {"linearity": [0.9, 1.0, 1.03, 1.04]}}, True),
    ("Without the residual stream, the", {"steps": {"linearity_held_out": [0.95, 0.74, 0.85, 0.97]}}, False),
    ("Without the residual stream, the", {"steps": {"linearity_held_out": [0.95, 0.75, 0.85, 0.97]}}, True),
    ("A block adds little to", {"steps": {"contribution_norm": [0.2, 0.986, 0.4, 0.3]}}, False),
    ("A block adds little to", {"steps": {"contribution_norm": [0.2, 0.984, 0.4, 0.3]}}, True),
    # The most pruned model is held against the whole one; the one between does not matter.
    ("The most linear blocks can", {"pruned": {("map", "perplexity"): [40.0, 40.0, 42.1]}}, False),
    ("The most linear blocks can", {"pruned": {("map", "perplexity"): [40.0, 90.0, 42.0]}}, True),
    ("A linear map in the", {"pruned": {("map", "kl"): [0.0, 0.01, 0.31]}}, False),
    ("A linear map in the", {"pruned": {("map", "kl"): [0.0, 0.9, 0.3]}}, True),
    ("Distillation of the maps wins", {"pruned": {("distil", "kl"): [0.0, 0.01, 0.16]}}, False),
    ("Distillation of the maps wins", {"pruned": {("distil", "kl"): [0.0, 0.9, 0.15]}}, True),
]  # fmt: skip


@pytest.mark.parametrize(("claim", "changes", "holds"), BOUNDS)
def test_claims_hold_up_to_their_bounds(claim, changes, holds):
    assert decided(evidence(**changes))[claim][0] == ("holds" if holds else "does not hold")


@pytest.mark.parametrize(("mean", "verdict"), [(17.0, "does not hold"), (17.1, "holds")])
def test_masked_models_have_their_own_published_advantage(mean, verdict):
    figures = [value + mean / 100 for value in LENS]
    seen = evidence(
        mat={"precision@1": [*figures[:2], figures[2] + 0.01, figures[3] - 0.0100001, 1.0]}
    )
    assert decided(seen._replace(causal=False))["The advantage of the map"][0] == verdict


@pytest.mark.parametrize(
    "study", ["layer_jump", "r2", "early_exit", "submodule_ablation", "linearity", "prune"]
)
def test_a_claim_without_its_study_is_not_tested_and_all_others_are(study):
    seen = evidence()
    lacking = seen._replace(rows={name: rows for name, rows in seen.rows.items() if name != study})
    before, after = decided(seen), decided(lacking)
    changed = [claim for claim in before if before[claim] != after[claim]]
    counts = {
        "layer_jump": 3,
        "r2": 1,
        "early_exit": 1,
        "submodule_ablation": 1,
        "linearity": 3,
        "prune": 3,
    }
    assert len(changed) == counts[study]
    assert {after[claim][0] for claim in changed} == {"not tested"}


def test_claims_keep_their_words_from_table_to_verdict():
    for claim, verdict in zip(CLAIMS, verdicts(evidence()), strict=True):
        assert (verdict.paper, verdict.statement, verdict.published, verdict.rule) == claim[:4]
    papers = [claim.paper.split()[0] for claim in CLAIMS]
    assert papers == ["Din"] * 7 + ["Razzhigaev"] * 9
