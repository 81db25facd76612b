"""The files of each family: tensors and config fields under old and new names, and what
is refused.
"""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import jmat
from jmat import checkpoint, models
from tests import families, hf
from tests.families import BY_NAME, config_of


def refused(case, words, **changes):
    """Asserts that these fields make jmat refuse the config.json, naming them."""
    with pytest.raises(ValueError, match=words):
        config_of(case, **changes)


# --- checkpoints ----------------------------------------------------------------------------------


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
    for (key, ours), theirs_ in zip(
        again.state_dict().items(), theirs.state_dict().values(), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs_, err_msg=key)


def rewritten(case, folder, change):
    """A case as jmat loads it after its tensors' names went through `change`: dict →
    dict.
    """
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
    "opt-head-stored": (
        "opt-plain",
        lambda t: {**t, "lm_head.weight": t["model.decoder.embed_tokens.weight"]},
    ),
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
        lambda t: {
            **t,
            "vocab_projector.weight": t["distilbert.embeddings.word_embeddings.weight"],
        },
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
            case,
            tmp_path,
            lambda t: {
                **t,
                **{f"{n}.weight": torch.ones(37, 48) for n in ("lm_head", "embed_out")},
            },
        )


def test_biases_that_the_config_denies_are_surplus(tmp_path):
    case = BY_NAME["qwen2-window"]
    with pytest.raises(ValueError, match=r"surplus model\.layers\.0\.self_attn\.o_proj\.bias"):
        rewritten(
            case, tmp_path, lambda t: {**t, "model.layers.0.self_attn.o_proj.bias": torch.ones(24)}
        )


def test_untied_model_without_its_head_makes_no_predictions():
    model = hf.ours(BY_NAME["llama-headless"])
    assert model.head is None
    with pytest.raises(ValueError, match="no language-model head"):
        logits_of(model)


def test_untied_projected_model_without_its_head_makes_no_predictions(tmp_path):
    """OPT-350m's `project_out` belongs to its decoder, and is stored even without a
    head.
    """
    fields = {
        "do_layer_norm_before": False,
        "word_embed_proj_dim": 16,
        "tie_word_embeddings": False,
    }
    folder = hf.save(hf.make(families.opt("350m-headless", model="OPTModel", **fields)), tmp_path)
    assert jmat.load(folder)[0].head is None


def test_bfloat16_checkpoint_is_read_exactly(tmp_path):
    """Gemma's norms store the scale less 1, which bfloat16 holds and 1 + scale would
    not.
    """
    case = BY_NAME["gemma-plain"]
    model, _ = jmat.load(hf.save(hf.make(case).to(torch.bfloat16), tmp_path))
    theirs = transformers.GemmaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.arange(2, 14).reshape(2, 6)).logits.numpy()
    np.testing.assert_allclose(logits_of(model), expected, rtol=0, atol=2e-4)
    low, _ = jmat.load(tmp_path, dtype="bfloat16")
    assert low.blocks[0].ln_1.scale.dtype == jnp.bfloat16
    assert np.abs(logits_of(low) - expected).max() < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize(
    "name",
    [
        "bloom-plain",
        "opt-350m",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gpt_neox-odd-pairs", "roberta-plain")
        ),
    ],
)
def test_bfloat16_all_the_way(name):
    case = BY_NAME[name]
    low, high = hf.ours(case, dtype="bfloat16"), hf.ours(case)
    x, _ = jmat.run(low, np.full((1, 6), 5, np.int32))
    assert x.dtype == jnp.bfloat16
    expected = logits_of(high)
    assert logits_of(low).dtype == np.float32
    assert np.abs(logits_of(low) - expected).max() < 0.1 * np.abs(expected).max()


TIED = [
    *(
        hf.gpt2("tied"),
        hf.bert("tied"),
        families.llama("tied", tie_word_embeddings=True),
        BY_NAME["gemma-plain"],
    ),
    *(
        BY_NAME[name]
        for name in (
            "mistral-no-window",
            "qwen3-bias",
            "opt-plain",
            "opt-350m",
            "gpt_neox-sequential",
        )
    ),
    *(
        BY_NAME[name]
        for name in ("bloom-plain", "roberta-plain", "camembert-decoder", "distilbert-plain")
    ),
    BY_NAME["gpt_neo-plain"],
]


@pytest.mark.parametrize("case", TIED, ids=lambda case: case.name)
def test_a_tied_model_of_which_only_the_head_is_stored_loads_as_in_transformers(case, tmp_path):
    theirs = hf.make(case)
    head, table = models.FAMILIES[theirs.config.model_type].tied

    def move(tensors):
        (name,) = [name for name in tensors if name.endswith(table)]
        prefix = (
            "cls.predictions.decoder"
            if theirs.config.model_type == "bert"
            else head.removesuffix(".weight")
        )
        return {
            (f"{prefix}.weight" if key == name else key): value for key, value in tensors.items()
        }

    ours = rewritten(case, tmp_path, move)
    again = type(theirs).from_pretrained(tmp_path)
    np.testing.assert_array_equal(
        again.get_input_embeddings().weight.detach(), theirs.get_input_embeddings().weight.detach()
    )
    for path, value in checkpoint.parameters(hf.ours(case)).items():
        np.testing.assert_array_equal(checkpoint.parameters(ours)[path], value, err_msg=path)


@pytest.mark.parametrize(
    "name", ["llama-plain", "opt-plain", "gpt_neox-parallel", "bloom-plain", "gpt_neo-plain"]
)
def test_value_heads_are_passed_over_with_a_line(name, tmp_path, caplog):
    case = BY_NAME[name]
    extra = {"v_head.summary.weight": torch.ones(1, 24), "v_head.summary.bias": torch.ones(1)}
    ours = rewritten(case, tmp_path, lambda tensors: {**tensors, **extra})
    assert [line.partition(" ")[2] for line in caplog.messages] == [
        "holds heads for other tasks, which are passed over: v_head.summary.bias; "
        "v_head.summary.weight."
    ]
    for path, value in checkpoint.parameters(hf.ours(case)).items():
        np.testing.assert_array_equal(checkpoint.parameters(ours)[path], value, err_msg=path)


# --- config files ---------------------------------------------------------------------------------


def test_older_names_of_sizes():
    bloom, distil, neo = (
        BY_NAME["bloom-plain"],
        BY_NAME["distilbert-plain"],
        BY_NAME["gpt_neo-plain"],
    )
    old = {
        "n_embed": 24,
        "hidden_size": None,
        "num_attention_heads": 6,
        "n_head": None,
        "num_hidden_layers": 2,
    }
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


@pytest.mark.parametrize(
    "kind", ["llama", "mistral", "qwen2", "qwen3", "gemma", "opt", "gpt_neox", "bloom", "roberta"]
)
def test_defaults_are_those_of_transformers(kind):
    """A config.json that only names its type."""
    full = json.loads(transformers.AutoConfig.for_model(kind).to_json_string(use_diff=False))
    assert models.config_from_hf({"model_type": kind}) == models.config_from_hf(full)


def test_gemma_says_gelu_and_means_its_approximation():
    case = BY_NAME["gemma-plain"]
    assert config_of(case, hidden_act="gelu").activation == "gelu_pytorch_tanh"
    assert config_of(case).embed_scale == math.sqrt(24)


def test_refusals_name_the_field():
    llama, neox, bloom = (
        BY_NAME["llama-plain"],
        BY_NAME["gpt_neox-parallel"],
        BY_NAME["bloom-plain"],
    )
    longrope = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]}
    refused(llama, "longrope", rope_parameters=longrope)
    refused(
        llama, "mrope_section", rope_parameters={"rope_type": "default", "mrope_section": [1, 1]}
    )
    refused(
        llama,
        "partial_rotary_factor",
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5},
    )
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
