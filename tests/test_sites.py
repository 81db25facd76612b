"""The names of sites, what they mean in each wiring, and how replacements take part."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmat
from jmat import Identity, Linear, Scale, Zero
from jmat.models.site_checks import check_site
from jmat.models.sites import readable, replaceable, width
from tests import hf
from tests.families import BY_NAME

TOKENS = np.random.default_rng(0).integers(0, 37, (2, 6), dtype=np.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Table:
    """Tokens → vectors."""

    rows: jax.Array

    def __call__(self, tokens):
        return self.rows[tokens]


def zero(inputs, outputs=None):
    return Linear(jnp.zeros((inputs, outputs or inputs)))


@pytest.fixture(scope="module")
def gpt2():
    return hf.ours(hf.gpt2("sites", n_layer=3))


@pytest.fixture(scope="module")
def bert():
    return hf.ours(hf.bert("sites"))


def keep_block(model, block, *names, **options):
    """Values of the sites of one block, by their name inside it; `in` is the stream
    before it.
    """
    inputs = {"in": "embed" if block == 0 else f"block.{block - 1}", "out": f"block.{block}"}
    sites = {**inputs, **{name: f"block.{block}.{name}" for name in names}}
    _, kept = jmat.run(model, TOKENS, keep=tuple(sites.values()), **options)
    return {name: kept[site] for name, site in sites.items()}


def close(x, y):
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


def test_residual_identities_of_a_pre_norm_block(gpt2):
    names = ("ln_1.in", "ln_1", "attn.in", "attn", "mid", "ln_2.in", "ln_2", "ffn.in", "ffn")
    for i in range(3):
        at = keep_block(gpt2, i, *names)
        close(at["ln_1.in"], at["in"])
        close(at["attn.in"], at["ln_1"])
        close(at["mid"], at["in"] + at["attn"])
        close(at["ln_2.in"], at["mid"])
        close(at["ffn.in"], at["ln_2"])
        close(at["out"], at["mid"] + at["ffn"])
        close(at["ln_2"], gpt2.blocks[i].ln_2(at["mid"]))
        assert jnp.abs(at["attn"]).max() > 0.1
        assert jnp.abs(at["ffn"]).max() > 0.1


def test_residual_identities_of_a_post_norm_block(bert):
    names = ("attn.in", "attn", "mid", "ln_1.in", "ln_1", "ffn.in", "ffn", "ln_2.in", "ln_2")
    for i in range(2):
        at = keep_block(bert, i, *names)
        close(at["attn.in"], at["in"])
        close(at["mid"], at["in"] + at["attn"])
        close(at["ln_1.in"], at["mid"])
        close(at["ln_1"], bert.blocks[i].ln_1(at["mid"]))
        close(at["ffn.in"], at["ln_1"])
        close(at["ln_2.in"], at["ln_1"] + at["ffn"])
        close(at["out"], at["ln_2"])


def test_heads_side_by_side_through_the_output_projection_are_attention(gpt2):
    at = keep_block(gpt2, 1, *(f"attn.head.{h}" for h in range(4)), "attn")
    heads = jnp.concatenate([at[f"attn.head.{h}"] for h in range(4)], axis=-1)
    close(gpt2.blocks[1].attn.o(heads), at["attn"])
    close(keep_block(gpt2, 1, "attn")["attn"], at["attn"])


def test_a_replaced_head_changes_attention_by_its_own_share(gpt2):
    plain = keep_block(gpt2, 0, "attn", "attn.head.2")
    without = keep_block(gpt2, 0, "attn", "attn.head.1", sites={"block.0.attn.head.2": zero(16, 4)})
    share = plain["attn.head.2"] @ gpt2.blocks[0].attn.o.kernel[8:12]
    close(without["attn"], plain["attn"] - share)


def test_parts_replaced_by_themselves_change_nothing(gpt2, bert):
    for model in (gpt2, bert):
        expected, _ = jmat.run(model, TOKENS)
        parts = [(i, part) for i in range(model.config.layers) for part in ("ln_1", "ln_2", "ffn")]
        sites = {f"block.{i}.{part}": getattr(model.blocks[i], part) for i, part in parts}
        close(jmat.run(model, TOKENS, sites=sites)[0], expected)


def test_a_replacement_gets_the_input_of_its_part_and_gives_its_output(gpt2, bert):
    for model in (gpt2, bert):
        maps = {
            part: Linear(jax.random.normal(jax.random.key(k), (16, 16)))
            for k, part in enumerate(("ln_1", "attn", "ln_2", "ffn"))
        }
        names = [name for part in maps for name in (part, f"{part}.in")]
        at = keep_block(model, 1, *names, sites={f"block.1.{part}": W for part, W in maps.items()})
        for part, W in maps.items():
            close(at[part], W(at[f"{part}.in"]))


def test_a_block_can_be_replaced(gpt2, bert):
    W = Linear(jax.random.normal(jax.random.key(0), (16, 16)))
    for model in (gpt2, bert):
        at = keep_block(model, 1, sites={"block.1": W})
        close(at["out"], W(at["in"]))


def test_embedding_and_head_can_be_replaced(gpt2, bert):
    for model in (gpt2, bert):
        rows = jax.random.normal(jax.random.key(1), (37, 16))
        _, kept = jmat.run(model, TOKENS, sites={"embed": Table(rows)}, keep=("embed",))
        close(kept["embed"], rows[TOKENS])
        norm, head = (
            Linear(jax.random.normal(jax.random.key(k), (16, n))) for k, n in ((2, 16), (3, 5))
        )
        sites = {"final_norm": norm, "logits": head}
        x, kept = jmat.run(
            model, TOKENS, sites=sites, keep=("final_norm.in", "final_norm", "logits")
        )
        close(kept["final_norm.in"], x)
        close(kept["final_norm"], norm(x))
        close(kept["logits"], head(norm(x)))
        close(jmat.logits(model, x, sites=sites), kept["logits"])


def test_a_block_replaced_by_the_identity_is_a_block_skipped(gpt2):
    tokens = jnp.asarray(TOKENS)  # which are run at their own length, as streams are
    x, _ = jmat.run(gpt2, tokens, stop=1)
    expected, _ = jmat.run(gpt2, x, start=2)
    np.testing.assert_array_equal(
        jmat.run(gpt2, tokens, sites={"block.1": Identity()})[0], expected
    )


def test_attention_and_feed_forward_replaced_by_zero_leave_the_stream_alone(gpt2):
    sites = {f"block.{i}.{part}": zero(16) for i in range(3) for part in ("attn", "ffn")}
    x, kept = jmat.run(gpt2, TOKENS, sites=sites, keep=("embed",))
    np.testing.assert_array_equal(x, kept["embed"])


def test_names_count_blocks_and_heads(gpt2):
    assert len(readable(3, 4)) == 4 + 3 * (16 + 4 + 1)
    assert len(replaceable(3, 4)) == 3 + 3 * (11 + 4 + 1)
    assert set(replaceable(3, 4)) < set(readable(3, 4))
    _, kept = jmat.run(gpt2, TOKENS, keep=tuple(readable(3, 4)))
    assert list(kept) == list(readable(3, 4))


def test_sites_inside_attention_and_feed_forward_make_up_their_parts(gpt2, bert):
    for model in (gpt2, bert, hf.ours(BY_NAME["llama-plain"])):
        parts = ("q", "k", "v", "scores", "pattern", "z", "head.1")
        at = keep_block(
            model,
            1,
            *(f"attn.{part}" for part in parts),
            "attn.in",
            "attn",
            "ffn.in",
            "ffn.hidden",
            "ffn",
        )
        c, attn, ffn = model.config, model.blocks[1].attn, model.blocks[1].ffn
        B, T = at["attn.in"].shape[:2]
        for name in "qkv":
            close(at[f"attn.{name}"].reshape(B, T, -1), getattr(attn, name)(at["attn.in"]))
        groups = c.heads // (c.kv_heads or c.heads)
        v = jnp.repeat(at["attn.v"], groups, axis=2)
        close(at["attn.z"], jnp.einsum("BHTS,BSHK->BTHK", at["attn.pattern"], v))
        close(at["attn.head.1"], at["attn.z"][:, :, 1])
        close(attn.o(at["attn.z"].reshape(B, T, -1)), at["attn"])
        allowed = np.tril(np.ones((T, T), bool)) if c.causal else np.ones((T, T), bool)
        close(
            at["attn.pattern"],
            jax.nn.softmax(jnp.where(allowed, at["attn.scores"], -jnp.inf), axis=-1),
        )
        if c.rotary is None:
            scale = 1 / np.sqrt(c.head_width)
            close(
                at["attn.scores"], scale * jnp.einsum("BTHK,BSHK->BHTS", at["attn.q"], at["attn.k"])
            )
        close(at["ffn.hidden"], ffn.hidden(at["ffn.in"]))
        close(ffn.down(at["ffn.hidden"]), at["ffn"])


def test_widths_are_of_vectors(gpt2):
    widths = {
        "embed": 16,
        "block.0.attn.head.1": 4,
        "block.1.ffn.hidden": 64,
        "logits": 37,
        "block.0.ffn.in": 16,
    }
    assert {site: width(site, gpt2.config) for site in widths} == widths
    for site in ("block.0.attn.q", "block.0.attn.pattern"):
        with pytest.raises(
            ValueError,
            match=f"{site}' has more than a vector at each token; .*'block.0.attn.head.0'",
        ):
            width(site, gpt2.config)


def test_no_edit_of_scores_lets_a_token_look_where_it_may_not(gpt2):
    mask = np.array([[True] * 4 + [False] * 2, [False] * 2 + [True] * 4])
    name = "block.1.attn.pattern"
    sites = {"block.1.attn.scores": Scale(-1e30)}
    pattern = np.asarray(jmat.run(gpt2, TOKENS, mask=mask, sites=sites, keep=name)[1][name])
    allowed = np.tril(np.ones((6, 6), bool)) & mask[:, None] & mask[:, :, None]
    assert not pattern[
        np.broadcast_to(~allowed[:, None], pattern.shape) & mask[:, None, :, None]
    ].any()
    np.testing.assert_allclose(pattern.sum(-1), 1, atol=1e-6)


def test_heads_that_are_replaced_leave_the_others_alone():
    """Also where several heads share keys and values, and those in between are not
    computed.
    """
    for case in (BY_NAME["llama-plain"], BY_NAME["bloom-from-norm"]):
        model = hf.ours(case)
        H, K = model.config.heads, model.config.head_width
        plain = keep_block(model, 0, "attn.z")["attn.z"]
        for gone in ([1], [0, 2, 3], [H - 1], list(range(H))):
            sites = {f"block.0.attn.head.{h}": Zero() for h in gone}
            expected = plain.at[:, :, np.array(gone)].set(0)
            close(keep_block(model, 0, "attn.z", sites=sites)["attn.z"], expected)
            # The sites inside attention are then of all heads.
            at = keep_block(model, 0, "attn.z", "attn.q", sites=sites)
            close(at["attn.z"], expected)
            assert at["attn.q"].shape == (2, 6, H, K)


def test_names_are_given_singly_or_by_patterns(gpt2):
    kept = jmat.run(gpt2, TOKENS, keep="block.*.attn")[1]
    assert list(kept) == ["block.0.attn", "block.1.attn", "block.2.attn"]
    kept = jmat.run(
        gpt2, TOKENS, keep=["logits", "*.ffn.hidden", "block.1.ffn.hidden", "embed"], stop=3
    )[1]
    assert list(kept) == ["logits", *(f"block.{i}.ffn.hidden" for i in range(3)), "embed"]
    assert list(jmat.run(gpt2, TOKENS, keep=("block.*",), stop=2)[1]) == ["block.0", "block.1"]
    assert list(jmat.run(gpt2, TOKENS, keep={"block.1.*.in"}, stop=2)[1]) == [
        f"block.1.{part}.in" for part in ("ln_1", "attn", "ln_2", "ffn")
    ]
    assert list(jmat.run(gpt2, TOKENS, keep="*")[1]) == list(readable(3, 4))


def test_a_site_that_is_named_by_itself_goes_by_that_name(gpt2):
    sites = {"block.*.attn": Zero(), "block.1.attn": Scale(2.0), "*.ffn": Zero()}
    kept = jmat.run(
        gpt2, TOKENS, sites=sites, keep=["block.0.attn", "block.1.attn", "block.1.ffn"]
    )[1]
    plain = jmat.run(gpt2, kept_stream(gpt2), start=1, keep="block.1.attn")[1]["block.1.attn"]
    assert not kept["block.0.attn"].any()
    close(kept["block.1.attn"], 2 * plain)


def kept_stream(model):
    """What block 1 reads where attention and feed-forward of block 0 are replaced by
    nothing: the embedding.
    """
    return jmat.run(model, TOKENS, stop=0)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": ("block.0.atn",)}, r"unknown site 'block.0.atn'. Did you mean 'block.0.attn'"),
        (
            {"keep": "block.0.attn.qq"},
            r"unknown site 'block.0.attn.qq'. Did you mean 'block.0.attn.q'",
        ),
        (
            {"keep": "block.*.atn"},
            r"no site of this model that can be kept matches 'block.\*.atn'. Near.*'block.0.attn'",
        ),
        (
            {"sites": {"block.*.mid": zero(16)}},
            r"no site of this model that can be changed matches 'block.\*.mid'",
        ),
        (
            {"keep": "block.2*.attn", "stop": 2},
            r"no site that 'block.2\*.attn' matches is reached when blocks 0 .. 1 of",
        ),
        (
            {"sites": {"block.*.attn": zero(16), "*.1.attn": zero(16)}},
            r"'\*.1.attn' and 'block.\*.attn' both match 'block.1",
        ),
        (
            {"keep": ("block.3.attn",)},
            r"unknown site 'block.3.attn': the model has the blocks 0 .. 2",
        ),
        ({"keep": ("block.-1",)}, r"unknown site 'block.-1'"),
        ({"keep": ("block.0.attn.head.4",)}, r"unknown site 'block.0.attn.head.4'"),
        ({"sites": {"blocks.0.ffn": zero(16)}}, r"unknown site 'blocks.0.ffn'"),
        (
            {"sites": {"block.0.ffn.in": zero(16)}},
            r"'block.0.ffn.in' is an input.*replace 'block.0.ffn' instead",
        ),
        (
            {"sites": {"block.0.ffn": lambda x: x}},
            r"site 'block.0.ffn' is a function; expected a callable pytree",
        ),
        (
            {"sites": {"block.0.ffn": zero(16, 15)}},
            r"site 'block.\d.ffn' returned shape \(2, 6, 15\)",
        ),
        ({"sites": {"block.0": zero(16, 15)}}, r"site 'block.\d' returned shape \(2, 6, 15\)"),
        (
            {"sites": {"block.0.attn.head.1": zero(16)}},
            r"head.1' returned shape .*expected \(2, 6, 4\)",
        ),
        ({"sites": {"embed": Table(jnp.zeros((37, 15)))}}, r"'embed' returned shape \(2, 6, 15\)"),
        (
            {"sites": {"block.2": zero(16)}, "stop": 2},
            r"'block.2' is not reached when blocks 0 .. 1 of 3 are run",
        ),
        ({"keep": ("logits",), "stop": 2}, r"'logits' is not reached"),
        ({"sites": {"final_norm": zero(16)}, "stop": 2}, r"'final_norm' is not reached"),
        (
            {"keep": ("block.1.ffn",), "sites": {"block.1": zero(16)}},
            r"'block.1.ffn' is never reached: 'block.1' is",
        ),
        (
            {"sites": {"block.1": zero(16), "block.1.attn": zero(16)}},
            r"'block.1.attn' is never reached",
        ),
        (
            {"sites": {"block.1.mid": zero(16)}},
            r"'block.1.mid' is a sum.*'block.1.attn', which is added there",
        ),
        (
            {"keep": ("block.1.attn.head.0",), "sites": {"block.1.attn": zero(16)}},
            r"head.0' is never reached",
        ),
        (
            {"sites": {"block.1.attn.head.0": zero(16, 4), "block.1.attn": zero(16)}},
            r"head.0' is never reached",
        ),
    ],
)
def test_a_wrong_site_is_refused_by_name(gpt2, options, message):
    with pytest.raises(ValueError, match=message):
        jmat.run(gpt2, TOKENS, **options)


def test_an_array_is_no_replacement():
    with pytest.raises(
        ValueError, match=r"site 'block.0.ffn' is an array; expected jmat.Constant\(array\)"
    ):
        check_site("block.0.ffn", jnp.eye(16))


def test_what_is_not_reached_is_refused_when_a_stream_goes_on(gpt2):
    stream = jnp.zeros((2, 6, 16))
    with pytest.raises(ValueError, match="'embed' is not reached"):
        jmat.run(gpt2, stream, start=1, keep=("embed",))
    with pytest.raises(ValueError, match=r"'block.0.attn' is not reached"):
        jmat.run(gpt2, stream, start=1, sites={"block.0.attn": zero(16)})
    with pytest.raises(ValueError, match="'embed' is changed, but the inputs are a stream"):
        jmat.run(gpt2, stream, sites={"embed": Table(jnp.zeros((37, 16)))})


def test_a_headless_model_has_no_logits_unless_its_head_is_replaced():
    model = hf.ours(hf.bert("headless", model="BertModel"))
    for call in (
        lambda: jmat.run(model, TOKENS, keep=("logits",)),
        lambda: jmat.logits(model, jnp.zeros((2, 16))),
    ):
        with pytest.raises(ValueError, match="no language-model head"):
            call()
    assert jmat.logits(model, jnp.zeros((2, 16)), sites={"logits": zero(16, 7)}).shape == (2, 7)
