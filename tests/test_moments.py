"""Moments: maps and scores from them alone equal those from the activations in memory,
at any condition number.
"""

import dataclasses

import jax
import numpy as np
import pytest
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.metrics import r2_score

from jmat.capture import moments as module
from jmat.capture.moments import merge, update, zeros
from jmat.capture.statistics import check_finite, second_moments
from jmat.maps import from_moments as from_moments
from jmat.maps.from_moments import anisotropy, fit, linearity, r2
from jmat.maps.least_squares import lstsq
from jmat.maps.types import Identity, Linear

PAIRS = [("x", "y"), ("x", "z"), ("y", "z")]
D = 12


def make_data(n=600, condition=10.0, noise=0.1, outlier=1.0, seed=0):
    """x of a condition number (of dependence), y and z linear in x but for noise;
    float32, far from zero mean.
    """
    rng = np.random.default_rng(seed)
    spectrum = np.geomspace(1, 1 / condition, D)
    mixed = rng.normal(size=(n, D)) * spectrum @ np.linalg.qr(rng.normal(size=(D, D)))[0]
    x = (mixed + 0.3 * rng.normal(size=D)).astype(np.float32)
    x[:, 3] *= np.float32(outlier)
    y = x @ (rng.normal(size=(D, D)) / np.maximum(np.abs(x).max(0), 1e-30)[:, None])
    y = y + noise * y.std(0) * rng.normal(size=(n, D)) + 2
    z = np.tanh(y) + 0.5 * y
    return {"x": x, "y": y.astype(np.float32), "z": z.astype(np.float32)}


def moments_of(data, pairs=PAIRS, batch=100, weights=None):
    sites = dict.fromkeys(site for pair in pairs for site in pair)
    moments = zeros(pairs, {site: data[site].shape[-1] for site in sites})
    n = len(data["x"])
    weights = np.ones(n, np.float32) if weights is None else weights
    for start in range(0, n, batch):
        part = slice(start, start + batch)
        moments = update(moments, {site: data[site][part] for site in sites}, weights[part])
    return moments


def predictions(solution, x):
    y = x.astype(np.float64) @ solution.weights
    return y if solution.bias is None else y + solution.bias


def reference_predictions(x, y, intercept):
    """Least squares in float64 on the activations themselves, scaled so that no outlier
    coordinate hides another.
    """
    X, Y = x.astype(np.float64), y.astype(np.float64)
    means = [values.mean(0) * intercept for values in (X, Y)]
    scaled = (X - means[0]) / np.linalg.norm(X - means[0], axis=0)
    return scaled @ np.linalg.lstsq(scaled, Y - means[1], rcond=0)[0] + means[1]


def relative(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want - want.mean(0))


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("outlier", [1.0, 1e4])
@pytest.mark.parametrize("condition", [1e1, 1e4, 1e6])
def test_predicts_what_float64_least_squares_does(condition, outlier, intercept):
    data = make_data(condition=condition, outlier=outlier)
    maps, solution = fit(moments_of(data, [("x", "y")]), "x", ["y"], intercept=intercept)
    want = reference_predictions(data["x"], data["y"], intercept)
    assert solution.rank == D
    assert relative(predictions(solution, data["x"]), want) < (1e-9 if condition < 1e6 else 1e-6)
    np.testing.assert_allclose(solution.residual, ((data["y"] - want) ** 2).sum(0), rtol=1e-6)
    if condition < 1e6 and outlier == 1:  # else scikit-learn drops directions
        wide = {site: value.astype(np.float64) for site, value in data.items()}
        theirs = (
            LinearRegression(fit_intercept=intercept).fit(wide["x"], wide["y"]).predict(wide["x"])
        )
        assert relative(predictions(solution, data["x"]), theirs) < 1e-8
    assert relative(np.asarray(maps["y"](data["x"]), np.float64), want) < (
        2e-6 if condition < 1e6 else 2e-4
    )


@pytest.mark.parametrize("intercept", [False, True])
def test_agrees_with_lstsq_in_memory(intercept):
    data = make_data()
    maps, solution = fit(moments_of(data), "x", ["y", "z"], intercept=intercept)
    stacked = np.concatenate([data["y"], data["z"]], axis=1)
    want = lstsq(data["x"], stacked, intercept=intercept)
    np.testing.assert_allclose(solution.weights, want.weights, rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(solution.residual, want.residual, rtol=1e-4)
    np.testing.assert_allclose(solution.condition, want.condition, rtol=1e-3)
    assert (solution.rank, solution.n, solution.ridge) == (want.rank, want.n, want.ridge)
    assert solution.describe() == want.describe()
    np.testing.assert_allclose(maps["z"].W, solution.weights[:, D:], rtol=1e-6)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("kind", ["few examples", "dependent", "constant"])
def test_rank_deficient_gives_the_minimum_norm_solution(kind, intercept):
    data = make_data(8 if kind == "few examples" else 300)
    if kind == "dependent":
        data["x"][:, 5] = data["x"][:, 0] + data["x"][:, 1]
    if kind == "constant":
        data["x"][:, 5] = 3
    _, solution = fit(moments_of(data, [("x", "y")]), "x", ["y"], intercept=intercept)
    X, Y = data["x"].astype(np.float64), data["y"].astype(np.float64)
    if intercept:
        X, Y = X - X.mean(0), Y - Y.mean(0)
    want = np.linalg.lstsq(X, Y, rcond=1e-6)
    assert solution.rank == want[2]
    np.testing.assert_allclose(solution.weights, want[0], rtol=1e-4, atol=1e-4)
    assert kind == "constant" or "minimum-norm" in solution.describe()


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("n", [8, 300])
def test_ridge_matches_scikit_learn(n, intercept):
    data = make_data(n)
    _, solution = fit(moments_of(data, [("x", "y")]), "x", ["y"], intercept=intercept, ridge=0.7)
    wide = {site: value.astype(np.float64) for site, value in data.items()}
    want = Ridge(0.7, fit_intercept=intercept, solver="svd").fit(wide["x"], wide["y"])
    np.testing.assert_allclose(solution.weights, want.coef_.T, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(
        solution.residual, ((wide["y"] - want.predict(wide["x"])) ** 2).sum(0), rtol=1e-6
    )


def test_padding_never_counts():
    data = make_data()
    weights = (np.arange(600) % 3 > 0).astype(np.float32)
    real = {site: value[weights > 0] for site, value in data.items()}
    dirty = {site: np.where(weights[:, None] > 0, value, np.nan) for site, value in data.items()}
    got, want = (
        fit(moments_of(dirty, weights=weights), "x", ["y"])[1],
        fit(moments_of(real), "x", ["y"])[1],
    )
    assert got.n == want.n == 400
    np.testing.assert_allclose(got.weights, want.weights, rtol=1e-9)


def test_merging_is_as_one_pass():
    data = make_data(outlier=1e4)
    whole = moments_of(data)
    first = moments_of({site: value[:250] for site, value in data.items()})
    second = moments_of({site: value[250:] for site, value in data.items()}, batch=70)
    nothing = zeros(PAIRS, dict.fromkeys("xyz", D))
    for merged in (
        merge(first, second),
        merge(second, first),
        merge(nothing, merge(merge(second, nothing), first)),
    ):
        for source, target in [*PAIRS, ("x", "x")]:
            for centred in (False, True):
                got = np.asarray(second_moments(merged, source, target, centred=centred))
                want = np.asarray(second_moments(whole, source, target, centred=centred))
                scale = np.sqrt(
                    np.outer(
                        *(second_moments_diagonal(data[site], centred) for site in (source, target))
                    )
                )
                np.testing.assert_allclose(got / scale, want / scale, atol=1e-12)
    with pytest.raises(ValueError, match="cannot be added"):
        merge(whole, zeros(PAIRS[:1], dict.fromkeys("xy", D)))


def second_moments_diagonal(x, centred):
    wide = x.astype(np.float64)
    return ((wide - wide.mean(0) * centred) ** 2).sum(0)


def test_r2_of_any_map_is_scikit_learns():
    data, other = make_data(seed=1), make_data(seed=2)
    moments = moments_of(other)
    maps, _ = fit(moments_of(data), "x", ["z"], intercept=True)
    for shortcut in (maps["z"], Linear(maps["z"].W), Identity()):
        predicted = np.asarray(shortcut(other["x"]), np.float64)
        got = r2(moments, "x", "z", shortcut)
        assert got["r2"] == pytest.approx(r2_score(other["z"], predicted), rel=1e-5)
        want = r2_score(other["z"], predicted, multioutput="variance_weighted")
        assert got["r2_weighted"] == pytest.approx(want, rel=1e-5)


def test_r2_of_constant_coordinates_is_scikit_learns():
    data = make_data()
    data["y"][:, 0], data["y"][:, 1] = 3, 4
    exact = Linear(
        np.eye(D, dtype=np.float32)[:, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]],
        np.zeros(D, np.float32),
    )
    exact.W[:, :2], exact.bias[0], exact.bias[1] = 0, 3, 4.5
    got = r2(moments_of(data), "x", "y", exact)["r2"]
    assert got == pytest.approx(r2_score(data["y"], exact(data["x"])), rel=1e-5)


def direct_linearity(x, y):
    """PROTOCOL 7 as written, in float64."""
    x, y = (value.astype(np.float64) - value.mean(0, dtype=np.float64) for value in (x, y))
    x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
    return 1 - ((x @ np.linalg.lstsq(x, y, rcond=None)[0] - y) ** 2).sum()


def test_linearity_is_the_formula_and_both_scores_come_from_one_fit():
    data = make_data(condition=100)
    moments = moments_of(data)
    for source, target in PAIRS:
        found = linearity(moments, source, [target])[target]
        x, y = data[source], data[target]
        assert found.score == pytest.approx(direct_linearity(x, y), abs=1e-9)
        assert found.without_residual == pytest.approx(
            direct_linearity(x, y.astype(np.float64) - x), abs=1e-9
        )
        centred = [
            np.square(v - v.mean(0)).sum() for v in (y.astype(np.float64), y.astype(np.float64) - x)
        ]
        identity = 1 - (1 - found.score) * centred[0] / centred[1]
        assert found.without_residual == pytest.approx(identity, abs=1e-9)
        affine = LinearRegression().fit(x.astype(np.float64), y).predict(x.astype(np.float64))
        assert found.score == pytest.approx(
            r2_score(y, affine, multioutput="variance_weighted"), abs=1e-6
        )
    together = linearity(moments, "x", ["y", "z"], fit(moments, "x", ["y", "z"], intercept=True)[1])
    assert together["z"].score == pytest.approx(
        linearity(moments, "x", ["z"])["z"].score, abs=1e-12
    )


def test_noise_scores_d_over_n_and_nothing_once_adjusted():
    rng = np.random.default_rng(0)
    data = {site: rng.normal(size=(400, D)).astype(np.float32) for site in "xy"}
    found = linearity(moments_of(data, [("x", "y")]), "x", ["y"])["y"]
    assert found.score == pytest.approx(D / 399, rel=0.3)
    assert abs(found.adjusted(found.score)) < 0.01
    few = dataclasses.replace(found, n=D + 1)
    assert np.isnan(few.adjusted(few.score))


def test_anisotropy_of_a_site_alone():
    data = make_data()
    x = data["x"].astype(np.float64)
    s = np.linalg.svd(x - x.mean(0), compute_uv=False)
    assert anisotropy(moments_of(data, [("x", "x")]), "x") == pytest.approx(
        s[0] ** 2 / (s**2).sum(), rel=1e-9
    )


def test_float64_stays_inside():
    moments = moments_of(make_data())
    assert {leaf.dtype for leaf in jax.tree.leaves(moments)} == {np.dtype(np.float64)}
    assert jax.numpy.ones(2).dtype == np.float32
    maps, solution = fit(moments, "x", ["y"], intercept=True)
    assert maps["y"].W.dtype == maps["y"].bias.dtype == np.float32
    assert solution.weights.dtype == np.float64


def test_updates_compile_once_whatever_the_number_of_pairs():
    sites = [f"s{i}" for i in range(6)]
    acts = {site: np.ones((16, 5), np.float32) for site in sites}
    weights = np.ones(16, np.float32)
    before = module._add_product._cache_size()
    for count in (2, 4, 6):
        pairs = [(a, b) for a in sites[:count] for b in sites[:count] if a < b]
        update(
            zeros(pairs, dict.fromkeys(sites, 5)),
            {site: acts[site] for site in sites[:count]},
            weights,
        )
    assert module._add_product._cache_size() == before + 1


def test_fits_compile_once_whatever_the_number_of_targets():
    moments = moments_of(make_data())
    fit(moments, "x", ["y"])
    before = from_moments.roots._cache_size(), from_moments._solve._cache_size()
    fit(moments, "x", ["y", "z"])
    assert (from_moments.roots._cache_size(), from_moments._solve._cache_size()) == before


def test_mistakes_are_named():
    data = make_data()
    moments = moments_of(data)
    with pytest.raises(ValueError, match=r"\('z', 'x'\) was not summed up"):
        fit(moments, "z", ["x"])
    with pytest.raises(ValueError, match="ridge must be"):
        fit(moments, "x", ["y"], ridge=-1)
    with pytest.raises(ValueError, match="at least one"):
        fit(zeros(PAIRS, dict.fromkeys("xyz", D)), "x", ["y"])
    with pytest.raises(ValueError, match="expected \\(12, 12\\)"):
        r2(moments, "x", "y", Linear(np.ones((12, 3), np.float32)))
    with pytest.raises(ValueError, match="in none of the pairs"):
        update(moments, {"w": data["x"]}, np.ones(600, np.float32))
    with pytest.raises(ValueError, match="both must come together"):
        update(moments, {"x": data["x"]}, np.ones(600, np.float32))
    data["z"][7, 2] = np.inf
    broken = moments_of(data)
    check_finite(broken, ["x", "y"])
    with pytest.raises(ValueError, match="site 'z' is not finite"):
        fit(broken, "x", ["z"])
