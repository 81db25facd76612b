"""Names of other libraries mean the sites that docs/sites.md says."""

import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

import jmat
from jmat.capture.future import future_sums
from jmat.capture.stream import packed_batches, sampled_positions, stream_moments
from jmat.maps.jacobian import mean_jacobians
from jmat.models.site_names import TABLE, aliases
from jmat.runtime.mesh import local_mesh
from tests import families, hf
from tests.test_streaming import few

TOKENS = np.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 2]], np.int32)
PAGE = (pathlib.Path(__file__).parents[1] / "docs" / "sites.md").read_text("utf-8")


@pytest.fixture(scope="module")
def parallel():
    return hf.ours(families.gpt_neox("parallel", use_parallel_residual=True))


def rows():
    """Names of block 3 and their site, as the page says."""
    part = PAGE.partition("## Names of other libraries")[2]
    for line in part.splitlines():
        if line.startswith("| `"):
            *names, ours = [re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")]
            yield [name for cell in names for name in cell], ours[0]


def test_the_page_has_every_name(gpt2):
    table = {name: ours for names, ours in rows() for name in names}
    assert len(table) == sum(map(len, TABLE.values()))
    assert table == {name: site for name, site in aliases(gpt2.config).items() if "3" in name}
    assert aliases(gpt2.config)["resid_pre.0"] == "embed"


def test_every_name_keeps_the_values_of_its_site(gpt2):
    table = aliases(gpt2.config)
    ours = jmat.run(gpt2, TOKENS, keep=list(dict.fromkeys(table.values())))[1]
    theirs = jmat.run(gpt2, TOKENS, keep=list(table))[1]
    assert list(theirs) == list(table)
    for name, site in table.items():
        np.testing.assert_array_equal(theirs[name], ours[site], err_msg=name)
        assert theirs[name].shape == ours[site].shape
    # the attention patterns of a padded pass are cut to the true length
    assert theirs["attn_probs.1"].shape == (2, 4, 5, 5)


def test_names_stand_beside_ours_and_in_patterns(gpt2, gpt2_examples):
    L = gpt2.config.layers
    kept = jmat.run(gpt2, TOKENS, keep=["block.1", "resid_post.1", "resid_pre.2", "logits"])[1]
    assert list(kept) == ["block.1", "resid_post.1", "resid_pre.2", "logits"]
    np.testing.assert_array_equal(kept["block.1"], kept["resid_pre.2"])
    kept = jmat.run(gpt2, TOKENS, keep="blocks.*.hook_resid_pre")[1]
    assert list(kept) == [f"blocks.{i}.hook_resid_pre" for i in range(L)]
    kept = jmat.run(gpt2, TOKENS, keep="layers_output[*]", stop=2)[1]
    assert list(kept) == ["layers_output[0]", "layers_output[1]"]
    acts = jmat.capture(gpt2, gpt2_examples.eval, ["mlp_out.1", "block.1.ffn"])
    assert list(acts) == ["mlp_out.1", "block.1.ffn"]
    np.testing.assert_array_equal(acts["mlp_out.1"], acts["block.1.ffn"])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("attn_out.1", "block.1.attn"),
        ("blocks.*.mlp.hook_out", "block.*.ffn"),
        ("layers_input[0]", "embed"),
        ("resid_pre.2", "block.1"),
        ("z.1", "block.1.attn.z"),
    ],
)
def test_names_change_what_their_site_does(gpt2, theirs, ours):
    half = jmat.Scale(0.5)
    expected, _ = jmat.run(gpt2, TOKENS, sites={ours: half})
    found, _ = jmat.run(gpt2, TOKENS, sites={theirs: half})
    np.testing.assert_array_equal(found, expected)
    assert not np.array_equal(found, jmat.run(gpt2, TOKENS)[0])


def test_a_map_is_fitted_between_other_names(gpt2, gpt2_examples):
    fit = jmat.fit_map(gpt2, gpt2_examples.fit, "resid_pre.1", "layers_output[3]")
    assert (fit.source, fit.target) == ("block.0", "block.3")


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("resid_post.4", r"unknown site 'resid_post.4': the model has the blocks 0 .. 3"),
        ("blocks.9.hook_resid_mid", r"unknown site 'blocks.9.hook_resid_mid': the model has"),
        ("blocks.1.hook_resid_middle", "unknown site 'blocks.1.hook_resid_middle'"),
        ("resid_post.01", "unknown site 'resid_post.01'"),
        ("resid_post.1.2", "unknown site 'resid_post.1.2'"),
        ("resid_post", "unknown site 'resid_post'"),
        ("blocks.*.hook_nothing", r"no site of this model that can be kept matches"),
    ],
)
def test_other_names_stay_unknown(gpt2, keep, message):
    with pytest.raises(ValueError, match=message):
        jmat.run(gpt2, TOKENS, keep=keep)


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        (["attn_out.1", "block.1.attn"], "sites 'attn_out.1' and 'block.1.attn' are two names of one"),
        (["resid_pre.1", "resid_post.0"], "'resid_pre.1' and 'resid_post.0' are two names of one"),
        (["attn_in.1"], "site 'block.1.attn.in' is an input: it can be kept, not replaced"),
        (["resid_mid.1"], "site 'block.1.mid' is a sum"),
        (["attn_in.*"], "no site of this model that can be changed matches 'attn_in.*'"),
        (["attn_out.*", "block.1.at*"], "both match 'block.1.attn'"),
    ],
)  # fmt: skip
def test_one_site_has_one_entry(gpt2, sites, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        jmat.run(gpt2, TOKENS, sites=dict.fromkeys(sites, jmat.Scale(jnp.float32(0.5))))


def test_parallel_blocks_have_nothing_in_the_middle(parallel):
    for name in ("resid_mid.1", "blocks.1.hook_resid_mid"):
        with pytest.raises(ValueError, match=f"site '{name}' does not exist in this model"):
            jmat.run(parallel, TOKENS, keep=name)
    with pytest.raises(ValueError, match=r"no site .* matches 'resid_mid.\*'"):
        jmat.run(parallel, TOKENS, keep="resid_mid.*")
    assert set(jmat.run(parallel, TOKENS, keep=["attn_out.1", "block.1.mid"])[1]) == {
        "attn_out.1",
        "block.1.mid",
    }


def test_names_of_pairs_are_those_of_their_sites(gpt2, gpt2_examples):
    split = few(gpt2_examples.fit, 40)
    batches = packed_batches(split, sampled_positions(split), row_multiple=local_mesh().size)
    ours = [("block.1.attn.in", "block.1.attn"), ("embed", "block.2")]
    theirs = [("attn_in.1", "blocks.1.attn.hook_out"), ("resid_pre.0", "layers_output[2]")]
    found = [stream_moments(gpt2, batches, pairs) for pairs in (ours, theirs)]
    assert found[1].pairs == theirs
    for (source, target), (other, end) in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(found[0].own[source], found[1].own[other])
        np.testing.assert_array_equal(found[0].cross[source][target], found[1].cross[other][end])
    with pytest.raises(ValueError, match=r"unknown site 'resid_post\.4'"):
        stream_moments(gpt2, batches, [("embed", "resid_post.4")])


@pytest.mark.slow
def test_names_of_gradients_and_sums_are_those_of_their_sites(gpt2, gpt2_examples):
    split = few(gpt2_examples.fit, 40)
    given = {"skip_first": 1, "error": 0}
    ours = mean_jacobians(gpt2, split, ["embed", "block.1"], "block.2", **given)
    theirs = mean_jacobians(gpt2, split, ["resid_pre.0", "resid_post.1"], "resid_post.2", **given)
    assert list(theirs) == ["resid_pre.0", "resid_post.1"]
    for mine, other in zip(ours.values(), theirs.values(), strict=True):
        np.testing.assert_array_equal(mine.matrix, other.matrix)
        np.testing.assert_array_equal(mine.target_mean, other.target_mean)
    sums = [future_sums(gpt2, split, name) for name in ("block.1.ffn", "mlp_out.1")]
    np.testing.assert_array_equal(*sums)
