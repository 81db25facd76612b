"""BLOOM (BigScience 2022): normed embedding; distance biases (ALiBi) instead of
positions.
"""

from flax import nnx
from jaxtyping import Array, Float, Int

from jmat.models.attention import Attention
from jmat.models.config import ModelConfig
from jmat.models.config_reader import ConfigReader
from jmat.models.context import Context, IgnoresPadding, NeedsContext
from jmat.models.family import TRANSPOSED, Family, Key, dense_keys, interleaved, norm_keys
from jmat.models.layers import Embedding, FeedForward, Head, LayerNorm
from jmat.models.tap import UNTAPPED, Tap


class Embed(nnx.Module):
    """Computes the normed token embedding: h_0."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.tokens = Embedding(config.vocab_size, config.width, std=config.init_std, rngs=rngs)
        self.norm = LayerNorm(config)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        type_ids: Int[Array, "B T"] | None,
    ) -> Float[Array, "B T D"]:
        del positions, type_ids
        return self.norm(self.tokens(tokens))


class Block(nnx.Module, NeedsContext, IgnoresPadding):
    """Computes one pre-norm block. A config option lets the residual start from the
    norm's output instead of its input.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.ln_1 = LayerNorm(config)
        self.attn = Attention(config, out_std=config.init_std, rngs=rngs)
        self.ln_2 = LayerNorm(config)
        self.ffn = FeedForward(config, out_std=config.init_std, rngs=rngs)
        self.from_norm = config.residual_from_norm

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, tap: Tap = UNTAPPED
    ) -> Float[Array, "B T D"]:
        normed = tap("ln_1", self.ln_1, x)
        x = tap.read(
            "mid", (normed if self.from_norm else x) + tap("attn", self.attn, normed, context, tap)
        )
        normed = tap("ln_2", self.ln_2, x)
        return (normed if self.from_norm else x) + tap("ffn", self.ffn, normed, tap)


def read_config(read: ConfigReader) -> ModelConfig:
    """Reads the config.json of BLOOM. Raises ValueError for fields that jmat does not
    implement.
    """
    width, heads = read.size("hidden_size", 64), read.size("n_head", 8)
    read.require(width % heads == 0, f"hidden_size={width} is not a multiple of n_head={heads}")
    config = ModelConfig(
        family="bloom",
        vocab_size=read.size("vocab_size", 250880),
        # nothing else bounds it: the length of the texts in training
        num_positions=read.size("seq_length", 2048),
        width=width,
        layers=read.blocks("n_layer", 2),
        heads=heads,
        head_width=width // heads,
        ffn_width=4 * width,
        activation="gelu_new",
        norm_eps=read.positive("layer_norm_epsilon", 1e-5),
        causal=True,
        tied_head=read.flag("tie_word_embeddings", True),
        alibi=True,
        residual_from_norm=read.flag("apply_residual_connection_post_layernorm", False),
        init_std=read.number("initializer_range", 0.02),
        hf=read.to_json(),
    )
    # slow_but_exact drops a bias where pretraining_tp > 1; without it pretraining_tp does nothing.
    slow = read.flag("slow_but_exact", False) and read.size("pretraining_tp", 1) > 1
    read.require(not slow, "slow_but_exact=True with pretraining_tp > 1 is not implemented")
    neutral = [
        "pretraining_tp",
        "attention_dropout",
        "hidden_dropout",
        "unk_token_id",
        "masked_softmax_fusion",
    ]
    neutral += [
        "bias_dropout_fusion",
        "attention_softmax_in_fp32",
        "skip_bias_add",
        "skip_bias_add_qkv",
        "offset_alibi",
    ]
    read.finish(neutral=neutral, fixed={"n_inner": (None, 4 * width)})
    return config


def keys(config: ModelConfig) -> list[Key]:
    """Returns the checkpoint's tensors; q, k and v are fused head by head."""
    table = [
        Key("word_embeddings.weight", ("embed.tokens.table",)),
        *norm_keys("word_embeddings_layernorm", "embed.norm"),
        *norm_keys("ln_f", "final_norm"),
    ]
    if config.has_head and not config.tied_head:
        table.append(Key("lm_head.weight", ("head.out.kernel",), TRANSPOSED))
    for i in range(config.layers):
        file, ours = f"h.{i}", f"blocks.{i}"
        for kind, param in (("weight", "kernel"), ("bias", "bias")):
            qkv = tuple(f"{ours}.attn.{part}.{param}" for part in "qkv")
            table.append(
                Key(
                    f"{file}.self_attention.query_key_value.{kind}",
                    qkv,
                    interleaved(3, config.heads),
                )
            )
        table += [
            *norm_keys(f"{file}.input_layernorm", f"{ours}.ln_1"),
            *dense_keys(f"{file}.self_attention.dense", f"{ours}.attn.o"),
            *norm_keys(f"{file}.post_attention_layernorm", f"{ours}.ln_2"),
            *dense_keys(f"{file}.mlp.dense_h_to_4h", f"{ours}.ffn.up"),
            *dense_keys(f"{file}.mlp.dense_4h_to_h", f"{ours}.ffn.down"),
        ]
    return table


FAMILY = Family(
    config=read_config,
    aliases={
        "n_embed": "hidden_size",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    },
    embed=Embed,
    block=Block,
    final_norm=LayerNorm,
    head=Head,
    keys=keys,
    prefixes=("transformer.",),
    head_prefixes=("lm_head.",),
    tied=("lm_head.weight", "word_embeddings.weight"),
)
