"""Runs with flags that no other test gives: `kept` holds all that they leave against
what they left before.
"""

import json

import pytest

from tests import kept
from tests.inside import call, text
from tests.test_reference import REFERENCE

BERT = REFERENCE / "bert"
FEW = {"corpus": text(), "num_fit": 80, "num_eval": 31, "seed": 2}
JMAT = {**FEW, "protocol": "jmat", "positions_per_sentence": 2}

RUNS = {
    "early_exit of a masked model": ("early_exit", {"model": BERT, "timing_examples": 0, **FEW}),
    "linearity of a masked model": ("linearity", {"model": BERT, "parts": False, **FEW}),
    "r2 of a masked model": ("r2", {"model": BERT, "fit_tokens": "all", **FEW, "protocol": "jmat"}),
    "parts of a masked model": (
        "submodule_ablation", {"model": BERT, "layers": "2", "maps": "mat_attn,mat", "refit": "sequential", **FEW}
    ),
    "probe of a masked model": ("probe", {"model": BERT, **JMAT}),
    "peek at a masked model": ("peek", {"model": BERT, "layers": "1", "top": 2, **FEW}),
    "peek": ("peek", {"layers": "0,1", "top": 2, **FEW}),
    "cross_corpus": ("cross_corpus", {"layers": "0,2", **FEW, "num_fit": 258, "num_eval": 2}),
    "prune spans": (
        "prune",
        {"method": "merge,map", "remove": 2, "spans": True, "score": "angular", "refit": "sequential", "ridge": 3,
         "merge_from": "output", **JMAT},
    ),
    "prune a masked model": (
        "prune",
        {"model": BERT, "method": "map,distil", "remove": 1, "rescore": True, "score": "linearity_without_residual",
         "distil_steps": 3, "kl_weight": 0.5, "distil_loss": "plain", **FEW, "num_fit": 200},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.slow] * (name in ("prune spans", "prune a masked model"))
        )
        for name in RUNS
    ],
)
def test_a_run_leaves_what_it_left_before(name):
    script, flags = RUNS[name]
    outcome = call(script, **flags)
    assert kept.is_kept(outcome)


def test_tasks_of_a_pruned_model_run_it_with_its_maps(tmp_path):
    pruned = call("prune", "--save", method="map", score="block_influence", **FEW)
    (tmp_path / "mine.jsonl").write_text(
        "\n".join(
            json.dumps(
                {
                    "context": f"Returns the {word} of",
                    "choices": ["the value", "a list", "it"],
                    "answer": k % 3,
                }
            )
            for k, word in enumerate(("name", "type", "size", "index"))
        )
    )
    lines = text().read_text("utf-8").split("\n")[:20]
    (tmp_path / "few.txt").write_text("\n".join(lines))
    (tmp_path / "fewer.txt").write_text("\n".join(lines[:7]))
    texts = [tmp_path / "few.txt", tmp_path / "fewer.txt"]
    given = {"text": texts, "tasks": tmp_path / "mine.jsonl", "seed": 1}
    whole, less = (
        call("tasks", model=model, **given) for model in (REFERENCE / "gpt2", pruned.out / "model")
    )
    assert kept.is_kept(less)
    for path in texts:
        assert whole.one(text=str(path))["value"] < less.one(text=str(path))["value"]
