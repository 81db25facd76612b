"""What each family does in its own way: positions, windows, wiring, heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

import jmat
from jmat.models import attention, rotary, stack
from jmat.models.config import Rotary
from tests import families, hf
from tests.families import BY_NAME, config_of

# One of each way to know positions and to wire a block.
DISTINCT = [
    "llama-llama3",
    "mistral-window",
    "qwen3-alternate",
    "opt-350m",
    "gpt_neox-parallel",
    "bloom-from-norm",
    "roberta-plain",
    "gpt_neo-plain",
]


@pytest.fixture(scope="module", params=DISTINCT)
def model(request):
    return hf.ours(BY_NAME[request.param])


# --- positions ------------------------------------------------------------------------------------


def test_padding_on_either_side_changes_nothing(model):
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, 37, (1, 7), dtype=np.int32)
    alone, _ = jmat.run(model, tokens)
    for left, right in ((4, 0), (0, 4), (3, 1)):
        pad = ((0, 0), (left, right))
        padded, _ = jmat.run(
            model, np.pad(tokens, pad, constant_values=1), mask=np.pad(np.ones((1, 7), bool), pad)
        )
        np.testing.assert_allclose(padded[:, left : left + 7], alone, rtol=0, atol=2e-5)


def test_packed_texts_are_blind_to_one_another(model):
    rng = np.random.default_rng(1)
    texts = {
        2: rng.integers(2, 37, (1, 7), dtype=np.int32),
        9: rng.integers(2, 37, (1, 1), dtype=np.int32),
    }
    # padding before, between and after
    tokens, segments = np.ones((1, 11), np.int32), np.zeros((1, 11), np.int32)
    for number, (start, text) in enumerate(texts.items(), start=1):
        where = np.s_[:, start : start + text.shape[1]]
        tokens[where], segments[where] = text, number
    packed, _ = jmat.run(model, tokens, segments=segments)
    for start, text in texts.items():
        alone, _ = jmat.run(model, text)
        np.testing.assert_allclose(
            packed[:, start : start + text.shape[1]], alone, rtol=0, atol=2e-5
        )


@pytest.mark.parametrize("name", ["llama-yarn", "opt-plain", "roberta-plain", "bloom-plain"])
def test_longest_text(name, tmp_path):
    """As many tokens as there are positions, and one more."""
    case = BY_NAME[name]
    torch_model = hf.make(case)
    model, _ = jmat.load(hf.save(torch_model, tmp_path))
    # RoBERTa's table holds the padding id's rows too
    longest = {"roberta-plain": 30, "bloom-plain": 300}.get(name, 32)
    if name == "bloom-plain":
        # as BLOOM was trained; nothing in the file bounds it
        assert model.config.num_positions == 2048
    else:
        assert model.config.num_positions == longest
        with pytest.raises(ValueError, match=f"has positions for {longest}"):
            jmat.run(model, np.full((1, longest + 1), 5, np.int32))
    tokens = np.random.default_rng(0).integers(2, 37, (1, longest), dtype=np.int32)
    _, ours = jmat.run(model, tokens, keep=("logits",))
    with torch.no_grad():
        theirs = torch_model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(ours["logits"], theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", families.CASES[3:7], ids=lambda case: case.name)
def test_rotary_frequencies_are_those_of_transformers(case):
    config = transformers.LlamaConfig(**case.fields)
    theirs, amplitude = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config)
    ours = config_of(case).rotary
    np.testing.assert_allclose(rotary.frequencies(ours), theirs, rtol=2e-7)
    assert ours.amplitude == pytest.approx(amplitude)


def test_rotary_turns_pairs_by_position():
    """⟨turn(q, m), turn(k, n)⟩ depends on m − n alone; what is not turned passes."""
    turned = rotary.rotate
    plain = Rotary(width=4, theta=100.0)
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 6))

    def product(m, n):
        at = [jnp.full((1, 1), position, jnp.int32) for position in (m, n)]
        return float(jnp.vdot(turned(q, at[0], plain), turned(k, at[1], plain)))

    assert product(3, 1) == pytest.approx(product(12, 10), abs=1e-5)
    assert product(3, 1) != pytest.approx(product(3, 2), abs=1e-3)
    np.testing.assert_array_equal(
        turned(q, jnp.full((1, 1), 9, jnp.int32), plain)[..., 4:], q[..., 4:]
    )


def test_rotary_fields_old_and_new_mean_the_same():
    case = BY_NAME["llama-llama3"]
    new = dict(case.fields["rope_parameters"])
    old = dict(new)
    theta, kind = old.pop("rope_theta"), old.pop("rope_type")
    for scaling in ({**old, "type": kind}, {**old, "rope_type": kind}):
        assert config_of(
            case, rope_parameters=None, rope_theta=theta, rope_scaling=scaling
        ) == config_of(case)
    # Up to the longest text, `dynamic` is no scaling at all.
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": theta}
    default = {"rope_type": "default", "rope_theta": theta}
    assert config_of(case, rope_parameters=dynamic) == config_of(case, rope_parameters=default)
    assert config_of(case, rope_parameters=None).rotary == Rotary(width=16, theta=10000.0)


def test_pythia_fields_old_and_new_mean_the_same():
    case = families.gpt_neox(
        "new", rope_parameters={"rope_theta": 300.0, "partial_rotary_factor": 0.5}
    )
    old = {"rotary_emb_base": 300, "rotary_pct": 0.5, "rope_scaling": None}
    assert config_of(case, rope_parameters=None, **old) == config_of(case)
    both = {"rope_theta": 300, "partial_rotary_factor": 0.5}
    assert config_of(case, rope_parameters=None, **old, **both) == config_of(case)
    # a quarter of 16
    assert config_of(case, rope_parameters=None).rotary == Rotary(width=4, theta=10000.0)


@pytest.mark.parametrize("heads", [*range(1, 13), 16, 20, 71, 112])
def test_alibi_slopes_are_those_of_transformers(heads):
    theirs = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)[:, 0, 1]
    np.testing.assert_allclose(attention.alibi_slopes(heads), theirs, rtol=1e-6)


def test_window_counts_the_token_itself():
    mask = attention.attention_mask(None, 6, True, jnp.int32(3))[0]
    np.testing.assert_array_equal(mask.sum(-1), [1, 2, 3, 3, 3, 3])
    np.testing.assert_array_equal(mask[5], [0, 0, 0, 1, 1, 1])


def test_windows_by_config():
    mistral, qwen = BY_NAME["mistral-window"], BY_NAME["qwen2-window"]
    assert config_of(mistral).windows == (4, 4)
    assert config_of(mistral, sliding_window=32).windows == ()  # no text can exceed it
    assert config_of(qwen).windows == (32, 3)
    assert (
        config_of(qwen, use_sliding_window=False, layer_types=["full_attention"] * 2).windows == ()
    )
    assert config_of(BY_NAME["gpt_neo-plain"]).windows == (32, 3, 32, 3)


def test_blocks_with_different_windows_share_one_program():
    model = hf.ours(families.gpt_neo("traced", hidden_size=36))
    before = stack._block._cache_size()
    jmat.run(model, np.full((1, 8), 3, np.int32))
    assert stack._block._cache_size() == before + 1


# --- wiring ---------------------------------------------------------------------------------------


def test_residual_identities():
    """`jmat.models.sites` states them; here they are held against each family's values."""
    wiring = {
        "llama-plain": ("in", "mid", lambda v: v["mid"] + v["ffn"]),
        "gpt_neox-parallel": ("in", "in", lambda v: v["mid"] + v["ffn"]),
        "bloom-from-norm": ("ln_1", "mid", lambda v: v["ln_2"] + v["ffn"]),
        "opt-350m": ("in", None, lambda v: v["norm"](v["ln_1"] + v["ffn"])),
    }
    names = ("ln_1.in", "ln_1", "attn.in", "attn", "mid", "ln_2.in", "ln_2", "ffn.in", "ffn")
    tokens = np.random.default_rng(0).integers(2, 37, (2, 6), dtype=np.int32)
    for name, (residual, ln_2_reads, out) in wiring.items():
        model = hf.ours(BY_NAME[name])
        keep = ("embed", "block.0", "block.1", *(f"block.1.{part}" for part in names))
        _, acts = jmat.run(model, tokens, keep=keep)
        v = {part: acts[f"block.1.{part}"] for part in names}
        v |= {"in": acts["block.0"], "norm": model.blocks[1].ln_2}
        same = np.testing.assert_array_equal
        np.testing.assert_allclose(
            v["mid"], v[residual] + v["attn"], rtol=0, atol=1e-5, err_msg=name
        )
        np.testing.assert_allclose(acts["block.1"], out(v), rtol=0, atol=1e-5, err_msg=name)
        if ln_2_reads is None:  # post-norm
            same(v["attn.in"], v["in"])
            same(v["ln_1.in"], v["mid"])
            same(v["ffn.in"], v["ln_1"])
        else:
            same(v["ln_1.in"], v["in"])
            same(v["attn.in"], v["ln_1"])
            same(v["ln_2.in"], v[ln_2_reads])
            same(v["ffn.in"], v["ln_2"])


@pytest.mark.parametrize("name", ["llama-multi-query", "qwen3-alternate", "bloom-plain"])
def test_heads_one_at_a_time_are_attention(name):
    """A head that is touched is computed alone: with its own share of keys, values,
    slopes.
    """
    model = hf.ours(BY_NAME[name])
    tokens = np.random.default_rng(0).integers(2, 37, (2, 8), dtype=np.int32)
    heads = tuple(f"block.1.attn.head.{h}" for h in range(model.config.heads))
    _, apart = jmat.run(model, tokens, keep=("block.1.attn", *heads))
    _, whole = jmat.run(model, tokens, keep=("block.1.attn",))
    np.testing.assert_allclose(apart["block.1.attn"], whole["block.1.attn"], rtol=0, atol=1e-5)
    side_by_side = jnp.concatenate([apart[head] for head in heads], axis=-1)
    np.testing.assert_allclose(
        model.blocks[1].attn.o(side_by_side), whole["block.1.attn"], rtol=0, atol=1e-5
    )
    assert float(jnp.abs(apart[heads[0]] - apart[heads[1]]).max()) > 1e-2


def test_final_norm_and_head_of_opt_350m():
    """The projection down to the token table belongs to the head: `final_norm` is D
    wide, and the identity.
    """
    model = hf.ours(BY_NAME["opt-350m"])
    x, acts = jmat.run(model, np.full((1, 3), 5, np.int32), keep=("final_norm", "logits"))
    np.testing.assert_array_equal(acts["final_norm"], x)
    by_hand = x @ model.head.project.kernel[...] @ model.embed.tokens.table[...].T
    np.testing.assert_allclose(acts["logits"], by_hand, rtol=0, atol=1e-5)


def test_type_ids_where_there_are_none():
    model = hf.ours(BY_NAME["distilbert-plain"])
    tokens = np.full((1, 3), 5, np.int32)
    with pytest.raises(ValueError, match="distilbert models have no token types"):
        jmat.run(model, tokens, type_ids=np.zeros_like(tokens))
