"""What each family does in its own way, and the traps that its checkpoints set."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

import jmat
from jmat import checkpoint, forward, layers, models, rotary
from jmat.config import Rotary
from tests import families, hf

BY_NAME = {case.name: case for case in families.CASES}
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


def config_of(case, **changes):
    """The config that jmat reads from a case's config.json, in which some fields are changed (None: removed)."""
    fields = {**getattr(transformers, case.config)(**case.fields).to_dict(), **changes}
    return models.config_from_hf({name: value for name, value in fields.items() if value is not None})


def refused(case, words, **changes):
    """Asserts that these fields make jmat refuse the config.json, naming them."""
    with pytest.raises(ValueError, match=words):
        config_of(case, **changes)


# --- positions --------------------------------------------------------------------------------------------------------


def test_padding_on_either_side_changes_nothing(model):
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, 37, (1, 7), dtype=np.int32)
    alone, _ = jmat.run(model, tokens)
    for left, right in ((4, 0), (0, 4), (3, 1)):
        pad = ((0, 0), (left, right))
        padded, _ = jmat.run(model, np.pad(tokens, pad, constant_values=1), mask=np.pad(np.ones((1, 7), bool), pad))
        np.testing.assert_allclose(padded[:, left : left + 7], alone, rtol=0, atol=2e-5)


def test_packed_texts_are_blind_to_one_another(model):
    rng = np.random.default_rng(1)
    texts = {2: rng.integers(2, 37, (1, 7), dtype=np.int32), 9: rng.integers(2, 37, (1, 1), dtype=np.int32)}
    tokens, segments = np.ones((1, 11), np.int32), np.zeros((1, 11), np.int32)  # padding before, between and after
    for number, (start, text) in enumerate(texts.items(), start=1):
        where = np.s_[:, start : start + text.shape[1]]
        tokens[where], segments[where] = text, number
    packed, _ = jmat.run(model, tokens, segments=segments)
    for start, text in texts.items():
        alone, _ = jmat.run(model, text)
        np.testing.assert_allclose(packed[:, start : start + text.shape[1]], alone, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["llama-yarn", "opt-plain", "roberta-plain", "bloom-plain"])
def test_longest_text(name, tmp_path):
    """As many tokens as there are positions, and one more."""
    case = BY_NAME[name]
    torch_model = hf.make(case)
    model, _ = jmat.load(hf.save(torch_model, tmp_path))
    longest = {"roberta-plain": 30, "bloom-plain": 300}.get(name, 32)  # RoBERTa's table holds the padding id's rows too
    if name == "bloom-plain":
        assert model.config.num_positions == 2048  # as BLOOM was trained; nothing in the file bounds it
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
    turned = layers.rotate
    plain = Rotary(width=4, theta=100.0)
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 6))

    def product(m, n):
        at = [jnp.full((1, 1), position, jnp.int32) for position in (m, n)]
        return float(jnp.vdot(turned(q, at[0], plain), turned(k, at[1], plain)))

    assert product(3, 1) == pytest.approx(product(12, 10), abs=1e-5)
    assert product(3, 1) != pytest.approx(product(3, 2), abs=1e-3)
    np.testing.assert_array_equal(turned(q, jnp.full((1, 1), 9, jnp.int32), plain)[..., 4:], q[..., 4:])


def test_rotary_fields_old_and_new_mean_the_same():
    case = BY_NAME["llama-llama3"]
    new = dict(case.fields["rope_parameters"])
    old = dict(new)
    theta, kind = old.pop("rope_theta"), old.pop("rope_type")
    for scaling in ({**old, "type": kind}, {**old, "rope_type": kind}):
        assert config_of(case, rope_parameters=None, rope_theta=theta, rope_scaling=scaling) == config_of(case)
    # Up to the longest text, `dynamic` is no scaling at all.
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": theta}
    default = {"rope_type": "default", "rope_theta": theta}
    assert config_of(case, rope_parameters=dynamic) == config_of(case, rope_parameters=default)
    assert config_of(case, rope_parameters=None).rotary == Rotary(width=16, theta=10000.0)


def test_pythia_fields_old_and_new_mean_the_same():
    case = families.gpt_neox("new", rope_parameters={"rope_theta": 300.0, "partial_rotary_factor": 0.5})
    old = {"rotary_emb_base": 300, "rotary_pct": 0.5, "rope_scaling": None}
    assert config_of(case, rope_parameters=None, **old) == config_of(case)
    both = {"rope_theta": 300, "partial_rotary_factor": 0.5}
    assert config_of(case, rope_parameters=None, **old, **both) == config_of(case)
    assert config_of(case, rope_parameters=None).rotary == Rotary(width=4, theta=10000.0)  # a quarter of 16


@pytest.mark.parametrize("heads", [*range(1, 13), 16, 20, 71, 112])
def test_alibi_slopes_are_those_of_transformers(heads):
    theirs = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)[:, 0, 1]
    np.testing.assert_allclose(layers.alibi_slopes(heads), theirs, rtol=1e-6)


def test_window_counts_the_token_itself():
    mask = layers.attention_mask(None, 6, True, jnp.int32(3))[0]
    np.testing.assert_array_equal(mask.sum(-1), [1, 2, 3, 3, 3, 3])
    np.testing.assert_array_equal(mask[5], [0, 0, 0, 1, 1, 1])


def test_windows_by_config():
    mistral, qwen = BY_NAME["mistral-window"], BY_NAME["qwen2-window"]
    assert config_of(mistral).windows == (4, 4)
    assert config_of(mistral, sliding_window=32).windows == ()  # no text can exceed it
    assert config_of(qwen).windows == (32, 3)
    assert config_of(qwen, use_sliding_window=False, layer_types=["full_attention"] * 2).windows == ()
    assert config_of(BY_NAME["gpt_neo-plain"]).windows == (32, 3, 32, 3)


def test_blocks_with_different_windows_share_one_program():
    model = hf.ours(families.gpt_neo("traced", hidden_size=36))
    before = forward._block._cache_size()
    jmat.run(model, np.full((1, 8), 3, np.int32))
    assert forward._block._cache_size() == before + 1


# --- wiring -----------------------------------------------------------------------------------------------------------


def test_residual_identities():
    """`jmat.sites` states them; here they are held against each family's values."""
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
        np.testing.assert_allclose(v["mid"], v[residual] + v["attn"], rtol=0, atol=1e-5, err_msg=name)
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
    """A head that is touched is computed alone: with its own share of keys, values, slopes."""
    model = hf.ours(BY_NAME[name])
    tokens = np.random.default_rng(0).integers(2, 37, (2, 8), dtype=np.int32)
    heads = tuple(f"block.1.attn.head.{h}" for h in range(model.config.heads))
    _, apart = jmat.run(model, tokens, keep=("block.1.attn", *heads))
    _, whole = jmat.run(model, tokens, keep=("block.1.attn",))
    np.testing.assert_allclose(apart["block.1.attn"], whole["block.1.attn"], rtol=0, atol=1e-5)
    side_by_side = jnp.concatenate([apart[head] for head in heads], axis=-1)
    np.testing.assert_allclose(model.blocks[1].attn.o(side_by_side), whole["block.1.attn"], rtol=0, atol=1e-5)
    assert float(jnp.abs(apart[heads[0]] - apart[heads[1]]).max()) > 1e-2


def test_final_norm_and_head_of_opt_350m():
    """The projection down to the token table belongs to the head: `final_norm` is D wide, and the identity."""
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


# --- checkpoints ------------------------------------------------------------------------------------------------------


def logits_of(model):
    tokens = np.arange(2, 14, dtype=np.int32).reshape(2, 6)
    return np.asarray(jmat.run(model, tokens, keep=("logits",))[1]["logits"])


@pytest.mark.parametrize(
    "name", ["gemma-plain", "opt-350m-untied", "gpt_neox-parallel", "bloom-plain", "roberta-plain"]
)
def test_saved_model_loads_in_transformers(name, tmp_path):
    """Both ways through every layout: fused head by head, offset, tied."""
    case = BY_NAME[name]
    theirs = hf.make(case)
    model, _ = jmat.load(hf.save(theirs, tmp_path / "theirs"))
    checkpoint.save_model(tmp_path / "ours", model)
    again, report = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for (key, ours), theirs_ in zip(again.state_dict().items(), theirs.state_dict().values(), strict=True):
        np.testing.assert_array_equal(ours, theirs_, err_msg=key)


def rewritten(case, folder, change):
    """A case as jmat loads it after its tensors' names went through `change`: dict → dict."""
    hf.save(hf.make(case), folder)
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({key: value.clone() for key, value in tensors.items()}, folder / "model.safetensors")
    return jmat.load(folder)[0]


def renamed(old, new):
    return lambda tensors: {key.replace(old, new, 1): value for key, value in tensors.items()}


OLD_NAMES = {
    "llama-no-prefix": ("llama-biases-tied", renamed("model.", "")),
    "llama-frequencies-stored": (
        "llama-plain",
        lambda t: {**t, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)},
    ),
    "opt-decoder-prefix": ("opt-plain", renamed("model.decoder.", "decoder.")),
    "opt-head-stored": ("opt-plain", lambda t: {**t, "lm_head.weight": t["model.decoder.embed_tokens.weight"]}),
    "gpt_neox-new-head": ("gpt_neox-parallel", renamed("embed_out.", "lm_head.")),
    "gpt_neox-old-head": ("gpt_neox-parallel", renamed("lm_head.", "embed_out.")),
    "gpt_neox-buffers": (
        "gpt_neox-parallel",
        lambda t: {
            **t,
            "gpt_neox.layers.1.attention.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
            "gpt_neox.layers.1.attention.masked_bias": torch.tensor(-1e9),
            "gpt_neox.layers.1.attention.rotary_emb.inv_freq": torch.ones(2),
        },
    ),
    "bloom-no-prefix": ("bloom-plain", renamed("transformer.", "")),
    "roberta-old": (
        "roberta-plain",
        lambda t: {
            **t,
            "roberta.embeddings.position_ids": torch.arange(32)[None],
            "roberta.pooler.dense.weight": torch.ones(24, 24),
            "lm_head.decoder.bias": t["lm_head.bias"],
            "lm_head.decoder.weight": t["roberta.embeddings.word_embeddings.weight"],
        },
    ),
    "distilbert-tied-stored": (
        "distilbert-plain",
        lambda t: {**t, "vocab_projector.weight": t["distilbert.embeddings.word_embeddings.weight"]},
    ),
    "gpt_neo-buffers": (
        "gpt_neo-plain",
        lambda t: {**t, "transformer.h.0.attn.attention.masked_bias": torch.tensor(-1e9)},
    ),
}


@pytest.mark.parametrize("name", OLD_NAMES)
def test_old_files_mean_the_same(name, tmp_path):
    case_name, change = OLD_NAMES[name]
    case = BY_NAME[case_name]
    old = checkpoint.parameters(rewritten(case, tmp_path, change))
    new = checkpoint.parameters(hf.ours(case))
    assert old.keys() == new.keys()
    for path, value in new.items():
        np.testing.assert_array_equal(old[path], value, err_msg=path)


def test_head_stored_under_two_names_is_refused(tmp_path):
    case = BY_NAME["gpt_neox-parallel"]
    with pytest.raises(ValueError, match="is the same tensor as another"):
        rewritten(
            case, tmp_path, lambda t: {**t, **{f"{n}.weight": torch.ones(37, 48) for n in ("lm_head", "embed_out")}}
        )


def test_biases_that_the_config_denies_are_surplus(tmp_path):
    case = BY_NAME["qwen2-window"]
    with pytest.raises(ValueError, match=r"surplus model\.layers\.0\.self_attn\.o_proj\.bias"):
        rewritten(case, tmp_path, lambda t: {**t, "model.layers.0.self_attn.o_proj.bias": torch.ones(24)})


def test_untied_model_without_its_head_makes_no_predictions():
    model = hf.ours(BY_NAME["llama-headless"])
    assert model.head is None
    with pytest.raises(ValueError, match="no language-model head"):
        logits_of(model)


def test_bfloat16_checkpoint_is_read_exactly(tmp_path):
    """Gemma's norms store the scale less 1, which bfloat16 holds and 1 + scale would not."""
    case = BY_NAME["gemma-plain"]
    model, _ = jmat.load(hf.save(hf.make(case).to(torch.bfloat16), tmp_path))
    theirs = transformers.GemmaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.arange(2, 14).reshape(2, 6)).logits.numpy()
    np.testing.assert_allclose(logits_of(model), expected, rtol=0, atol=2e-4)
    low, _ = jmat.load(tmp_path, dtype="bfloat16")
    assert low.blocks[0].ln_1.scale.dtype == jnp.bfloat16
    assert np.abs(logits_of(low) - expected).max() < 0.1 * np.abs(expected).max()


# --- config files -----------------------------------------------------------------------------------------------------


def test_older_names_of_sizes():
    bloom, distil, neo = BY_NAME["bloom-plain"], BY_NAME["distilbert-plain"], BY_NAME["gpt_neo-plain"]
    old = {"n_embed": 24, "hidden_size": None, "num_attention_heads": 6, "n_head": None, "num_hidden_layers": 2}
    assert config_of(bloom, n_layer=None, **old) == config_of(bloom)
    assert config_of(bloom, seq_length=512).num_positions == 512
    old = {"hidden_size": 24, "num_attention_heads": 6, "num_hidden_layers": 2}
    assert config_of(distil, dim=None, n_heads=None, n_layers=None, **old) == config_of(distil)
    old = {"num_attention_heads": 6, "num_hidden_layers": 4}
    assert config_of(neo, num_heads=None, num_layers=None, **old) == config_of(neo)


def test_missing_and_null_key_value_heads_differ():
    """Mistral's default is 8; a null says as many as heads."""
    fields = {"model_type": "mistral", "num_attention_heads": 16, "hidden_size": 64}
    assert models.config_from_hf(fields).kv_heads == 8
    assert models.config_from_hf({**fields, "num_key_value_heads": None}).kv_heads == 16
    assert models.config_from_hf({**fields, "model_type": "llama"}).kv_heads == 16


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma", "opt", "gpt_neox", "bloom", "roberta"])
def test_defaults_are_those_of_transformers(kind):
    """A config.json that only names its type."""
    full = json.loads(transformers.AutoConfig.for_model(kind).to_json_string(use_diff=False))
    assert models.config_from_hf({"model_type": kind}) == models.config_from_hf(full)


def test_gemma_says_gelu_and_means_its_approximation():
    case = BY_NAME["gemma-plain"]
    assert config_of(case, hidden_act="gelu").activation == "gelu_pytorch_tanh"
    assert config_of(case).embed_scale == math.sqrt(24)


def test_refusals_name_the_field():
    llama, neox, bloom = BY_NAME["llama-plain"], BY_NAME["gpt_neox-parallel"], BY_NAME["bloom-plain"]
    longrope = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]}
    refused(llama, "longrope", rope_parameters=longrope)
    refused(llama, "mrope_section", rope_parameters={"rope_type": "default", "mrope_section": [1, 1]})
    refused(llama, "partial_rotary_factor", rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5})
    refused(llama, "needs factor", rope_parameters={"rope_type": "linear"})
    refused(llama, "factor should be", rope_parameters={"rope_type": "linear", "factor": "4"})
    refused(llama, "full_attention", rope_parameters={"full_attention": {"rope_type": "default"}})
    refused(llama, "sliding_window", sliding_window=4)
    refused(llama, "head_dim", head_dim=-1)
    refused(llama, "key-value heads", num_key_value_heads=4)
    refused(BY_NAME["mistral-window"], "layer_types", layer_types=families.ALTERNATE)
    refused(BY_NAME["mistral-window"], "attention_bias", attention_bias=True)
    refused(BY_NAME["qwen3-alternate"], "layer_types", layer_types=["full_attention"])
    refused(BY_NAME["gemma-plain"], "use_bidirectional_attention", use_bidirectional_attention=True)
    refused(neox, "rope_theta", rope_theta=5.0)
    refused(bloom, "slow_but_exact", slow_but_exact=True, pretraining_tp=4)
    refused(bloom, "n_inner", n_inner=7)
    refused(BY_NAME["gpt_neo-plain"], "attention_types", attention_types=[[["global"], 3]])
    refused(BY_NAME["gpt_neo-plain"], "attention_types", attention_types=[[["banded"], 4]])
    refused(BY_NAME["gpt_neo-plain"], "attention_layers", attention_layers=["local"] * 4)
    refused(BY_NAME["roberta-plain"], "leaves no position", max_position_embeddings=2)


def test_sharded_files(tmp_path):
    case = BY_NAME["bloom-plain"]
    hf.make(case).save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    np.testing.assert_array_equal(logits_of(jmat.load(tmp_path)[0]), logits_of(hf.ours(case)))
