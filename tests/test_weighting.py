"""Weighted fits against scikit-learn with sample weights, and the cosine by its gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

import jmat
from jmat.maps.closed_forms import affine, linear, low_rank
from jmat.maps.kinds import parse_kinds
from jmat.maps.regression import Regression
from jmat.maps.weighting import weigh, weighed_moments
from jmat.studies import map_zoo
from jmat.studies.map_zoo.rows import NOT_WEIGHED, with_weights

N, D, E = 400, 12, 10


@functools.cache
def activations():
    """A few vectors are 300 times as long as the others, as in models with massive ones."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(N, D)) + 0.5
    X[::50] *= 300
    Y = X @ rng.normal(size=(D, E)) + rng.normal(size=(N, E)) * np.linalg.norm(X, axis=1)[:, None]
    return X.astype(np.float32), (Y + 1).astype(np.float32)


def cosines(A, B):
    return (A * B).sum(1) / np.linalg.norm(A, axis=1) / np.linalg.norm(B, axis=1)


def predicted(X, Y, weights, intercept=True):
    model = LinearRegression(fit_intercept=intercept).fit(X, Y, sample_weight=weights)
    return model.predict(X)


def by_hand(name):
    """The targets and weights of the last fit, in numpy."""
    X, Y = (each.astype(np.float64) for each in activations())
    if name == "norms":
        return X, Y, 1 / np.linalg.norm(X, axis=1) / np.linalg.norm(Y, axis=1)
    target, weights = Y, np.ones(N)
    for _ in range(3):
        Y_hat = predicted(X, target, weights)
        cosine = np.maximum(cosines(Y_hat, Y), 0.1)
        norm = np.linalg.norm(Y_hat, axis=1)
        weights = cosine / norm**2
        target = Y * (norm / cosine / np.linalg.norm(Y, axis=1))[:, None]
    return X, target, weights


@pytest.mark.parametrize("name", ["norms", "cosine"])
def test_weighted_fits_are_scikit_learns(name):
    X, target, weights = by_hand(name)
    source, Y = activations()
    weighed = weigh(name, source, Y)
    np.testing.assert_allclose(weighed.weights, weights / weights.mean(), rtol=1e-6)
    np.testing.assert_allclose(weighed.target, target, rtol=1e-6)
    pair = Regression(weighed_moments(source, weighed))
    assert pair.n == N
    for fit, intercept in ((affine, True), (linear, False)):
        found = np.asarray(fit(pair, None)(source), np.float64)
        wanted = predicted(X, target, weights, intercept)
        assert np.linalg.norm(found - wanted) < 1e-5 * np.linalg.norm(wanted)
    root = np.sqrt(weights)[:, None]
    full = predicted(X, target, weights)
    mean = np.average(target, axis=0, weights=weights)
    V = np.linalg.svd(root * (full - mean))[2][:3].T
    found = np.asarray(low_rank(pair, 3)(source), np.float64)
    assert np.linalg.norm(found - mean - (full - mean) @ V @ V.T) < 1e-5 * np.linalg.norm(full)


def test_equal_weights_change_no_bit():
    X, Y = activations()
    weighed = weigh("equal", X, Y)
    assert weighed.weights is None
    assert weighed.target is Y


def test_each_round_has_the_gradient_of_the_cosine():
    """At predictions y_hat, the squared error of a round and the cosine move a map alike."""
    X, Y = activations()
    pair = Regression(weighed_moments(X, weigh("equal", X, Y)))
    stand_in = affine(pair, None)
    Y_hat, Y = np.asarray(stand_in(X), np.float64), Y.astype(np.float64)
    cosine, norm = cosines(Y_hat, Y), np.linalg.norm(Y_hat, axis=1)
    kept = cosine > 0.1
    scaled = Y * (norm / cosine / np.linalg.norm(Y, axis=1))[:, None]
    step = (cosine / norm**2)[:, None] * (Y_hat - scaled)

    def each(y_hat, y):
        return y_hat @ y / jnp.linalg.norm(y_hat) / jnp.linalg.norm(y)

    with jax.enable_x64(True):
        gradient = np.asarray(jax.vmap(jax.grad(each))(jnp.asarray(Y_hat), jnp.asarray(Y)))
    scale = np.abs(gradient).max(1, keepdims=True)
    np.testing.assert_allclose((step / scale)[kept], (-gradient / scale)[kept], atol=1e-5)


def test_the_cosine_grows():
    X, Y = activations()
    mean = {}
    for name in ("equal", "cosine"):
        stand_in = affine(Regression(weighed_moments(X, weigh(name, X, Y))), None)
        mean[name] = cosines(np.asarray(stand_in(X), np.float64), Y).mean()
    assert mean["cosine"] > mean["equal"] + 0.01


def test_tokens_of_length_zero_do_not_count():
    X, Y = (each.copy() for each in activations())
    X[3], Y[7] = 0, 0
    for name in ("norms", "cosine"):
        weighed = weigh(name, X, Y)
        assert (weighed.weights == 0).nonzero()[0].tolist() == [3, 7]
        assert weighed.weights.mean() == pytest.approx(1)
    with pytest.raises(ValueError, match="all are zero"):
        weigh("norms", 0 * X, Y)


def test_map_zoo_and_fit_map_weigh(gpt2, gpt2_examples):
    options = map_zoo.Options(kinds=["affine", "mat"], layers=[2], weights="norms")
    results = map_zoo.run(gpt2, gpt2_examples, options)
    acts = jmat.capture(gpt2, gpt2_examples.fit, ["block.1", "block.3"])
    X, Y = (values.astype(np.float64) for values in acts.values())
    weights = 1 / np.linalg.norm(X, axis=1) / np.linalg.norm(Y, axis=1)
    for kind, intercept in (("affine", True), ("mat", False)):
        wanted = predicted(X, Y, weights, intercept)
        plain = predicted(X, Y, None, intercept)
        fit = jmat.fit_map(gpt2, gpt2_examples.fit, 2, 4, kind=kind, weights="norms")
        for stand_in in (results.maps[f"{kind}.2.4"], fit.map):
            found = np.asarray(stand_in(acts["block.1"]))
            assert np.linalg.norm(found - wanted) < 1e-4 * np.linalg.norm(wanted)
            assert np.linalg.norm(found - plain) > 1e-3 * np.linalg.norm(wanted)


def test_rows_say_which_kinds_are_not_weighed(gpt2, gpt2_examples):
    kinds = parse_kinds(["mat", "tuned", "jacobian:0.5", "one_jump_kl:4"])
    rows = with_weights([{"map": str(kind), "value": 1.0} for kind in kinds], kinds)
    assert [row.get("note") for row in rows] == [None, NOT_WEIGHED, NOT_WEIGHED, None]
    options = map_zoo.Options(kinds=["mat", "one_jump_kl:4"], layers=[3], weights="norms")
    assert {row.get("note") for row in map_zoo.run(gpt2, gpt2_examples, options).rows} == {None}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"weights": "norm"}, "weights='norm': expected one of equal, norms, cosine."),
        ({"weights": "norms", "solver": "lstsq"}, "leave out 'lstsq'"),
        ({"weights": "norms", "kind": "tuned"}, "kind 'tuned' is trained"),
    ],
)
def test_fit_map_refuses(gpt2, gpt2_examples, setting, message):
    with pytest.raises(ValueError, match=message):
        jmat.fit_map(gpt2, gpt2_examples.fit, 2, 4, **setting)


def test_the_study_refuses_weights_without_activations():
    with pytest.raises(ValueError, match="needs stored activations"):
        map_zoo.Options(weights="cosine", route="streaming", kinds=["mat"])
