"""Moments of activations a million spreads away from zero keep their digits, weights
and all.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmat.capture.moments import mean, update, zeros
from jmat.capture.statistics import second_moments, spread
from jmat.maps.from_moments import linearity, r2
from jmat.maps.types import Identity, Linear

D, N = 5, 400


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, D)) + 2.0**24 * np.array([1, 1, 0.5, 0, 1])
    y = x @ rng.normal(size=(D, D)) / 8 + rng.normal(size=(N, D))
    weights = rng.integers(0, 4, N).astype(np.float32)
    return np.asarray(x), np.asarray(y), weights


@pytest.fixture(scope="module")
def moments(data):
    """In float64, so that only the sums can round."""
    x, y, weights = data
    with jax.enable_x64(True):
        summed = zeros([("x", "y")], {"x": D, "y": D})
        for part in np.split(np.arange(N), 4):
            acts = {"x": jnp.asarray(x[part]), "y": jnp.asarray(y[part])}
            summed = update(summed, acts, jnp.asarray(weights[part], jnp.float64))
    return summed


def weighted(a, b, weights):
    a, b = (v - np.average(v, axis=0, weights=weights) for v in (a, b))
    return (a * weights[:, None]).T @ b


def test_sums_are_taken_about_the_first_batchs_mean(data, moments):
    x, y, weights = data
    first = np.split(np.arange(N), 4)[0]
    for site, values in (("x", x), ("y", y)):
        about = np.average(values[first], axis=0, weights=weights[first])
        np.testing.assert_allclose(moments.shift[site], about, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(
            mean(moments, site), np.average(values, axis=0, weights=weights), rtol=1e-12
        )
        assert float(moments.count[site]) == weights.sum()


def test_second_moments_keep_their_digits(data, moments):
    x, y, weights = data
    for source, target, a, b in (("x", "x", x, x), ("x", "y", x, y)):
        found = np.asarray(second_moments(moments, source, target, centred=True))
        expected = weighted(a, b, weights)
        np.testing.assert_allclose(found, expected, atol=1e-9 * np.abs(expected).max())
        plain = (a * weights[:, None]).T @ b
        found = np.asarray(second_moments(moments, source, target, centred=False))
        np.testing.assert_allclose(found, plain, rtol=1e-9)
    np.testing.assert_allclose(
        spread(moments, "y", centred=True), np.diag(weighted(y, y, weights)), rtol=1e-9
    )


def test_scores_from_moments_are_the_formulas():
    """r2 of a map, a map with bias and the identity; linearity with and without the
    residual, and adjusted.
    """
    rng = np.random.default_rng(1)
    x = rng.normal(size=(N, D)).astype(np.float32) + 3
    y = (x @ rng.normal(size=(D, D)) + rng.normal(size=(N, D)) + x).astype(np.float32)
    summed = update(
        zeros([("x", "y")], {"x": D, "y": D}),
        {"x": jnp.asarray(x), "y": jnp.asarray(y)},
        jnp.ones(N),
    )
    W, b = (rng.normal(size=shape).astype(np.float32) for shape in ((D, D), (D,)))
    X, Y = x.astype(np.float64), y.astype(np.float64)
    for shortcut, predicted in ((Identity(), X), (Linear(W), X @ W), (Linear(W, b), X @ W + b)):
        error, total = ((Y - predicted) ** 2).sum(0), ((Y - Y.mean(0)) ** 2).sum(0)
        found = r2(summed, "x", "y", shortcut)
        assert found["r2"] == pytest.approx((1 - error / total).mean(), rel=1e-5)
        assert found["r2_weighted"] == pytest.approx(1 - error.sum() / total.sum(), rel=1e-5)
    score = linearity(summed, "x", ["y"])["y"]
    A = np.hstack([X, np.ones((N, 1))])
    residual = ((Y - A @ np.linalg.lstsq(A, Y, rcond=None)[0]) ** 2).sum()
    change = Y - X
    assert score.score == pytest.approx(1 - residual / ((Y - Y.mean(0)) ** 2).sum(), rel=1e-5)
    assert score.without_residual == pytest.approx(
        1 - residual / ((change - change.mean(0)) ** 2).sum(), rel=1e-5
    )
    assert score.adjusted(0.5) == pytest.approx(1 - 0.5 * (N - 1) / (N - D - 1), rel=1e-12)
