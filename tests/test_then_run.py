"""Jumps between inner layers, behind which the other blocks run, by hand."""

import numpy as np
import pytest

import jmat
from jmat.data.examples import mask_positions
from jmat.metrics.bootstrap import bootstrap_counts
from jmat.studies import layer_jump
from tests.test_reference import REFERENCE
from tests.test_streaming import few


@pytest.fixture(scope="module", params=["gpt2", pytest.param("bert", marks=pytest.mark.slow)])
def lab(request):
    model = request.getfixturevalue(request.param)
    examples = request.getfixturevalue(f"{request.param}_examples")
    examples = type(examples)(few(examples.fit, 400), few(examples.eval, 24))
    _, tokenizer = jmat.load(str(REFERENCE / request.param))
    options = layer_jump.Options(then_run=True, seed=2)
    results = layer_jump.run(model, examples, options, tokenizer=tokenizer)
    mask = None if model.config.causal else tokenizer.mask_token_id
    return model, mask_positions(examples.eval, mask), results


def predictions(model, split, sites):
    """Log-probabilities at each example, sentence by sentence, unpadded."""
    starts = np.cumsum([0, *split.lengths])
    found = []
    for row, position in zip(split.rows, split.positions, strict=True):
        tokens = split.tokens[starts[row] : starts[row + 1]][None]
        x, _ = jmat.run(model, tokens, sites=sites)
        found.append(np.asarray(jmat.logits(model, x[0, position]), np.float64))
    scores = np.stack(found)
    scores -= scores.max(-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def test_figures_by_hand(lab):
    model, split, results = lab
    full = predictions(model, split, {})
    counts = bootstrap_counts(len(full), groups=split.rows, samples=1000, seed=2)
    for i, j, name in ((0, 1, "mat"), (0, 2, "mat"), (0, 2, "id"), (1, 2, "mat")):
        stand_in = results.maps[f"mat.{i}.{j}"] if name == "mat" else jmat.Identity()
        short = predictions(model, split, jmat.Shortcut(i, j, stand_in))
        top = np.argsort(-full, axis=1)[:, :5]
        figures = {
            "precision@1": short.argmax(1) == full.argmax(1),
            "precision@5": (short.argmax(1)[:, None] == top).any(1),
            "surprisal": -np.take_along_axis(full, short.argmax(1)[:, None], axis=1)[:, 0],
            "kl": (np.exp(full) * (full - short)).sum(1),
        }
        for metric, values in figures.items():
            label = {"map": name, "layer": i, "target": j, "metric": metric}
            (row,) = [row for row in results.rows if label.items() <= row.items()]
            assert row["value"] == pytest.approx(values.mean(), rel=1e-3, abs=1e-5), label
            ends = np.percentile(counts @ values / counts.sum(1), [2.5, 97.5])
            assert (row["low"], row["high"]) == pytest.approx(ends, rel=2e-3, abs=1e-4)
            assert row["n"] == len(split.rows)


def test_every_pair_has_rows_and_the_final_ones_stay(lab):
    model, _, results = lab
    L = model.config.layers
    pairs = {(row["map"], row["layer"], row["target"]) for row in results.rows}
    inner = {(name, i, j) for name in ("mat", "id") for j in range(1, L) for i in range(j)}
    assert pairs == inner | {(name, i, L) for name in ("mat", "id") for i in range(L + 1)}
    assert len(results.rows) == len(pairs) * len({row["metric"] for row in results.rows})


def test_table_and_figures_show_both(lab):
    model, _, results = lab
    L = model.config.layers
    by_layer, mat, identity = results.table().split("\n\n")[:3]
    assert len(by_layer.splitlines()) == 3 + L + 1
    value = {
        (row["layer"], row["target"]): f"{row['value']:.3f}"
        for row in results.rows
        if row["map"] == "mat" and row["metric"] == "precision@1"
    }
    assert mat.startswith("precision@1 of mat from layer i (down) to j (across)")
    lines = [line.split() for line in mat.splitlines()[-L:]]
    for i, line in enumerate(lines):
        assert line[-(L - i) :] == [value[i, j] for j in range(i + 1, L + 1)]
    assert identity.startswith("precision@1 of id")
    assert list(results.figures) == ["layer_jump.png", "layer_jump_pairs.png"]
    panel, other, bar = results.plot("layer_jump_pairs").axes
    grid = panel.images[0].get_array()
    assert grid[0, 1] == pytest.approx(float(value[0, 2]), abs=6e-4)
    assert (panel.get_title(), other.get_title()) == ("linear map", "identity")
    assert bar.get_xlabel() + bar.get_ylabel() == "precision@1"


def test_other_targets_are_refused():
    with pytest.raises(ValueError, match="leave out targets='final'"):
        layer_jump.Options(then_run=True, targets="final")
