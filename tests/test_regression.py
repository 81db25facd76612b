"""Least squares in float32 against float64, at the condition numbers and scales that
activations have.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import LinearRegression, Ridge

from jmat.maps import least_squares as regression
from jmat.maps.conditioning import RANK_EPS
from jmat.maps.least_squares import factorise, factorise_each, lstsq

# One shape for most tests: they share a compiled program.
N, D, R = 300, 40, 6


def _orthogonal(rng, n, d):
    return np.linalg.qr(rng.standard_normal((n, d)))[0]


def _inputs(rng, condition, outlier=1.0):
    """Inputs [N, D] of the given condition number, with three columns `outlier` times
    as large.
    """
    spectrum = np.geomspace(1, 1 / condition, D)
    X = np.sqrt(N) * (_orthogonal(rng, N, D) * spectrum) @ _orthogonal(rng, D, D).T
    X[:, :3] *= outlier
    return X.astype(np.float32)


def _relative(got, expected):
    return np.linalg.norm(np.asarray(got, np.float64) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("outlier", [1.0, 1000.0])
@pytest.mark.parametrize("condition", [1e1, 1e2, 1e3, 1e4, 1e5, 1e6])
def test_recovers_known_map_at_any_condition_number(condition, outlier):
    rng = np.random.default_rng(0)
    X = _inputs(rng, condition, outlier)
    W = rng.standard_normal((D, R))
    W[:3] /= outlier
    Y = (X.astype(np.float64) @ W).astype(np.float32)
    solution = lstsq(X, Y)
    weights = np.asarray(solution.weights, np.float64)
    assert solution.weights.dtype == jnp.float32
    assert int(solution.rank) == D
    assert _relative(X.astype(np.float64) @ weights, Y) < 2e-6
    # The map itself is only determined up to rounding times the condition number, once the scales
    # are taken out.
    assert _relative(
        weights * np.linalg.norm(X, axis=0)[:, None], W * np.linalg.norm(X, axis=0)[:, None]
    ) < max(2e-6, 1e-7 * condition)


@pytest.mark.parametrize(
    ("condition", "outlier", "bound"), [(1e1, 1, 1e-6), (1e3, 1, 1e-5), (1e3, 1000, 1e-5)]
)
def test_noisy_predictions_match_float64(condition, outlier, bound):
    rng = np.random.default_rng(1)
    X = _inputs(rng, condition, outlier)
    Y = rng.standard_normal((N, R)).astype(np.float32) + X[:, 3 : 3 + R]
    expected = (
        LinearRegression(fit_intercept=False)
        .fit(X.astype(np.float64), Y.astype(np.float64))
        .predict(X)
    )
    solution = lstsq(X, Y)
    assert (
        _relative(X.astype(np.float64) @ np.asarray(solution.weights, np.float64), expected) < bound
    )
    np.testing.assert_allclose(solution.residual, np.sum((Y - expected) ** 2, axis=0), rtol=1e-5)


def test_ignores_outliers_where_jax_numpy_does_not():
    rng = np.random.default_rng(2)
    X = _inputs(rng, 1e2, 1000)
    W = rng.standard_normal((D, R))
    W[:3] /= 1000
    Y = (X.astype(np.float64) @ W).astype(np.float32)
    assert (
        _relative(X.astype(np.float64) @ np.asarray(jnp.linalg.lstsq(X, Y)[0], np.float64), Y)
        > 1e-2
    )
    assert _relative(X.astype(np.float64) @ np.asarray(lstsq(X, Y).weights, np.float64), Y) < 1e-6


@pytest.mark.parametrize("outlier", [1.0, 1000.0])
@pytest.mark.parametrize("kind", ["duplicate", "zero", "low rank"])
def test_rank_deficient_gives_the_minimum_norm_solution(kind, outlier):
    rng = np.random.default_rng(3)
    X = _inputs(rng, 1e2, outlier)
    rank = {"duplicate": 35, "zero": 39, "low rank": 8}[kind]
    if kind == "duplicate":
        X[:, 35:] = X[:, 5:10]
    elif kind == "zero":
        X[:, 20] = 0
    else:
        # Small integers: the product is exact, so float64 sees the same rank.
        X = (rng.integers(-3, 4, (N, 8)) @ rng.integers(-3, 4, (8, D))).astype(np.float32)
        X[:, :3] *= outlier
    Y = rng.standard_normal((N, R)).astype(np.float32)
    solution = lstsq(X, Y)
    expected = np.linalg.lstsq(X.astype(np.float64), Y.astype(np.float64), rcond=1e-12)[0]
    assert int(solution.rank) == rank
    assert _relative(solution.weights, expected) < 2e-4
    assert np.linalg.norm(solution.weights) <= np.linalg.norm(expected) * (1 + 1e-4)
    assert solution.describe() == (
        f"rank {rank} of 40: linearly dependent input coordinates; the minimum-norm solution is "
        "used"
    )


@pytest.mark.parametrize("intercept", [False, True])
def test_fewer_examples_than_dimensions(intercept):
    rng = np.random.default_rng(4)
    X = rng.standard_normal((24, 60)).astype(np.float32)
    X[:, 7] *= 100
    Y = rng.standard_normal((24, 3)).astype(np.float32)
    reference = LinearRegression(fit_intercept=intercept).fit(
        X.astype(np.float64), Y.astype(np.float64)
    )
    solution = lstsq(X, Y, intercept=intercept)
    assert int(solution.rank) == 24 - intercept
    assert solution.describe().startswith(
        f"rank {24 - intercept} of 60: fewer examples than dimensions"
    )
    assert _relative(solution.weights, reference.coef_.T) < 1e-5
    assert np.all(np.asarray(solution.residual) < 1e-7)
    if intercept:
        np.testing.assert_allclose(solution.bias, reference.intercept_, atol=1e-5)


def test_intercept_survives_a_large_offset():
    rng = np.random.default_rng(5)
    X = (rng.standard_normal((N, D)) + 300 * rng.standard_normal(D)).astype(np.float32)
    W, b = rng.standard_normal((D, R)), 50 * rng.standard_normal(R)
    Y = (X.astype(np.float64) @ W + b).astype(np.float32)
    solution = lstsq(X, Y, intercept=True)
    assert solution.bias is not None
    assert _relative(solution.weights, W) < 1e-4
    prediction = X.astype(np.float64) @ np.asarray(solution.weights, np.float64) + np.asarray(
        solution.bias
    )
    assert _relative(prediction, Y) < 1e-6
    assert lstsq(X, Y).bias is None


def test_intercept_of_many_examples_far_from_zero():
    # Summed in one pass, float32 means of 9,000 values near 3,000 are off by 0.1.
    rng = np.random.default_rng(12)
    X = (rng.standard_normal((9000, 4)) + 3000 * rng.standard_normal(4)).astype(np.float32)
    Y = (X.astype(np.float64) @ rng.standard_normal((4, 3))).astype(np.float32)
    solution = lstsq(X, Y, intercept=True)
    prediction = X.astype(np.float64) @ np.asarray(solution.weights, np.float64) + np.asarray(
        solution.bias
    )
    np.testing.assert_allclose(prediction.mean(0), Y.astype(np.float64).mean(0), rtol=0, atol=5e-3)


def test_constant_coordinate_carries_no_weight_beside_an_intercept():
    rng = np.random.default_rng(6)
    X = rng.standard_normal((N, D)).astype(np.float32)
    X[:, 4] = 300 + rng.choice(np.float32([0, 3e-5]), N)  # constant up to its last bit
    Y = rng.standard_normal((N, R)).astype(np.float32)
    solution = lstsq(X, Y, intercept=True)
    assert int(solution.rank) == D - 1
    np.testing.assert_allclose(solution.weights[4], 0, atol=1e-6)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("n", [N, 20])
@pytest.mark.parametrize("ridge", [0.1, 100])
def test_ridge_matches_scikit_learn(ridge, n, intercept):
    rng = np.random.default_rng(7)
    X = _inputs(rng, 1e2, 100)[:n]
    Y = (3 + rng.standard_normal((n, R))).astype(np.float32)
    reference = Ridge(ridge, fit_intercept=intercept, solver="svd").fit(
        X.astype(np.float64), Y.astype(np.float64)
    )
    solution = lstsq(X, Y, ridge=ridge, intercept=intercept)
    assert _relative(solution.weights, reference.coef_.T) < 1e-4
    if n == 20:
        assert solution.describe().endswith(f"ridge {ridge:g} makes it unique")


def test_explicit_rcond_truncates_as_numpy_does():
    rng = np.random.default_rng(8)
    X = _inputs(rng, 1e4, 10)
    Y = rng.standard_normal((N, R)).astype(np.float32)
    weights, _, rank, _ = np.linalg.lstsq(X.astype(np.float64), Y.astype(np.float64), rcond=1e-2)
    solution = lstsq(X, Y, rcond=1e-2)
    assert int(solution.rank) == rank < D
    assert _relative(solution.weights, weights) < 1e-4


def test_statistics_are_those_of_the_problem():
    rng = np.random.default_rng(9)
    X = _inputs(rng, 1e3, 10)
    Y = rng.standard_normal((N, R)).astype(np.float32)
    solution = lstsq(X, Y)
    assert solution.n == N
    np.testing.assert_allclose(solution.condition, np.linalg.cond(X.astype(np.float64)), rtol=1e-3)
    residual = Y - X.astype(np.float64) @ np.asarray(solution.weights, np.float64)
    np.testing.assert_allclose(solution.residual, np.sum(residual**2, axis=0), rtol=1e-5)
    assert solution.describe().startswith("full rank 40 from 300 examples, condition number ")


def test_all_zero_inputs_give_the_zero_map():
    solution = lstsq(np.zeros((N, D), np.float32), np.ones((N, R), np.float32))
    assert int(solution.rank) == 0
    assert float(solution.condition) == 1
    np.testing.assert_array_equal(solution.weights, 0)
    np.testing.assert_array_equal(solution.residual, N)


def test_stacked_targets_equal_separate_fits():
    rng = np.random.default_rng(10)
    X = rng.standard_normal((N, D)).astype(np.float32)
    Y = rng.standard_normal((N, 2 * R)).astype(np.float32)
    stacked = lstsq(X, Y)
    for part in (slice(0, R), slice(R, 2 * R)):
        np.testing.assert_allclose(
            stacked.weights[:, part], lstsq(X, Y[:, part]).weights, atol=1e-6
        )


def test_half_precision_is_solved_in_float32():
    X = jax.random.normal(jax.random.key(0), (N, D), jnp.bfloat16)
    solution = lstsq(X, X[:, :R].astype(jnp.float32))
    assert solution.weights.dtype == jnp.float32
    np.testing.assert_allclose(solution.weights, np.eye(D)[:, :R], atol=1e-5)


def test_new_values_and_more_targets_do_not_retrace():
    rng = np.random.default_rng(11)
    programs = regression._factorise, regression._solve
    before = [program._cache_size() for program in programs]
    for ridge in (0.5, 1.0, 2.0):
        factors = factorise(rng.standard_normal((31, 7)).astype(np.float32), ridge=ridge)
        for _ in range(2):
            factors.solve(rng.standard_normal((31, 7)).astype(np.float32))
    assert [program._cache_size() for program in programs] == [count + 1 for count in before]


@pytest.mark.parametrize("how", [{}, {"intercept": True}, {"ridge": 3.0}])
def test_factors_serve_any_targets(how):
    rng = np.random.default_rng(12)
    sources = [rng.standard_normal((60, D)).astype(np.float32) for D in (3, 5, 4)]
    sources[1][:, 4] = sources[1][:, 3]  # rank deficient
    targets = [rng.standard_normal((60, R)).astype(np.float32) for R in (2, 7)]
    for X, factors in zip(sources, factorise_each(sources, **how), strict=True):
        for Y in targets:
            want, got = lstsq(X, Y, **how), factors.solve(Y, residual=False)
            assert got.residual is None
            jax.tree.map(
                np.testing.assert_array_equal, got, dataclasses.replace(want, residual=None)
            )
            centred = Y - Y.mean(0) if "intercept" in how else Y
            plain = lstsq(X, Y, intercept="intercept" in how)
            explained = 1 - plain.residual.sum() / np.square(centred).sum()
            assert factors.explained(Y) == pytest.approx(float(explained), abs=2e-6)
    assert factors.explained(np.zeros((60, 2), np.float32)) == 1
    with pytest.raises(ValueError, match=r"expected Y \[60, R\], got \(59, 2\)"):
        factors.solve(targets[0][1:])


@pytest.mark.parametrize("mean", [100, 1000])
@pytest.mark.parametrize("n", [20, 39, 40])
def test_few_examples_far_from_zero_have_no_direction_of_rounding(n, mean):
    rng = np.random.default_rng(14)
    X = (rng.standard_normal((n, D)) + mean * rng.choice([-1, 1], D)).astype(np.float32)
    Y = rng.standard_normal((n, R)).astype(np.float32)
    others = X.mean(0, dtype=np.float64) + rng.standard_normal((50, D))
    solution = lstsq(X, Y, intercept=True)
    assert int(solution.rank) == n - 1
    exact = np.linalg.lstsq(
        X - X.mean(0, dtype=np.float64), Y - Y.mean(0, dtype=np.float64), rcond=1e-9
    )[0]
    expected = (others - X.mean(0, dtype=np.float64)) @ exact + Y.mean(0, dtype=np.float64)
    got = others @ np.asarray(solution.weights, np.float64) + np.asarray(solution.bias, np.float64)
    assert np.linalg.norm(got - expected) < 1e-6 * mean * np.linalg.norm(expected)


@pytest.mark.parametrize("n", [300, 25])
@pytest.mark.parametrize("scale", [1e2, 1e6])
def test_an_outlier_costs_a_deficient_source_nothing(scale, n):
    rng = np.random.default_rng(15)
    X = rng.standard_normal((n, D)).astype(np.float32)
    X[:, 3], X[:, 5] = X[:, 4], scale * X[:, 5]
    W = rng.standard_normal((D, R)) / np.where(np.arange(D) == 5, scale, 1)[:, None]
    Y = (X.astype(np.float64) @ W).astype(np.float32)
    solution = lstsq(X, Y)
    assert int(solution.rank) == min(n, D - 1)
    error = X.astype(np.float64) @ np.asarray(solution.weights, np.float64) - Y
    assert np.linalg.norm(error) < 2e-6 * np.linalg.norm(Y)


def test_values_whose_squares_overflow_are_refused():
    with pytest.raises(
        ValueError, match=r"the values of X reach .*e\+18, where sums of squares overflow"
    ):
        lstsq(np.full((900, 2), 2e18, np.float32), np.ones((900, 1), np.float32))


@pytest.mark.parametrize("rcond", [None, 3e-3])
@pytest.mark.parametrize("condition", [1e1, 1e3, 1e5, 3e7])
def test_rank_is_that_of_the_singular_values_whether_they_are_needed_or_not(condition, rcond):
    rng = np.random.default_rng(13)
    U, V = (np.linalg.qr(rng.standard_normal(shape))[0] for shape in ((N, D), (D, D)))
    X = (U * np.logspace(0, -np.log10(condition), D) @ V.T).astype(np.float32)
    s = np.linalg.svd(X if rcond else X / np.linalg.norm(X, axis=0), compute_uv=False)
    factors = factorise(X, rcond=rcond, condition=False)
    assert int(factors.rank) == np.sum(s > (rcond or RANK_EPS * np.finfo(np.float32).eps) * s[0])
    assert factors.condition is None


def test_solution_is_a_pytree():
    solution = lstsq(np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32))
    doubled = jax.jit(lambda s: jax.tree.map(lambda leaf: leaf + leaf, s))(solution)
    np.testing.assert_allclose(doubled.weights, 2 * np.eye(3), atol=1e-6)
    assert doubled.n == 3


@pytest.mark.parametrize("name", ["X", "Y"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_values_are_counted_and_named(name, bad):
    data = {"X": np.ones((6, 3), np.float32), "Y": np.ones((6, 2), np.float32)}
    data[name][1:3, 0] = bad
    with pytest.raises(
        ValueError, match=f"2 of the {data[name].size} values of {name} are NaN or infinite"
    ):
        lstsq(**data)


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((0, 3), (0, 2)), {}, "at least one example"),
        (((5, 3), (5, 2)), {"ridge": -1.0}, "ridge must be"),
        (((5, 3), (5, 2)), {"ridge": float("nan")}, "ridge must be"),
        (((5, 3), (5, 2)), {"rcond": 2.0}, "rcond must be"),
    ],
)
def test_bad_arguments_raise(shapes, options, message):
    X, Y = (np.ones(shape, np.float32) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        lstsq(X, Y, **options)
