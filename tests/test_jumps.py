"""Jumps: least squares as numpy solves it, and what is read off them example by
example.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jmat.capture.moments import update, zeros
from jmat.maps.jumps import fit_jumps, fit_jumps_to_moments, jump_pairs
from jmat.maps.types import Identity, Linear
from jmat.studies.evaluation import evaluate

N, D, L = 80, 6, 3


@pytest.fixture(scope="module")
def streams():
    rng = np.random.default_rng(0)
    made = [rng.normal(2, 1, (N, D))]
    for _ in range(L):
        made.append(made[-1] @ rng.normal(size=(D, D)) + rng.normal(1, 1, (N, D)))
    return [stream.astype(np.float32) for stream in made]


def moments_of(streams, targets):
    sites = ("embed", *(f"block.{i}" for i in range(L)))
    empty = zeros(jump_pairs(L, targets=targets), dict.fromkeys(sites, D))
    return update(
        empty, {s: jnp.asarray(x) for s, x in zip(sites, streams, strict=True)}, jnp.ones(N)
    )


@pytest.mark.parametrize("route", ["memory", "lstsq", "streaming"])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("targets", ["all", "final"])
def test_maps_are_least_squares(streams, route, intercept, targets):
    how = {"targets": targets, "intercept": intercept}
    if route == "streaming":
        maps, solutions = fit_jumps_to_moments(moments_of(streams, targets), L, **how)
    else:
        maps, solutions = fit_jumps(streams, solver="lstsq" if route == "lstsq" else "qr", **how)
    expected = [(i, j) for i in range(L) for j in range(i + 1, L + 1) if targets == "all" or j == L]
    assert sorted(maps) == expected
    assert {i: solution.n for i, solution in solutions.items()} == dict.fromkeys(range(L), N)
    for (i, j), linear in maps.items():
        X, Y = (streams[layer].astype(np.float64) for layer in (i, j))
        X = np.hstack([X, np.ones((N, 1))]) if intercept else X
        solved = np.linalg.lstsq(X, Y, rcond=None)[0]
        np.testing.assert_allclose(linear.W, solved[:D], rtol=1e-3, atol=1e-3)
        assert (linear.bias is None) == (not intercept)
        if intercept:
            np.testing.assert_allclose(linear.bias, solved[D], rtol=1e-3, atol=1e-2)


def test_readings_are_the_shortcuts_own(gpt2):
    """Cross entropy of the text's token, token 0 included, and the gap over a short
    list; batch by batch.
    """
    rng = np.random.default_rng(1)
    width, V, n = gpt2.config.width, gpt2.config.vocab_size, 11
    final, stream = rng.normal(size=(2, n, width)).astype(np.float32)
    W = Linear(rng.normal(0, 0.2, (width, width)).astype(np.float32))
    targets = np.array([0, -1, V - 1, *rng.integers(V, size=n - 3)])
    words = np.array([0, 3, 5, 100])
    shortcuts = {("mat", 2): (W, stream), ("id", 2): (Identity(), stream)}
    values = evaluate(gpt2, final, shortcuts, targets=targets, words=words, examples_per_batch=4)
    for name, stand_in in (("mat", stream @ np.asarray(W.W)), ("id", stream)):
        scores = head_by_hand(gpt2, stand_in)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        found = values[name, 2]
        nats = np.where(targets >= 0, -np.log(p[np.arange(n), targets]), np.nan)
        np.testing.assert_allclose(found["cross_entropy"], nats, rtol=1e-3, atol=1e-3)
        short = np.sort(p[:, words] / p[:, words].sum(-1, keepdims=True))
        np.testing.assert_allclose(found["short_gap"], short[:, -1] - short[:, -2], atol=1e-3)
        assert found["top_1"].tolist() == scores.argmax(-1).tolist()
        full = head_by_hand(gpt2, final)
        assert found["precision@1"].tolist() == (full.argmax(-1) == scores.argmax(-1)).tolist()


def head_by_hand(model, x):
    """GPT-2's final norm and unembedding, in float64."""
    norm = model.final_norm
    x = x.astype(np.float64)
    centred = x - x.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + norm.eps)
    normed = normed * np.asarray(norm.scale[...], np.float64) + np.asarray(
        norm.bias[...], np.float64
    )
    return normed @ np.asarray(model.embed.tokens.table[...], np.float64).T
