"""GPT-2 (pre-norm, causal; Radford et al. 2019): any size, distilgpt2 included."""

import math

from flax import nnx
from jaxtyping import Array, Float, Int

from jmat.models.attention import Attention
from jmat.models.config import ModelConfig
from jmat.models.config_reader import ConfigReader
from jmat.models.context import Context, IgnoresPadding, NeedsContext
from jmat.models.family import TRANSPOSED, Family, Key, fused, norm_keys
from jmat.models.layers import ACTIVATIONS, Embedding, FeedForward, Head, LayerNorm
from jmat.models.tap import UNTAPPED, Tap


class Embed(nnx.Module):
    """Computes token plus position embedding: h_0."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.tokens = Embedding(config.vocab_size, config.width, std=config.init_std, rngs=rngs)
        self.positions = Embedding(
            config.num_positions, config.width, std=config.init_std, rngs=rngs
        )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        type_ids: Int[Array, "B T"] | None,
    ) -> Float[Array, "B T D"]:
        x = self.tokens(tokens) + self.positions(positions)
        # Hugging Face's GPT-2 reads type ids from the token table.
        return x if type_ids is None else x + self.tokens(type_ids)


class Block(nnx.Module, NeedsContext, IgnoresPadding):
    """Computes one pre-norm block."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        # GPT-2 shrinks what is written to the stream by the number of residual adds.
        out_std = config.init_std / math.sqrt(2 * config.layers)
        self.ln_1 = LayerNorm(config)
        self.attn = Attention(config, out_std=out_std, rngs=rngs)
        self.ln_2 = LayerNorm(config)
        self.ffn = FeedForward(config, out_std=out_std, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, tap: Tap = UNTAPPED
    ) -> Float[Array, "B T D"]:
        x = tap.read("mid", x + tap("attn", self.attn, tap("ln_1", self.ln_1, x), context, tap))
        return x + tap("ffn", self.ffn, tap("ln_2", self.ln_2, x), tap)


def read_config(read: ConfigReader) -> ModelConfig:
    """Reads the config.json of GPT-2. Raises ValueError for fields that jmat does not
    implement.
    """
    width, heads = read.size("n_embd", 768), read.size("n_head", 12)
    vocab_size = read.size("vocab_size", 50257)
    read.require(width % heads == 0, f"n_embd={width} is not a multiple of n_head={heads}")
    config = ModelConfig(
        family="gpt2",
        vocab_size=vocab_size,
        type_vocab_size=vocab_size,  # type ids are read from the token table
        num_positions=read.size("n_positions", 1024),
        width=width,
        layers=read.blocks("n_layer", 12),
        heads=heads,
        head_width=width // heads,
        ffn_width=read.size("n_inner", 4 * width),
        activation=read.choice("activation_function", "gelu_new", ACTIVATIONS),
        norm_eps=read.positive("layer_norm_epsilon", 1e-5),
        causal=True,
        tied_head=read.flag("tie_word_embeddings", True),
        scale_attention=read.flag("scale_attn_weights", True),
        scale_attention_by_layer=read.flag("scale_attn_by_inverse_layer_idx", False),
        init_std=read.number("initializer_range", 0.02),
        hf=read.to_json(),
    )
    summary = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout", "last_dropout")
    # reorder_and_upcast_attn only moves rounding; n_ctx and n_special are old names of what other
    # fields say.
    neutral = [
        "reorder_and_upcast_attn",
        "n_ctx",
        "n_special",
        "predict_special_tokens",
        "afn",
        "is_decoder",
    ]
    read.finish(neutral=[*neutral, *(f"summary_{name}" for name in summary)])
    return config


def keys(config: ModelConfig) -> list[Key]:
    """Returns the checkpoint's tensors. Its Conv1D kernels are [in, out] already; q, k
    and v are fused.
    """
    table = [
        Key("wte.weight", ("embed.tokens.table",)),
        Key("wpe.weight", ("embed.positions.table",)),
        *norm_keys("ln_f", "final_norm"),
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
        table += [
            *norm_keys(f"{file}.ln_1", f"{ours}.ln_1"),
            *norm_keys(f"{file}.ln_2", f"{ours}.ln_2"),
        ]
    return table


FAMILY = Family(
    config=read_config,
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    embed=Embed,
    block=Block,
    final_norm=LayerNorm,
    head=Head,
    keys=keys,
    prefixes=("transformer.",),
    head_prefixes=("lm_head.",),
    tied=("lm_head.weight", "wte.weight"),
    # Causal-mask buffers of old files.
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),
)
