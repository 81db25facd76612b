"""BERT (post-norm, bidirectional; Devlin et al. 2018), with its masked-language-model
head where there is one.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jmat.models.attention import Attention
from jmat.models.config import ModelConfig
from jmat.models.config_reader import ConfigReader
from jmat.models.context import Context, IgnoresPadding, NeedsContext
from jmat.models.family import TRANSPOSED, Family, Key, dense_keys, norm_keys
from jmat.models.layers import (
    ACTIVATIONS,
    Dense,
    Embedding,
    FeedForward,
    LayerNorm,
    NoNorm,
    word_kernel,
)
from jmat.models.tap import UNTAPPED, Tap


class Embed(nnx.Module):
    """Computes the normed sum of token, position and type embedding: h_0."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, std, types = config.width, config.init_std, config.type_vocab_size
        self.tokens = Embedding(config.vocab_size, D, std=std, rngs=rngs)
        self.positions = Embedding(
            config.num_positions + config.position_offset, D, std=std, rngs=rngs
        )
        self.types = Embedding(types, D, std=std, rngs=rngs) if types else None
        self.norm = LayerNorm(config)
        self.offset = config.position_offset

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        type_ids: Int[Array, "B T"] | None,
    ) -> Float[Array, "B T D"]:
        x = self.tokens(tokens)
        if self.types is not None:
            x = x + self.types(jnp.zeros_like(tokens) if type_ids is None else type_ids)
        return self.norm(x + self.positions(positions + self.offset))


class Block(nnx.Module, NeedsContext, IgnoresPadding):
    """Computes one post-norm block: `ln_1` follows the attention add, `ln_2` the
    feed-forward add.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attn = Attention(config, out_std=config.init_std, rngs=rngs)
        self.ln_1 = LayerNorm(config)
        self.ffn = FeedForward(config, out_std=config.init_std, rngs=rngs)
        self.ln_2 = LayerNorm(config)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, tap: Tap = UNTAPPED
    ) -> Float[Array, "B T D"]:
        x = tap("ln_1", self.ln_1, tap.read("mid", x + tap("attn", self.attn, x, context, tap)))
        return tap("ln_2", self.ln_2, x + tap("ffn", self.ffn, x, tap))


class MaskedHead(nnx.Module, IgnoresPadding):
    """Predicts the tokens behind masks: dense, activation (the model's own by default),
    norm, decoder, bias.

    Logits are of all words, or of those given.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, activation: str | None = None):
        self.dense = Dense(config.width, config.width, std=config.init_std, rngs=rngs)
        self.norm = LayerNorm(config)
        tied = config.tied_head
        self.out = (
            None
            if tied
            else Dense(config.width, config.vocab_size, std=config.init_std, rngs=rngs, bias=False)
        )
        self.bias = nnx.Param(jnp.zeros(config.vocab_size))
        self.activation = activation or config.activation

    def __call__(
        self,
        x: Float[Array, "*batch D"],
        table: Float[Array, "V D"],
        words: Int[Array | np.ndarray, " W"] | None = None,
    ) -> Float[Array, "*batch W"]:
        x = self.norm(ACTIVATIONS[self.activation](self.dense(x)))
        kernel = word_kernel(table, self.out, words)
        bias = self.bias[...] if words is None else self.bias[words]
        return jnp.matmul(x, kernel, preferred_element_type=jnp.float32) + bias.astype(jnp.float32)


def read_config(read: ConfigReader) -> ModelConfig:
    """Reads the config.json of BERT. Raises ValueError for fields that jmat does not
    implement.
    """
    width, heads = read.size("hidden_size", 768), read.size("num_attention_heads", 12)
    read.require(
        width % heads == 0, f"hidden_size={width} is not a multiple of num_attention_heads={heads}"
    )
    config = ModelConfig(
        family="bert",
        vocab_size=read.size("vocab_size", 30522),
        num_positions=read.size("max_position_embeddings", 512),
        type_vocab_size=read.size("type_vocab_size", 2),
        width=width,
        layers=read.blocks("num_hidden_layers", 12),
        heads=heads,
        head_width=width // heads,
        ffn_width=read.size("intermediate_size", 3072),
        activation=read.choice("hidden_act", "gelu", ACTIVATIONS),
        norm_eps=read.positive("layer_norm_eps", 1e-12),
        causal=read.flag("is_decoder", False),
        pre_norm=False,
        tied_head=read.flag("tie_word_embeddings", True),
        init_std=read.number("initializer_range", 0.02),
        hf=read.to_json(),
    )
    pooler = ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")
    read.finish(
        neutral=["directionality", *(f"pooler_{name}" for name in pooler)],
        fixed={"position_embedding_type": ("absolute",), "embedding_size": (width,)},
    )
    return config


def keys(config: ModelConfig) -> list[Key]:
    """Returns the checkpoint's tensors."""
    table = encoder_keys(config)
    if config.has_head:
        transform = "cls.predictions.transform"
        table += [
            *dense_keys(f"{transform}.dense", "head.dense"),
            *norm_keys(f"{transform}.LayerNorm", "head.norm"),
        ]
        table += decoder_keys(config, "cls.predictions.bias", "cls.predictions.decoder")
    return table


def encoder_keys(config: ModelConfig) -> list[Key]:
    """Returns the tensors of embedding and blocks. Kernels are [out, in]."""
    table = [
        Key("embeddings.word_embeddings.weight", ("embed.tokens.table",)),
        Key("embeddings.position_embeddings.weight", ("embed.positions.table",)),
        Key("embeddings.token_type_embeddings.weight", ("embed.types.table",)),
        *norm_keys("embeddings.LayerNorm", "embed.norm"),
    ]
    for i in range(config.layers):
        file, ours = f"encoder.layer.{i}", f"blocks.{i}"
        table += [
            *dense_keys(f"{file}.attention.self.query", f"{ours}.attn.q"),
            *dense_keys(f"{file}.attention.self.key", f"{ours}.attn.k"),
            *dense_keys(f"{file}.attention.self.value", f"{ours}.attn.v"),
            *dense_keys(f"{file}.attention.output.dense", f"{ours}.attn.o"),
            *norm_keys(f"{file}.attention.output.LayerNorm", f"{ours}.ln_1"),
            *dense_keys(f"{file}.intermediate.dense", f"{ours}.ffn.up"),
            *dense_keys(f"{file}.output.dense", f"{ours}.ffn.down"),
            *norm_keys(f"{file}.output.LayerNorm", f"{ours}.ln_2"),
        ]
    return table


def decoder_keys(config: ModelConfig, bias: str, decoder: str) -> list[Key]:
    """Returns the decoder of a masked-language-model head, and its bias.

    The bias is stored under either of two names, or both; transformers reads the
    decoder's own if the head is untied.
    """
    if config.tied_head:
        return [Key(bias, ("head.bias",), aliases=(f"{decoder}.bias",))]
    return [
        Key(f"{decoder}.bias", ("head.bias",), aliases=(bias,)),
        Key(f"{decoder}.weight", ("head.out.kernel",), TRANSPOSED),
    ]


FAMILY = Family(
    config=read_config,
    embed=Embed,
    block=Block,
    final_norm=NoNorm,
    head=MaskedHead,
    keys=keys,
    prefixes=("bert.",),
    head_prefixes=("cls.",),
    tied=("cls.predictions.decoder.weight", "embeddings.word_embeddings.weight"),
    ignored=(
        r"embeddings\.position_ids",
        r"embeddings\.token_type_ids",
        r"pooler\..*",
        r"cls\.seq_relationship\..*",
    ),
)
