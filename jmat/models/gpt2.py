"""GPT-2 (pre-norm, causal; Radford et al. 2019): any size, distilgpt2 included."""

import json
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jmat.config import ConfigReader, ModelConfig
from jmat.layers import ACTIVATIONS, Attention, Context, Dense, Embedding, FeedForward, LayerNorm
from jmat.models.family import PLAIN, TRANSPOSED, Family, Key, fused
from jmat.sites import Tap


class Embed(nnx.Module):
    """Token plus position embedding: h_0."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.tokens = Embedding(config.vocab_size, config.width, std=config.init_std, rngs=rngs)
        self.positions = Embedding(config.num_positions, config.width, std=config.init_std, rngs=rngs)

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], type_ids: Int[Array, "B T"] | None
    ) -> Float[Array, "B T D"]:
        x = self.tokens(tokens) + self.positions(positions)
        # Hugging Face's GPT-2 reads type ids from the token table.
        return x if type_ids is None else x + self.tokens(type_ids)


class Block(nnx.Module):
    """One pre-norm block."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        # GPT-2 shrinks what is written to the stream by the number of residual adds.
        out_std = config.init_std / math.sqrt(2 * config.layers)
        self.ln_1 = LayerNorm(config.width, config.norm_eps)
        self.attn = Attention(config, out_std=out_std, rngs=rngs)
        self.ln_2 = LayerNorm(config.width, config.norm_eps)
        self.ffn = FeedForward(config, out_std=out_std, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], context: Context, tap: Tap) -> Float[Array, "B T D"]:
        def attend(x):
            return x + tap("attn", self.attn, tap("ln_1", self.ln_1, x), context, tap)

        x = tap("mid", attend, x)
        return x + tap("ffn", self.ffn, tap("ln_2", self.ln_2, x))


class Head(nnx.Module):
    """The language-model head; reads the token table where it is tied."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        tied = config.tied_head
        self.out = None if tied else Dense(config.width, config.vocab_size, std=config.init_std, rngs=rngs, bias=False)

    def __call__(self, x: Float[Array, "*batch D"], table: Float[Array, "V D"]) -> Float[Array, "*batch V"]:
        kernel = table.T if self.out is None else self.out.kernel[...]
        return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


class GPT2(nnx.Module):
    """GPT-2 with its head."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embed(config, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.final_norm = LayerNorm(config.width, config.norm_eps)
        self.head = Head(config, rngs=rngs) if config.has_head else None


def config_from_hf(hf: Mapping[str, Any], ignore: tuple[str, ...] = ()) -> ModelConfig:
    """Reads a GPT-2 config.json. Raises ValueError for fields that jmat does not implement, by name."""
    read = ConfigReader(hf, ignore=ignore)
    width, heads = read.size("n_embd", 768), read.size("n_head", 12)
    read.require(width % heads == 0, f"n_embd={width} is not a multiple of n_head={heads}")
    config = ModelConfig(
        family="gpt2",
        vocab_size=read.size("vocab_size", 50257),
        num_positions=read.size("n_positions", 1024),
        width=width,
        layers=read.size("n_layer", 12),
        heads=heads,
        head_width=width // heads,
        ffn_width=read.size("n_inner", 4 * width),
        activation=read.choice("activation_function", "gelu_new", ACTIVATIONS),
        norm_eps=read.number("layer_norm_epsilon", 1e-5),
        causal=True,
        tied_head=read.flag("tie_word_embeddings", True),
        scale_attention=read.flag("scale_attn_weights", True),
        scale_attention_by_layer=read.flag("scale_attn_by_inverse_layer_idx", False),
        init_std=read.number("initializer_range", 0.02),
        hf=json.dumps(dict(hf)),
    )
    summary = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout", "last_dropout")
    # reorder_and_upcast_attn only moves rounding; n_ctx and n_special are old names of what other fields say.
    neutral = ["reorder_and_upcast_attn", "n_ctx", "n_special", "predict_special_tokens", "afn", "is_decoder"]
    read.finish(neutral=[*neutral, *(f"summary_{name}" for name in summary)])
    return config


def keys(config: ModelConfig) -> list[Key]:
    """The checkpoint's tensors. Its Conv1D kernels are [in, out] already; q, k and v are fused."""
    table = [
        Key("wte.weight", ("embed.tokens.table",), aliases=("lm_head.weight",) if config.tied_head else ()),
        Key("wpe.weight", ("embed.positions.table",)),
        Key("ln_f.weight", ("final_norm.scale",)),
        Key("ln_f.bias", ("final_norm.bias",)),
    ]
    if config.has_head and not config.tied_head:
        table.append(Key("lm_head.weight", ("head.out.kernel",), TRANSPOSED))
    for i in range(config.layers):
        file, ours = f"h.{i}", f"blocks.{i}"
        for kind, param in (("weight", "kernel"), ("bias", "bias")):
            qkv = tuple(f"{ours}.attn.{part}.{param}" for part in "qkv")
            table += [
                Key(f"{file}.attn.c_attn.{kind}", qkv, fused(3)),
                Key(f"{file}.attn.c_proj.{kind}", (f"{ours}.attn.o.{param}",)),
                Key(f"{file}.mlp.c_fc.{kind}", (f"{ours}.ffn.up.{param}",)),
                Key(f"{file}.mlp.c_proj.{kind}", (f"{ours}.ffn.down.{param}",)),
            ]
        for kind, param in (("weight", "scale"), ("bias", "bias")):
            for norm in ("ln_1", "ln_2"):
                table.append(Key(f"{file}.{norm}.{kind}", (f"{ours}.{norm}.{param}",), PLAIN))
    return table


FAMILY = Family(
    config=config_from_hf,
    model=GPT2,
    keys=keys,
    prefix="transformer.",
    head_prefixes=("lm_head.",),
    tied=("lm_head.weight", "wte.weight"),
    # Causal-mask buffers of old files; heads for other tasks.
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)", r"multiple_choice_head\..*", r"score\.weight", r"classifier\..*"),
)
