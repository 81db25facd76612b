"""Each kind of map against an independent solution in float64, on held-out activations,
stored or streamed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.preprocessing import StandardScaler

from jmat.capture.moments import update, zeros
from jmat.maps.closed_forms import PENALTIES
from jmat.maps.compact import Diagonal, Hadamard, LowRank, quantised
from jmat.maps.costs import map_cost
from jmat.maps.kinds import KINDS, Kind, fit_kind, parse_kind, parse_kinds
from jmat.maps.metric import metric_of
from jmat.maps.regression import Regression, one_pair, pair_moments, pooled, spectrum
from jmat.maps.types import Constant, Identity, Linear

N, D, HELD_OUT, R = 300, 24, 100, 5
GAMMA = np.cov(np.random.default_rng(5).normal(size=(D, 3 * D)))


@functools.cache
def streams():
    """Two layers and the final one, float32: far from zero, with outlier coordinates,
    at a condition number of 1e4.
    """
    rng = np.random.default_rng(0)
    scales = np.geomspace(0.05, 5, D)
    scales[3] = 300
    first = (
        rng.normal(size=(N + HELD_OUT, D)) @ rng.normal(size=(D, D))
    ) * scales + 20 * rng.normal(size=D)
    second = first + np.tanh(first / 5) @ rng.normal(size=(D, D)) + rng.normal(size=first.shape)
    final = (
        second
        + 0.5 * np.tanh(second / 5) @ rng.normal(size=(D, D))
        + 2 * rng.normal(size=first.shape)
        + 1
    )
    return [stream.astype(np.float32) for stream in (first, second, final)]


@functools.cache
def regression(route, pool=False):
    """The moments of layer 0, or of layers 0 and 1 together, with the final one."""
    h = [stream[:N] for stream in streams()]
    layers = (0, 1) if pool else (0,)
    if route == "stored":
        pairs = [pair_moments(h[l], h[2]) for l in layers]
    else:
        moments = zeros([("a", "c"), ("b", "c")], dict.fromkeys("abc", D))
        for k in range(0, N, 70):
            batch = {
                name: jnp.asarray(stream[k : k + 70]) for name, stream in zip("abc", h, strict=True)
            }
            moments = update(moments, batch, jnp.ones(len(batch["a"])))
        pairs = [one_pair(moments, "ab"[l], "c") for l in layers]
    return Regression(pooled(pairs), metric_of(GAMMA))


def validation(Z, T):
    """The penalty of the smallest generalised cross-validation error, by the matrix
    that fits.
    """
    n, centred = len(Z), Z - Z.mean(0)
    unit = np.square(centred).sum() / Z.shape[1]
    errors = {}
    for share in PENALTIES:
        hat = (
            centred
            @ np.linalg.solve(centred.T @ centred + share * unit * np.eye(Z.shape[1]), centred.T)
            + 1 / n
        )
        errors[share] = n * np.square(T - hat @ T).sum() / (n - np.trace(hat)) ** 2
    return min(errors, key=errors.__getitem__) * unit


def reduced(X, Y, new, root=None):
    """Least squares of rank R by the singular values of its predictions, in the metric
    of a root.
    """
    root = np.eye(D) if root is None else root
    model = LinearRegression().fit(X, Y @ root)
    fitted = model.predict(X)
    V = np.linalg.svd(fitted - fitted.mean(0))[2][:R].T
    centre = Y.mean(0) @ root
    return ((model.predict(new) - centre) @ V @ V.T + centre) @ np.linalg.inv(root)


def ridge(alpha):
    return lambda X, Y, new: Ridge(alpha=alpha(X, Y), solver="svd").fit(X, Y).predict(new)


def toward_id(alpha):
    return lambda X, Y, new: (
        new + Ridge(alpha=alpha(X, Y - X), solver="svd").fit(X, Y - X).predict(new)
    )


def share(X, Y):
    return 0.01 * np.square(X - X.mean(0)).sum() / D


def orthogonal(X, Y, new):
    R, scale = scipy.linalg.orthogonal_procrustes(X - X.mean(0), Y - Y.mean(0))
    return scale / np.square(X - X.mean(0)).sum() * (new - X.mean(0)) @ R + Y.mean(0)


def by_coordinate(X, Y, new):
    fits = [LinearRegression().fit(X[:, [k]], Y[:, k]).predict(new[:, [k]]) for k in range(D)]
    return np.stack(fits, axis=1)


def turned(values):
    """Coordinates in groups of 8, rotated by Hadamard's matrix; across the three groups
    by Hartley's.
    """
    groups = values.reshape(-1, 3, 8) @ scipy.linalg.hadamard(8) / np.sqrt(8)
    across = np.fft.fft(groups, axis=1)
    return ((across.real - across.imag) / np.sqrt(3)).reshape(-1, D)


def batch_norm(X, Y, new):
    scaler = StandardScaler().fit(X)
    Z, alpha = scaler.transform(X), validation(scaler.transform(X), Y)
    centre = Y.mean(0)
    augmented = np.vstack([Z, np.sqrt(alpha) * np.eye(D)])
    W = np.linalg.lstsq(augmented, np.vstack([Y - centre, np.zeros((D, D))]), rcond=None)[0]
    V = np.linalg.svd(augmented @ W)[2][:R].T
    return scaler.transform(new) @ W @ V @ V.T + centre


def metric_root():
    return scipy.linalg.sqrtm(GAMMA + 1e-6 * np.trace(GAMMA) / D * np.eye(D)).real


ORACLES = {
    "id": lambda X, Y, new: new,
    "mean": lambda X, Y, new: np.broadcast_to(Y.mean(0), new.shape),
    "mat": lambda X, Y, new: new @ np.linalg.lstsq(X, Y, rcond=None)[0],
    "affine": lambda X, Y, new: LinearRegression().fit(X, Y).predict(new),
    "future_sum": lambda X, Y, new: LinearRegression().fit(X, Y).predict(new),
    "ridge:1e-2": ridge(share),
    "ridge": ridge(validation),
    "toward_id:1e-2": toward_id(share),
    "toward_id:auto": toward_id(validation),
    "orthogonal": orthogonal,
    "diag": by_coordinate,
    "hadamard": lambda X, Y, new: turned(by_coordinate(turned(X), turned(Y), turned(new))),
    f"rank:{R}": reduced,
    f"rank_logit:{R}": lambda X, Y, new: reduced(X, Y, new, metric_root()),
    f"njtc:{R}": batch_norm,
    f"one_jump:{R}": reduced,
}
TYPES = {"id": Identity, "mean": Constant, "diag": Diagonal, "hadamard": Hadamard}
TYPES |= dict.fromkeys(("rank", "rank_logit", "njtc", "one_jump"), LowRank)


def test_every_closed_form_is_tested():
    assert {text.partition(":")[0] for text in ORACLES} == {
        name for name, entry in KINDS.items() if entry.fit
    }


@pytest.mark.parametrize("route", ["stored", "streamed"])
@pytest.mark.parametrize("text", ORACLES)
def test_predictions_on_held_out_activations_are_those_of_float64(text, route):
    kind = parse_kind(text)
    pool = kind.entry.is_pooled
    h = [stream.astype(np.float64) for stream in streams()]
    X = np.concatenate([h[0][:N], h[1][:N]]) if pool else h[0][:N]
    Y = np.concatenate([h[2][:N], h[2][:N]]) if pool else h[2][:N]
    stand_in = fit_kind(kind, regression(route, pool))
    assert isinstance(stand_in, TYPES.get(kind.name, Linear))
    assert {leaf.dtype for leaf in jax.tree.leaves(stand_in)} <= {jnp.dtype("float32")}
    held_out = streams()[0][N:]
    expected = ORACLES[text](X, Y, held_out.astype(np.float64))
    error = np.linalg.norm(np.asarray(stand_in(held_out), np.float64) - expected) / np.linalg.norm(
        expected
    )
    assert error < 1e-5, error


def test_moments_of_many_activations_are_summed_part_by_part(monkeypatch):
    monkeypatch.setattr("jmat.maps.regression._ROWS", 70)
    X, _, Y = (stream[:N].astype(np.float64) for stream in streams())
    pair = Regression(pair_moments(X.astype(np.float32), Y.astype(np.float32)))
    assert pair.n == N
    x, y = X - X.mean(0), Y - Y.mean(0)
    for found, expected in (
        (pair.gram, x.T @ x),
        (pair.cross, x.T @ y),
        (pair.y_spread, np.square(y).sum(0)),
    ):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10 * np.abs(expected).max())
    np.testing.assert_allclose(pair.x_mean, X.mean(0), rtol=1e-12)


@pytest.mark.parametrize("far", [0, 0.1, 1e4])
def test_a_map_without_intercept_at_any_distance_from_zero(far):
    rng = np.random.default_rng(7)
    X = (rng.normal(size=(40, D)) + far).astype(np.float32)
    Y = (X @ rng.normal(size=(D, D)) + rng.normal(size=(40, D)) + 3).astype(np.float32)
    expected = np.linalg.lstsq(X.astype(np.float64), Y.astype(np.float64), rcond=None)[0]
    found = fit_kind(parse_kind("mat"), Regression(pair_moments(X, Y)))
    np.testing.assert_allclose(found.W, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_low_rank_map_of_the_whole_rank_is_the_affine_map():
    pair = regression("stored")
    x = streams()[0][N:]
    affine = np.asarray(fit_kind(parse_kind("affine"), pair)(x))
    for name in ("rank", "rank_logit"):
        np.testing.assert_allclose(
            fit_kind(parse_kind(f"{name}:{D}"), pair)(x), affine, rtol=0, atol=2e-2
        )
    error = [
        np.square(np.asarray(fit_kind(parse_kind(f"rank:{r}"), pair)(x)) - affine).sum()
        for r in (1, 5, 20)
    ]
    assert error[0] > error[1] > error[2] > 0


def test_each_factorisation_is_made_once(monkeypatch):
    pair, calls = Regression(regression("stored").moments), []
    assert pair.roots.kept.all()
    monkeypatch.setattr(
        "jmat.maps.regression.spectrum", lambda A: calls.append(len(A)) or spectrum(A)
    )
    for text in (
        "ridge:1e-3",
        "ridge:1e-2",
        "ridge",
        "toward_id:1",
        "rank:2",
        "rank:3",
        "rank:9",
        "affine",
        "diag",
    ):
        fit_kind(parse_kind(text), pair)
    assert calls == [D, D]  # of the source, and of what the affine map predicts


@pytest.mark.parametrize("case", ["constant", "twice", "few"])
def test_a_source_that_is_rank_deficient(case):
    """The map of minimum norm; a coordinate that does not vary weighs nothing."""
    rng = np.random.default_rng(3)
    n = 15 if case == "few" else N
    X = rng.normal(2, 1, (n, D)).astype(np.float32)
    if case == "constant":
        X[:, 4] = 7
    if case == "twice":
        X[:, 4] = X[:, 5]
    Y = (X @ rng.normal(size=(D, D)) + rng.normal(size=(n, D))).astype(np.float32)
    pair = Regression(pair_moments(X, Y), metric_of(GAMMA))
    wide = X.astype(np.float64) - X.astype(np.float64).mean(0)
    expected = np.linalg.lstsq(wide, Y - Y.mean(0), rcond=1e-10)[0]
    np.testing.assert_allclose(fit_kind(parse_kind("affine"), pair).W, expected, rtol=0, atol=1e-5)
    assert int(pair.rank) == np.linalg.matrix_rank(wide)
    new = rng.normal(2, 1, (20, D)).astype(np.float32)
    for text in ORACLES:
        assert np.isfinite(fit_kind(parse_kind(text), pair)(new)).all(), text
    if case == "constant":
        assert float(fit_kind(parse_kind("diag"), pair).s[4]) == 0


def test_moments_without_an_answer_are_refused():
    X = streams()[0][:N].copy()
    X[3, 4] = np.nan
    with pytest.raises(ValueError, match="'source' is not finite"):
        fit_kind(parse_kind("affine"), Regression(pair_moments(X, streams()[2][:N])))
    with pytest.raises(ValueError, match=r"the pair .* was not summed up"):
        one_pair(pair_moments(X, X), "source", "block.9")


# --- the names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "canonical"),
    [
        ("mat", Kind("mat"), "mat"),
        (" ridge:auto ", Kind("ridge", "auto"), "ridge"),
        ("ridge", Kind("ridge", "auto"), "ridge"),
        ("ridge:1e-2", Kind("ridge", 0.01), "ridge:0.01"),
        ("rank:64+int8", Kind("rank", 64, int8=True), "rank:64+int8"),
        ("mat+int8", Kind("mat", None, int8=True), "mat+int8"),
    ],
)
def test_a_name_is_a_kind(text, kind, canonical):
    assert parse_kind(text) == kind
    assert str(kind) == canonical
    assert parse_kind(canonical) == kind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "rigde",
            r"'rigde' is no kind of map; did you mean 'ridge'\? Kinds: id, mean, mat, affine, ridge:1e-2",
        ),
        ("afine:3", "did you mean 'affine'"),
        ("", "'' is no kind of map; Kinds"),
        ("mat+int9", "'mat\\+int9' is no kind of map; did you mean 'mat'"),
        ("mat+int8x", "'mat\\+int8x' is no kind of map; Kinds"),
        ("mat:3", "kind 'mat:3': mat takes no parameter, as in 'mat'"),
        ("rank", "kind 'rank': rank takes a whole number of at least 1, as in 'rank:64'"),
        ("rank:", "rank takes a parameter behind the colon, or no colon"),
        ("rank:0", "whole number of at least 1"),
        ("rank:1.5", "whole number"),
        ("rank:²", "whole number"),
        ("ridge:-1", "kind 'ridge:-1': ridge takes a number above 0, or auto, as in 'ridge:1e-2'"),
        ("ridge:nan", "a number above 0"),
        ("ridge:inf", "a number above 0"),
        ("toward_id:x", "a number above 0"),
    ],
)
def test_another_name_is_one_sentence(text, message):
    with pytest.raises(ValueError, match=message):
        parse_kind(text)


def test_several_names():
    assert parse_kinds(["mat", "ridge", "ridge:auto", "mat"]) == [
        Kind("mat"),
        Kind("ridge", "auto"),
    ]
    with pytest.raises(ValueError, match="no kind of map is named; choose from id, mean"):
        parse_kinds([])


@pytest.mark.parametrize("name", ["rank", "rank_logit", "njtc", "one_jump"])
def test_a_rank_above_the_width_is_refused(name):
    with pytest.raises(
        ValueError, match=f"kind '{name}:25' has rank 25, above the width 24 .* at most 24"
    ):
        fit_kind(parse_kind(f"{name}:25"), regression("stored"))


def test_kinds_that_keep_the_width_and_kinds_that_need_a_head():
    X, _, Y = (stream[:N] for stream in streams())
    pair = Regression(pair_moments(X, Y[:, :7]))
    for text in ("id", "diag", "hadamard", "toward_id"):
        with pytest.raises(
            ValueError, match=f"kind '{text}' keeps the width, and the sites are 24 and 7 wide"
        ):
            fit_kind(parse_kind(text), pair)
    for text in ("mean", "mat", "affine", "ridge", "orthogonal", "rank:7", "njtc:3"):
        assert fit_kind(parse_kind(text), pair)(X).shape == (N, 7)
    with pytest.raises(ValueError, match="needs the model's head"):
        fit_kind(parse_kind("rank_logit:3"), pair)


# --- costs, and use -------------------------------------------------------------------------------


def test_costs_are_counted():
    pair = regression("stored")
    costs = {
        text: map_cost(fit_kind(parse_kind(text), pair))
        for text in (*ORACLES, "mat+int8", f"rank:{R}+int8")
    }
    low = 2 * D * R
    expected = {
        "id": (0, 0, 0),
        "mean": (D, 4 * D, 0),
        "mat": (D * D, 4 * D * D, 2 * D * D),
        "mat+int8": (D * D, D * D + 4 * D, 2 * D * D),
        "affine": (D * D + D, 4 * (D * D + D), 2 * D * D + D),
        f"rank:{R}": (low + D, 4 * (low + D), 2 * low + D),
        f"rank:{R}+int8": (low + D, low + 4 * D + 4 * R + 4 * D, 2 * low + D),
        "diag": (2 * D, 8 * D, 2 * D),
        "hadamard": (2 * D, 8 * D, 2 * D + 2 * (3 * D + D + 2 * 3 * D)),
    }
    for text, numbers in expected.items():
        assert (costs[text].parameters, costs[text].bytes, costs[text].flops) == numbers, text


@pytest.mark.parametrize("text", ["mean", "affine", "diag", "hadamard", "rank:5"])
def test_maps_are_sites_and_shortcuts(gpt2, text):
    """Each goes through the model under `jit`, as a shortcut and at a site."""
    import jmat

    kind = parse_kind(text)
    width = gpt2.config.width
    rng = np.random.default_rng(0)
    X = rng.normal(size=(90, width)).astype(np.float32)
    pair = Regression(
        pair_moments(X, X + rng.normal(size=X.shape).astype(np.float32)), metric_of(np.eye(width))
    )
    for stand_in in (fit_kind(kind, pair), quantised(fit_kind(kind, pair))):
        tokens = rng.integers(0, 700, size=(2, 6)).astype(np.int32)
        x, acts = jmat.run(gpt2, tokens, sites=jmat.Shortcut(1, 4, stand_in), keep=["block.0"])
        expected = np.asarray(stand_in(np.asarray(acts["block.0"])))
        np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-4)
        assert np.isfinite(jmat.run(gpt2, tokens, sites={"block.1.attn": stand_in})[0]).all()
