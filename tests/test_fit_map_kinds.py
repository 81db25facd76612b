"""`jmat.fit_map` with other kinds of maps, and with the plain solver."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

import jmat
from jmat.maps.compact import Diagonal, LowRank, Quantised
from jmat.maps.kinds import fit_kind, parse_kind
from jmat.maps.least_squares import lstsq
from jmat.maps.metric import head_metric
from jmat.maps.plain import plain_lstsq
from jmat.maps.regression import Regression, pair_moments
from jmat.maps.types import Linear
from jmat.studies import layer_jump


@pytest.fixture(scope="module")
def acts(gpt2, gpt2_examples):
    return jmat.capture(gpt2, gpt2_examples.fit, ["block.0", "block.3", "block.1.attn"])


def test_the_default_is_the_map_it_was(gpt2, gpt2_examples, acts):
    fit = jmat.fit_map(gpt2, gpt2_examples.fit, 1, 4)
    expected = lstsq(acts["block.0"], acts["block.3"])
    assert np.array_equal(fit.map.W, expected.weights)
    assert (fit.kind, fit.map.bias) == ("mat", None)
    same = jmat.fit_map(gpt2, gpt2_examples.fit, 1, 4, kind="affine")
    assert np.array_equal(
        same.map.bias, jmat.fit_map(gpt2, gpt2_examples.fit, 1, 4, intercept=True).map.bias
    )
    assert str(same).startswith("Map affine from block.0 to block.3: ")


@pytest.mark.parametrize(
    "kind", ["ridge:0.01", "rank:8", "rank_logit:8", "diag", "id", "mean", "mat+int8", "njtc:2"]
)
def test_every_kind_in_one_call(gpt2, gpt2_examples, acts, kind):
    fit = jmat.fit_map(gpt2, gpt2_examples.fit, 1, 4, kind=kind)
    X, Y = acts["block.0"], acts["block.3"]
    pair = Regression(pair_moments(X, Y), head_metric(gpt2, Y.mean(0)))
    expected = fit_kind(parse_kind(kind), pair)
    assert (fit.kind, type(fit.map)) == (kind, type(expected))
    np.testing.assert_allclose(
        fit.map(X), np.broadcast_to(expected(X), Y.shape), rtol=1e-3, atol=1e-2
    )
    assert fit.solution.n == len(X)
    wide = X - X.mean(0, dtype=np.float64)
    values = np.linalg.svd(wide, compute_uv=False)
    if kind != "mat+int8":
        assert int(fit.solution.rank) == np.linalg.matrix_rank(wide, tol=1e-5 * values[0])
        assert float(fit.solution.condition) == pytest.approx(
            values[0] / values[int(fit.solution.rank) - 1], rel=1e-2
        )
        assert f"Map {kind} from block.0 to block.3: " in str(fit)
    else:
        assert isinstance(fit.map.W, Quantised)


def test_kinds_between_other_sites(gpt2, gpt2_examples, acts):
    for kind, expected in (("rank:3", LowRank), ("diag", Diagonal), ("toward_id", Linear)):
        assert isinstance(
            jmat.fit_map(gpt2, gpt2_examples.fit, 1, "block.1.attn", kind=kind).map, expected
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "rigde"}, r"'rigde' is no kind of map; did you mean 'ridge'\?"),
        ({"kind": "rank:65"}, "rank 65, above the width 64"),
        (
            {"kind": "one_jump:3"},
            "kind 'one_jump:3' is one map for all layers: jmat.studies.map_zoo fits it",
        ),
        (
            {"kind": "ridge", "intercept": True},
            "intercept=True makes affine of mat; kind 'ridge' has its own",
        ),
        (
            {"kind": "ridge", "solver": "lstsq"},
            "solver='lstsq' fits the kinds mat and affine, not 'ridge'",
        ),
        ({"solver": "svd"}, "solver='svd': expected one of qr, lstsq"),
        (
            {"kind": "rank_logit:3", "target": 3},
            "'rank_logit:3' leads to the final stream .*, not to block.2",
        ),
        (
            {"kind": "diag", "target": "block.1.ffn.hidden"},
            "keeps the width, and the sites are 64 and 256 wide",
        ),
    ],
)
def test_what_cannot_be_fitted_is_refused_before_anything_is_read(gpt2, given, message):
    with pytest.raises(ValueError, match=message):
        jmat.fit_map(gpt2, [], **{"source": 1, "target": 4, **given})


def test_the_plain_solver_agrees_where_streams_are_well_conditioned(gpt2, gpt2_examples, acts):
    X, Y = acts["block.0"], acts["block.3"]
    for intercept in (False, True):
        qr, plain = (
            jmat.fit_map(gpt2, gpt2_examples.fit, 1, 4, solver=solver, intercept=intercept).map
            for solver in ("qr", "lstsq")
        )
        np.testing.assert_allclose(plain(X), qr(X), rtol=0, atol=1e-3 * np.abs(Y).max())
        assert (plain.bias is None) == (not intercept)
    plain = jmat.fit_map(gpt2, gpt2_examples.fit, 1, 4, solver="lstsq")
    assert np.array_equal(plain.map.W, jnp.linalg.lstsq(X, Y, rcond=0)[0])
    assert int(plain.solution.rank) == 64
    error = np.square(Y - np.asarray(plain.map(X), np.float64)).sum(0)
    np.testing.assert_allclose(plain.solution.residual, error, rtol=1e-3)
    values = np.linalg.svd(X.astype(np.float64), compute_uv=False)
    assert float(plain.solution.condition) == pytest.approx(values[0] / values[-1], rel=1e-2)


def test_the_plain_solver_looks_at_what_it_is_given():
    X = np.ones((5, 3), np.float32)
    with pytest.raises(ValueError, match=r"got \(5, 3\) and \(0, 3\)"):
        inspect.unwrap(plain_lstsq)(X, X[:0])
    with pytest.raises(ValueError, match="NaN or infinite"):
        plain_lstsq(X * np.nan, X)
    assert int(plain_lstsq(X * 0, X).rank) == 0


def test_studies_fit_by_the_plain_solver(gpt2, gpt2_examples, acts):
    said = []
    options = layer_jump.Options(targets="final", solver="lstsq")
    results = layer_jump.run(gpt2, gpt2_examples, options, say=said.append)
    assert np.array_equal(
        results.maps["mat.1.4"].W, jnp.linalg.lstsq(acts["block.0"], acts["block.3"], rcond=0)[0]
    )
    assert "route memory, which solver lstsq needs" in said
    usual = layer_jump.run(gpt2, gpt2_examples, layer_jump.Options(targets="final"))
    for mine, theirs in zip(results.rows, usual.rows, strict=True):
        assert mine["value"] == pytest.approx(theirs["value"], rel=0.02, abs=6e-3)
    with pytest.raises(
        ValueError, match="solver='lstsq' needs stored activations: leave out route='streaming'"
    ):
        layer_jump.Options(solver="lstsq", route="streaming")
