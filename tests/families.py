"""Tiny models of every family beyond GPT-2 and BERT, together covering what their
config files can ask for.
"""

from typing import Any

import transformers

from jmat import models
from tests.hf import Case

_SIZES = {"vocab_size": 37, "max_position_embeddings": 32}
_LLAMA = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
}
_OPT = {"hidden_size": 24, "ffn_dim": 20, "num_hidden_layers": 2, "num_attention_heads": 6}
_NEOX = {
    "hidden_size": 48,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}
_BLOOM = {"vocab_size": 37, "hidden_size": 24, "n_layer": 2, "n_head": 6}
_NEO = {
    "hidden_size": 24,
    "num_layers": 4,
    "num_heads": 6,
    "attention_types": [[["global", "local"], 2]],
}
_DISTIL = {"dim": 24, "hidden_dim": 20, "n_layers": 2, "n_heads": 6}


def llama(name: str, kind: str = "Llama", *, model: str = "ForCausalLM", **fields: Any) -> Case:
    """A LLaMA, Mistral, Qwen or Gemma of 2 blocks, D = 24, H = 6, two query heads to
    one of keys and values.
    """
    base = {
        **_SIZES,
        **_LLAMA,
        "num_key_value_heads": 3,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    return _case(f"{kind.lower()}-{name}", f"{kind}Config", kind + model, {**base, **fields})


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    """Heads of 16 coordinates whose rotary positions are scaled from 8 to 32."""
    theta = fields.pop("rope_theta", 1000.0)
    return {
        "head_dim": 16,
        "rope_parameters": {"rope_type": kind, "rope_theta": theta, "factor": 4.0, **fields},
    }


def opt(name: str, *, model: str = "OPTForCausalLM", **fields: Any) -> Case:
    """An OPT of 2 blocks, D = 24, H = 6."""
    return _case(f"opt-{name}", "OPTConfig", model, {**_SIZES, **_OPT, **fields})


def gpt_neox(name: str, **fields: Any) -> Case:
    """A GPT-NeoX of 2 blocks, D = 48, H = 3."""
    hidden = (".mid",) if fields.get("use_parallel_residual", True) else ()
    fields = {**_SIZES, **_NEOX, **fields}
    return _case(f"gpt_neox-{name}", "GPTNeoXConfig", "GPTNeoXForCausalLM", fields, hidden)


def bloom(name: str, **fields: Any) -> Case:
    """A BLOOM of 2 blocks, D = 24, H = 6."""
    return _case(f"bloom-{name}", "BloomConfig", "BloomForCausalLM", {**_BLOOM, **fields})


def roberta(name: str, kind: str = "Roberta", **fields: Any) -> Case:
    """A RoBERTa of 2 blocks, D = 24, H = 6, whose padding id is 1."""
    fields = {**_SIZES, **_LLAMA, "type_vocab_size": 1, **fields}
    return _case(f"{kind.lower()}-{name}", f"{kind}Config", f"{kind}ForMaskedLM", fields)


def distilbert(name: str, **fields: Any) -> Case:
    """A DistilBERT of 2 blocks, D = 24, H = 6."""
    return _case(
        f"distilbert-{name}",
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {**_SIZES, **_DISTIL, **fields},
    )


def gpt_neo(name: str, **fields: Any) -> Case:
    """A GPT-Neo of 4 blocks, D = 24, H = 6, that alternates between all tokens and the
    last 3.
    """
    fields = {**_SIZES, **_NEO, "window_size": 3, "bos_token_id": 0, "eos_token_id": 0, **fields}
    return _case(f"gpt_neo-{name}", "GPTNeoConfig", "GPTNeoForCausalLM", fields)


def _case(
    name: str, config: str, model: str, fields: dict[str, Any], hidden: tuple[str, ...] = ()
) -> Case:
    no_head = () if model.endswith("LM") else ("logits",)
    return Case(name, config, model, fields, hidden=(*hidden, *no_head))


LLAMA3 = rope(
    "llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8
)
YARN = rope(
    "yarn",
    original_max_position_embeddings=8,
    beta_fast=4.0,
    beta_slow=0.5,
    mscale=0.7,
    mscale_all_dim=0.3,
)
ALTERNATE = ["sliding_attention", "full_attention"]
PARTIAL = {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0, "partial_rotary_factor": 0.35}

CASES = [
    llama("plain"),
    llama(
        "biases-tied",
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=0.1,
    ),
    llama("multi-query", num_key_value_heads=1, head_dim=10, hidden_act="gelu"),
    llama("multi-head", num_key_value_heads=6, **rope("linear")),
    llama("llama3", **LLAMA3),
    llama("yarn", **YARN),
    llama("yarn-fractional", **rope("yarn", original_max_position_embeddings=8, truncate=False)),
    llama("headless", model="Model"),
    llama("window", "Mistral", sliding_window=4),
    llama("no-window", "Mistral", sliding_window=None, tie_word_embeddings=True),
    llama("window", "Qwen2", use_sliding_window=True, sliding_window=3, max_window_layers=1),
    llama(
        "alternate",
        "Qwen3",
        head_dim=8,
        use_sliding_window=True,
        sliding_window=3,
        layer_types=ALTERNATE,
    ),
    llama("bias", "Qwen3", head_dim=6, attention_bias=True, tie_word_embeddings=True),
    llama("plain", "Gemma", head_dim=8),
    opt("plain"),
    opt("350m", do_layer_norm_before=False, word_embed_proj_dim=16),
    opt(
        "350m-untied", do_layer_norm_before=False, word_embed_proj_dim=32, tie_word_embeddings=False
    ),
    opt("bare", enable_bias=False, layer_norm_elementwise_affine=False, activation_function="gelu"),
    opt("removed", _remove_final_layer_norm=True),
    gpt_neox("parallel"),
    gpt_neox(
        "sequential", use_parallel_residual=False, tie_word_embeddings=True, attention_bias=False
    ),
    gpt_neox("odd-pairs", rope_parameters=PARTIAL),
    bloom("plain"),
    bloom(
        "from-norm",
        apply_residual_connection_post_layernorm=True,
        n_head=8,
        tie_word_embeddings=False,
    ),
    roberta("plain"),
    roberta(
        "relu-untied",
        hidden_act="relu",
        tie_word_embeddings=False,
        pad_token_id=0,
        type_vocab_size=2,
    ),
    roberta("plain", "XLMRoberta"),
    roberta("decoder", "Camembert", is_decoder=True),
    distilbert("plain"),
    distilbert("relu-untied", activation="relu", tie_word_embeddings=False),
    gpt_neo("plain"),
    gpt_neo(
        "local-untied", attention_types=[[["local"], 3], [["global"], 1]], tie_word_embeddings=False
    ),
]
BY_NAME = {case.name: case for case in CASES}


def config_of(case, **changes):
    """The config that jmat reads from a case's config.json, in which some fields are
    changed (None: removed).
    """
    fields = {**getattr(transformers, case.config)(**case.fields).to_dict(), **changes}
    return models.config_from_hf(
        {name: value for name, value in fields.items() if value is not None}
    )
