"""The map that is chosen among those of single layers, by hand."""

import jax
import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

import jmat
from jmat.maps.kinds import choose_kind, parse_kind
from jmat.studies import map_zoo

RANK, LAYERS = 12, (1, 2, 3)
_logits = jax.jit(jmat.logits)


@pytest.fixture(scope="module")
def streams(gpt2, gpt2_examples):
    return list(jmat.capture(gpt2, gpt2_examples.fit, jmat.streams(gpt2)).values())


def reduced(X, Y):
    """A function: the best map of the rank, by scikit-learn and an SVD in float64."""
    model = LinearRegression().fit(X.astype(np.float64), Y)
    mean = Y.mean(0, dtype=np.float64)
    V = np.linalg.svd(model.predict(X) - mean, full_matrices=False)[2][:RANK].T
    return lambda new: (model.predict(new) - mean) @ V @ V.T + mean


def log_p(model, h):
    scores = np.asarray(_logits(model, h.astype(np.float32)), np.float64)
    scores -= scores.max(-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def best_layer(model, streams):
    """The layer whose map has the smallest mean KL at all layers, on held-out tokens."""
    N = len(streams[-1])
    first, rows = N - N // 8, np.arange(N - N // 8, N)
    rows = rows[:: -(-len(rows) // 256)]
    full = log_p(model, streams[-1][rows])
    kl = {}
    for layer in LAYERS:
        stand_in = reduced(streams[layer][:first], streams[-1][:first])
        short = [log_p(model, stand_in(streams[each][rows])) for each in LAYERS]
        kl[layer] = np.mean([(np.exp(full) * (full - each)).sum(-1).mean() for each in short])
    return min(kl, key=kl.get), kl


def test_the_choice_and_the_map(gpt2, streams):
    layer, kl = best_layer(gpt2, streams)
    assert len(set(kl.values())) == len(LAYERS)
    kind = parse_kind(f"one_jump_kl:{RANK}")
    stand_in = choose_kind(kind, gpt2, [streams[each] for each in LAYERS], streams[-1])
    expected = reduced(streams[layer], streams[-1])(streams[2])
    error = np.linalg.norm(np.asarray(stand_in(streams[2])) - expected) / np.linalg.norm(expected)
    assert error < 1e-5
    for other in {*LAYERS} - {layer}:
        wrong = reduced(streams[other], streams[-1])(streams[2])
        assert np.linalg.norm(wrong - expected) > 1e-2 * np.linalg.norm(expected)


@pytest.mark.slow
def test_the_study_has_one_map_for_all_layers(gpt2, gpt2_examples, streams):
    kinds = [f"one_jump_kl:{RANK}", f"one_jump_kl:{RANK}+int8", "affine"]
    options = map_zoo.Options(kinds=kinds, layers=LAYERS)
    results = map_zoo.run(gpt2, gpt2_examples, options)
    maps = [results.maps[f"one_jump_kl:{RANK}.{layer}.4"] for layer in LAYERS]
    layer, _ = best_layer(gpt2, streams)
    expected = reduced(streams[layer], streams[-1])(streams[3])
    for stand_in in maps:
        error = np.linalg.norm(np.asarray(stand_in(streams[3])) - expected)
        assert error < 1e-5 * np.linalg.norm(expected)
    (row,) = [
        row
        for row in results.rows
        if row["metric"] == "parameters" and row["map"] == f"one_jump_kl:{RANK}"
    ]
    assert row["value"] == 2 * 64 * RANK + 64


def test_weights_reach_the_fits(gpt2, streams):
    kind = parse_kind(f"one_jump_kl:{RANK}")
    sources = [streams[1]]  # a single layer: its map is chosen
    stand_in = choose_kind(kind, gpt2, sources, streams[-1], "norms")
    X, Y = (streams[l].astype(np.float64) for l in (1, -1))
    weights = 1 / np.linalg.norm(X, axis=1) / np.linalg.norm(Y, axis=1)
    model = LinearRegression().fit(X, Y, sample_weight=weights)
    mean = np.average(Y, axis=0, weights=weights)
    predicted = model.predict(X) - mean
    V = np.linalg.svd(np.sqrt(weights)[:, None] * predicted, full_matrices=False)[2][:RANK].T
    expected = predicted @ V @ V.T + mean
    error = np.linalg.norm(np.asarray(stand_in(streams[1])) - expected)
    assert error < 1e-4 * np.linalg.norm(expected)
    plain = np.asarray(choose_kind(kind, gpt2, sources, streams[-1])(streams[1]))
    assert np.linalg.norm(plain - expected) > 1e-3 * np.linalg.norm(expected)


def test_a_map_without_a_finite_kl_is_not_chosen(gpt2, streams, monkeypatch):
    kind = parse_kind(f"one_jump_kl:{RANK}")
    sources = [streams[layer] for layer in LAYERS]
    kl = iter([np.nan, 2.0, 3.0, 1.0, 1.0, 1.0, np.inf, 0.0, 0.0])
    monkeypatch.setattr("jmat.maps.one_jump._divergence", lambda *_: np.float32(next(kl)))
    found = choose_kind(kind, gpt2, sources, streams[-1])
    expected = reduced(streams[LAYERS[1]], streams[-1])(streams[2])
    error = np.linalg.norm(np.asarray(found(streams[2])) - expected)
    assert error < 1e-4 * np.linalg.norm(expected)
    monkeypatch.setattr("jmat.maps.one_jump._divergence", lambda *_: np.float32(np.nan))
    with pytest.raises(ValueError, match="no map of one layer has a finite KL"):
        choose_kind(kind, gpt2, sources, streams[-1])


def test_bad_input(gpt2, streams):
    with pytest.raises(ValueError, match="1 tokens are too few to choose a map on"):
        choose_kind(parse_kind("one_jump_kl:2"), gpt2, [streams[1][:1]], streams[4][:1])
    with pytest.raises(ValueError, match="'mat' is not chosen among the maps of single layers"):
        choose_kind(parse_kind("mat"), gpt2, [streams[1]], streams[4])
    with pytest.raises(ValueError, match="which kind 'one_jump_kl:8' needs"):
        map_zoo.Options(kinds=["one_jump_kl:8"], route="streaming")
