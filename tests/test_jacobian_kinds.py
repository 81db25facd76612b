"""Kinds of maps that are derived from gradients: in `fit_map`, in the zoo, and in files."""

import inspect

import numpy as np
import pytest

import jmat
from jmat.data.examples import Examples, Split
from jmat.maps.compact import Quantised
from jmat.maps.jacobian import mean_jacobians
from jmat.maps.kinds import derive_kind, fit_kind, parse_kind, train_kind
from jmat.maps.regression import Regression, pair_moments
from jmat.studies import map_zoo

L = 4
KIND = "jacobian:0.25"


@pytest.fixture(scope="module")
def examples(gpt2_examples):
    """Those whose prompts all make rows of one length."""
    fit = gpt2_examples.fit
    return Examples(some(fit, np.flatnonzero(fit.lengths <= 32)), gpt2_examples.eval)


def some(split, sentences):
    """Some sentences of a split with one example each."""
    where = [int(split.positions[split.rows == k][0]) for k in sentences]
    lengths = split.lengths[sentences]
    return Split(split.tokens[split.places(sentences)], lengths, np.array(where, np.int32))


@pytest.fixture(scope="module")
def found(gpt2, examples):
    """Jacobians by h_1 and h_3, as the zoo reads them."""
    sites = ["block.0", "block.2"]
    return mean_jacobians(gpt2, examples.fit, sites, "block.3", error=0.25, seed=3)


@pytest.fixture(scope="module")
def pair(gpt2, examples):
    acts = jmat.capture(gpt2, examples.fit, ["block.0", "block.3"])
    return Regression(pair_moments(acts["block.0"], acts["block.3"]))


def test_names_of_the_kinds():
    assert str(parse_kind("jacobian")) == "jacobian"
    assert str(parse_kind("jacobian:0.1+int8")) == "jacobian:0.1+int8"
    assert parse_kind("jacobian").wanted_error == 0.05
    assert parse_kind("jacobian_shrunk:0").wanted_error == 0
    for wrong in ("1", "-0.1", "much", "nan"):
        with pytest.raises(ValueError, match="takes a relative error of at least 0 and below 1"):
            parse_kind(f"jacobian:{wrong}")
    with pytest.raises(ValueError, match="did you mean 'jacobian'"):
        parse_kind("jacobean")


def test_kinds_differ_by_bias_and_shrinkage(found, pair):
    one = found["block.0"]
    plain, without, shrunk, small = (
        derive_kind(parse_kind(kind), one, pair)
        for kind in ("jacobian", "jacobian_no_bias", "jacobian_shrunk", "jacobian+int8")
    )
    np.testing.assert_allclose(plain.W, one.matrix.T, rtol=1e-6)
    np.testing.assert_allclose(
        plain.bias, one.target_mean - one.source_mean @ one.matrix.T, rtol=0, atol=1e-5
    )
    assert without.bias is None
    share = one.shrinkage(pair.affine)
    assert 0 < share < 1
    np.testing.assert_allclose(
        shrunk.W, one.matrix.T + share * (np.asarray(pair.affine) - one.matrix.T), atol=1e-5
    )
    assert isinstance(small.W, Quantised)
    with pytest.raises(ValueError, match="'jacobian' is derived from gradients, not fitted to"):
        fit_kind(parse_kind("jacobian"), pair)
    with pytest.raises(ValueError, match="kind 'mat' is not derived from gradients"):
        derive_kind(parse_kind("mat"), one, pair)
    with pytest.raises(ValueError, match="kind 'jacobian' is not trained"):
        inspect.unwrap(train_kind)(parse_kind("jacobian"), None)


def test_one_call_fits_a_jacobian_lens(gpt2, examples, found, pair, tmp_path):
    fit = jmat.fit_map(gpt2, examples.fit, 1, L, kind="jacobian_shrunk:0.25", seed=3)
    assert fit.jacobian.prompts <= found["block.0"].prompts
    assert fit.jacobian.error <= 0.25
    assert fit.solution.n == pair.n
    assert str(fit).startswith("Map jacobian_shrunk:0.25: Jacobian of block.3 by block.0: ")
    shortcut = jmat.Shortcut(1, L, fit.map)
    x, _ = jmat.run(gpt2, np.arange(20)[None], sites=shortcut)
    h1, _ = jmat.run(gpt2, np.arange(20)[None], stop=1)
    np.testing.assert_allclose(x, fit.map(h1), rtol=0, atol=1e-4)
    jmat.save_maps(tmp_path, {f"{fit.kind}.1.4": fit.map}, model=gpt2, n=fit.jacobian.prompts)
    loaded = jmat.load_maps(tmp_path, model=gpt2)["jacobian_shrunk:0.25.1.4"]
    np.testing.assert_array_equal(loaded.W, fit.map.W)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"source": 4, "target": 2}, "'block.1' does not depend on 'block.3'"),
        ({"source": 1, "target": "logits"}, "lies behind the blocks"),
        ({"source": 9, "target": 4}, "layer 9 is not one of 0 .. 4"),
        ({"weights": "norms"}, "kind 'jacobian' is derived from gradients"),
        ({"solver": "lstsq"}, "fits the kinds mat and affine, not 'jacobian'"),
        ({"intercept": True}, "kind 'jacobian' has its own"),
        ({}, "0 of 1 texts have 18 tokens or more; at least 2 such texts are needed"),
    ],
)
def test_what_cannot_be_derived_is_refused_before_anything_is_read(gpt2, given, message):
    text = Split(np.arange(9, dtype=np.int32), np.array([9], np.int32), np.zeros(1, np.int32))
    with pytest.raises(ValueError, match=message):
        jmat.fit_map(gpt2, text, **{"source": 1, "target": 4, "kind": "jacobian", **given})


def test_the_zoo_derives_all_layers_in_one_pass(gpt2, examples, found, pair, tmp_path):
    said = []
    kinds = ("mat", KIND, "jacobian_shrunk:0.25", f"{KIND}+int8")
    options = map_zoo.Options(
        kinds=kinds,
        layers=(1, 3),
        seed=3,
        clock=True,
        snapshot_folder=tmp_path,
        snapshot_every=0.001,
    )
    results = map_zoo.run(gpt2, examples, options, say=said.append)
    one = found["block.0"]
    np.testing.assert_array_equal(results.maps[f"{KIND}.1.4"].W, one.map().W)
    np.testing.assert_allclose(
        results.maps["jacobian_shrunk:0.25.1.4"].W, one.shrunk(pair.affine).W, rtol=0, atol=1e-5
    )
    assert isinstance(results.maps[f"{KIND}+int8.3.4"].W, Quantised)
    errors = [row for row in results.rows if row["metric"] == "relative_error"]
    assert [(row["map"], row["layer"]) for row in errors] == [
        (kind, layer) for kind in kinds[1:3] for layer in (1, 3)
    ]
    assert errors[0]["value"] == one.error
    assert (errors[0]["low"], errors[0]["high"]) == one.interval
    assert errors[0]["n"] == one.prompts
    shares = [row["value"] for row in results.rows if row["metric"] == "identity_share"]
    assert shares[:2] == [one.identity_share, found["block.2"].identity_share]
    assert {row["map"] for row in results.rows if row["metric"] == "fit_seconds"} == set(kinds)
    assert f"Jacobians of {one.prompts} prompts: relative error {one.error:.3f}" in "\n".join(said)
    assert "relative_error" in results.table()
    assert (tmp_path / "jacobian-0.25").is_dir()


@pytest.mark.slow
def test_short_text_is_told(gpt2, examples):
    said = []
    fit = some(examples.fit, np.flatnonzero(examples.fit.lengths >= 18)[:3])
    options = map_zoo.Options(kinds=("mat", "jacobian:0.001"), layers=(1, 3))
    map_zoo.run(gpt2, Examples(fit, examples.eval), options, say=said.append)
    assert "at layer 1, above 0.001: there is no more text" in "\n".join(said)
