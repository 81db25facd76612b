"""OPT (Zhang et al. 2022): pre-norm, but post-norm in OPT-350m, whose token table is
narrower than its stream.
"""

from flax import nnx
from jaxtyping import Array, Float, Int

from jmat.models.attention import Attention
from jmat.models.config import ModelConfig
from jmat.models.config_reader import ConfigReader
from jmat.models.context import Context, IgnoresPadding, NeedsContext
from jmat.models.family import TRANSPOSED, Family, Key, dense_keys, norm_keys
from jmat.models.layers import ACTIVATIONS, Dense, Embedding, FeedForward, Head, LayerNorm, NoNorm
from jmat.models.tap import UNTAPPED, Tap


class Embed(nnx.Module):
    """Computes the token embedding, projected to the stream's width where it is
    narrower, plus position embedding: h_0.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, E, std = config.width, config.embed_width or config.width, config.init_std
        self.tokens = Embedding(config.vocab_size, E, std=std, rngs=rngs)
        self.project = Dense(E, D, std=std, rngs=rngs, bias=False) if E != D else None
        self.positions = Embedding(
            config.num_positions + config.position_offset, D, std=std, rngs=rngs
        )
        self.offset = config.position_offset

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        type_ids: Int[Array, "B T"] | None,
    ) -> Float[Array, "B T D"]:
        del type_ids
        x = self.tokens(tokens)
        x = x if self.project is None else self.project(x)
        return x + self.positions(positions + self.offset)


class Block(nnx.Module, NeedsContext, IgnoresPadding):
    """Computes one block, pre-norm or post-norm."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.ln_1 = LayerNorm(config)
        self.attn = Attention(config, out_std=config.init_std, rngs=rngs)
        self.ln_2 = LayerNorm(config)
        self.ffn = FeedForward(config, out_std=config.init_std, rngs=rngs)
        self.pre_norm = config.pre_norm

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, tap: Tap = UNTAPPED
    ) -> Float[Array, "B T D"]:
        if self.pre_norm:
            x = tap.read("mid", x + tap("attn", self.attn, tap("ln_1", self.ln_1, x), context, tap))
            return x + tap("ffn", self.ffn, tap("ln_2", self.ln_2, x), tap)
        x = tap("ln_1", self.ln_1, tap.read("mid", x + tap("attn", self.attn, x, context, tap)))
        return tap("ln_2", self.ln_2, x + tap("ffn", self.ffn, x, tap))


def final_norm(config: ModelConfig) -> LayerNorm | NoNorm:
    """Returns the final norm, which post-norm models and some fine-tuned ones do not
    have.
    """
    return LayerNorm(config) if config.final_norm else NoNorm(config)


def read_config(read: ConfigReader) -> ModelConfig:
    """Reads the config.json of OPT. Raises ValueError for fields that jmat does not
    implement.
    """
    width, heads = read.size("hidden_size", 768), read.size("num_attention_heads", 12)
    read.require(
        width % heads == 0, f"hidden_size={width} is not a multiple of num_attention_heads={heads}"
    )
    pre_norm, bias = read.flag("do_layer_norm_before", True), read.flag("enable_bias", True)
    removed = read.flag("_remove_final_layer_norm", False)
    config = ModelConfig(
        family="opt",
        vocab_size=read.size("vocab_size", 50272),
        num_positions=read.size("max_position_embeddings", 2048),
        position_offset=2,  # the table's first two rows are never read
        width=width,
        embed_width=read.size("word_embed_proj_dim", width),
        layers=read.blocks("num_hidden_layers", 12),
        heads=heads,
        head_width=width // heads,
        ffn_width=read.size("ffn_dim", 3072),
        activation=read.choice("activation_function", "relu", ACTIVATIONS),
        norm_eps=1e-5,
        norm_affine=read.flag("layer_norm_elementwise_affine", True),
        pre_norm=pre_norm,
        final_norm=pre_norm and not removed,
        causal=True,
        tied_head=read.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=bias,
        init_std=read.number("init_std", 0.02),
        hf=read.to_json(),
    )
    read.finish(neutral=["dropout", "attention_dropout", "activation_dropout", "layerdrop"])
    return config


def keys(config: ModelConfig) -> list[Key]:
    """Returns the checkpoint's tensors."""

    def norm(file: str, ours: str) -> list[Key]:
        return norm_keys(file, ours) if config.norm_affine else []

    table = [
        Key("embed_tokens.weight", ("embed.tokens.table",)),
        Key("embed_positions.weight", ("embed.positions.table",)),
    ]
    if config.final_norm:
        table += norm("final_layer_norm", "final_norm")
    if config.embed_width != config.width:
        table += dense_keys("project_in", "embed.project", bias=False)
        table += dense_keys("project_out", "head.project", bias=False) if config.has_head else []
    if config.has_head and not config.tied_head:
        table.append(Key("lm_head.weight", ("head.out.kernel",), TRANSPOSED))
    for i in range(config.layers):
        file, ours = f"layers.{i}", f"blocks.{i}"
        for part in "qkv":
            table += dense_keys(
                f"{file}.self_attn.{part}_proj", f"{ours}.attn.{part}", bias=config.qkv_bias
            )
        table += [
            *norm(f"{file}.self_attn_layer_norm", f"{ours}.ln_1"),
            *dense_keys(f"{file}.self_attn.out_proj", f"{ours}.attn.o", bias=config.out_bias),
            *norm(f"{file}.final_layer_norm", f"{ours}.ln_2"),
            *dense_keys(f"{file}.fc1", f"{ours}.ffn.up", bias=config.ffn_bias),
            *dense_keys(f"{file}.fc2", f"{ours}.ffn.down", bias=config.ffn_bias),
        ]
    return table


FAMILY = Family(
    config=read_config,
    embed=Embed,
    block=Block,
    final_norm=final_norm,
    head=Head,
    keys=keys,
    prefixes=("model.decoder.", "decoder."),
    head_prefixes=("lm_head.",),
    tied=("lm_head.weight", "embed_tokens.weight"),
    # The decoder owns `project_out`, which only a head reads.
    ignored=("version", r"project_out\.weight"),
)
