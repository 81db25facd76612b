"""BERT (post-norm, bidirectional; Devlin et al. 2018), with its masked-language-model head where there is one."""

import json
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jmat.config import ConfigReader, ModelConfig
from jmat.layers import ACTIVATIONS, Attention, Context, Dense, Embedding, FeedForward, LayerNorm, NoNorm
from jmat.models.family import TRANSPOSED, Family, Key
from jmat.sites import Tap


class Embed(nnx.Module):
    """Normed sum of token, position and type embedding: h_0."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.tokens = Embedding(config.vocab_size, config.width, std=config.init_std, rngs=rngs)
        self.positions = Embedding(config.num_positions, config.width, std=config.init_std, rngs=rngs)
        self.types = Embedding(config.type_vocab_size, config.width, std=config.init_std, rngs=rngs)
        self.norm = LayerNorm(config.width, config.norm_eps)

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], type_ids: Int[Array, "B T"] | None
    ) -> Float[Array, "B T D"]:
        types = self.types(jnp.zeros_like(tokens) if type_ids is None else type_ids)
        return self.norm(self.tokens(tokens) + types + self.positions(positions))


class Block(nnx.Module):
    """One post-norm block: `ln_1` follows the attention add, `ln_2` the feed-forward add."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attn = Attention(config, out_std=config.init_std, rngs=rngs)
        self.ln_1 = LayerNorm(config.width, config.norm_eps)
        self.ffn = FeedForward(config, out_std=config.init_std, rngs=rngs)
        self.ln_2 = LayerNorm(config.width, config.norm_eps)

    def __call__(self, x: Float[Array, "B T D"], context: Context, tap: Tap) -> Float[Array, "B T D"]:
        def attend(x):
            return x + tap("attn", self.attn, x, context, tap)

        x = tap("ln_1", self.ln_1, tap("mid", attend, x))
        return tap("ln_2", self.ln_2, x + tap("ffn", self.ffn, x))


class Head(nnx.Module):
    """The masked-language-model head: dense, activation, norm, decoder, bias."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.dense = Dense(config.width, config.width, std=config.init_std, rngs=rngs)
        self.norm = LayerNorm(config.width, config.norm_eps)
        tied = config.tied_head
        self.out = None if tied else Dense(config.width, config.vocab_size, std=config.init_std, rngs=rngs, bias=False)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size))
        self.activation = config.activation

    def __call__(self, x: Float[Array, "*batch D"], table: Float[Array, "V D"]) -> Float[Array, "*batch V"]:
        x = self.norm(ACTIVATIONS[self.activation](self.dense(x)))
        kernel = table.T if self.out is None else self.out.kernel[...]
        return jnp.matmul(x, kernel, preferred_element_type=jnp.float32) + self.bias[...].astype(jnp.float32)


class Bert(nnx.Module):
    """BERT with its head, or with `head = None`."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embed(config, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.final_norm = NoNorm()
        self.head = Head(config, rngs=rngs) if config.has_head else None


def config_from_hf(hf: Mapping[str, Any], ignore: tuple[str, ...] = ()) -> ModelConfig:
    """Reads a BERT config.json. Raises ValueError for fields that jmat does not implement, by name."""
    read = ConfigReader(hf, ignore=ignore)
    width, heads = read.size("hidden_size", 768), read.size("num_attention_heads", 12)
    read.require(width % heads == 0, f"hidden_size={width} is not a multiple of num_attention_heads={heads}")
    config = ModelConfig(
        family="bert",
        vocab_size=read.size("vocab_size", 30522),
        num_positions=read.size("max_position_embeddings", 512),
        type_vocab_size=read.size("type_vocab_size", 2),
        width=width,
        layers=read.size("num_hidden_layers", 12),
        heads=heads,
        head_width=width // heads,
        ffn_width=read.size("intermediate_size", 3072),
        activation=read.choice("hidden_act", "gelu", ACTIVATIONS),
        norm_eps=read.number("layer_norm_eps", 1e-12),
        causal=read.flag("is_decoder", False),
        tied_head=read.flag("tie_word_embeddings", True),
        init_std=read.number("initializer_range", 0.02),
        hf=json.dumps(dict(hf)),
    )
    pooler = ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")
    read.finish(
        neutral=["directionality", *(f"pooler_{name}" for name in pooler)],
        fixed={"position_embedding_type": ("absolute",), "embedding_size": (width,)},
    )
    return config


def keys(config: ModelConfig) -> list[Key]:
    """The checkpoint's tensors. Its Linear kernels are [out, in]."""
    table = [
        Key("embeddings.word_embeddings.weight", ("embed.tokens.table",)),
        Key("embeddings.position_embeddings.weight", ("embed.positions.table",)),
        Key("embeddings.token_type_embeddings.weight", ("embed.types.table",)),
        *_norm("embeddings.LayerNorm", "embed.norm"),
    ]
    for i in range(config.layers):
        file, ours = f"encoder.layer.{i}", f"blocks.{i}"
        table += [
            *_dense(f"{file}.attention.self.query", f"{ours}.attn.q"),
            *_dense(f"{file}.attention.self.key", f"{ours}.attn.k"),
            *_dense(f"{file}.attention.self.value", f"{ours}.attn.v"),
            *_dense(f"{file}.attention.output.dense", f"{ours}.attn.o"),
            *_norm(f"{file}.attention.output.LayerNorm", f"{ours}.ln_1"),
            *_dense(f"{file}.intermediate.dense", f"{ours}.ffn.up"),
            *_dense(f"{file}.output.dense", f"{ours}.ffn.down"),
            *_norm(f"{file}.output.LayerNorm", f"{ours}.ln_2"),
        ]
    if config.has_head:
        table += [
            *_dense("cls.predictions.transform.dense", "head.dense"),
            *_norm("cls.predictions.transform.LayerNorm", "head.norm"),
        ]
        # The output bias is stored under either name or both; transformers reads the decoder's where the head is untied.
        bias, decoder_bias = "cls.predictions.bias", "cls.predictions.decoder.bias"
        if config.tied_head:
            table.append(Key(bias, ("head.bias",), aliases=(decoder_bias,)))
        else:
            table.append(Key(decoder_bias, ("head.bias",), aliases=(bias,)))
            table.append(Key("cls.predictions.decoder.weight", ("head.out.kernel",), TRANSPOSED))
    return table


def _dense(file: str, ours: str) -> list[Key]:
    return [Key(f"{file}.weight", (f"{ours}.kernel",), TRANSPOSED), Key(f"{file}.bias", (f"{ours}.bias",))]


def _norm(file: str, ours: str) -> list[Key]:
    return [Key(f"{file}.weight", (f"{ours}.scale",)), Key(f"{file}.bias", (f"{ours}.bias",))]


FAMILY = Family(
    config=config_from_hf,
    model=Bert,
    keys=keys,
    prefix="bert.",
    head_prefixes=("cls.",),
    tied=("cls.predictions.decoder.weight", "embeddings.word_embeddings.weight"),
    ignored=(
        r"embeddings\.position_ids",
        r"embeddings\.token_type_ids",
        r"pooler\..*",
        r"cls\.seq_relationship\..*",
        r"(classifier|qa_outputs)\..*",
    ),
)
