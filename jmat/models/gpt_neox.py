"""GPT-NeoX and Pythia (Black et al. 2022, Biderman et al. 2023): partial rotary
positions, parallel residual.
"""

from flax import nnx
from jaxtyping import Array, Float

from jmat.models.attention import Attention
from jmat.models.config import ModelConfig
from jmat.models.config_reader import ConfigReader
from jmat.models.context import Context, IgnoresPadding, NeedsContext
from jmat.models.family import TRANSPOSED, Family, Key, dense_keys, interleaved, norm_keys
from jmat.models.layers import ACTIVATIONS, FeedForward, Head, LayerNorm
from jmat.models.llama import Embed
from jmat.models.rotary import read_rotary
from jmat.models.tap import UNTAPPED, Tap


class Block(nnx.Module, NeedsContext, IgnoresPadding):
    """Computes one pre-norm block. In parallel, `ln_2` reads the block's input; in
    sequence, what attention left.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.ln_1 = LayerNorm(config)
        self.attn = Attention(config, out_std=config.init_std, rngs=rngs)
        self.ln_2 = LayerNorm(config)
        self.ffn = FeedForward(config, out_std=config.init_std, rngs=rngs)
        self.parallel = config.parallel

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, tap: Tap = UNTAPPED
    ) -> Float[Array, "B T D"]:
        mid = tap.read("mid", x + tap("attn", self.attn, tap("ln_1", self.ln_1, x), context, tap))
        return mid + tap("ffn", self.ffn, tap("ln_2", self.ln_2, x if self.parallel else mid), tap)


def read_config(read: ConfigReader) -> ModelConfig:
    """Reads the config.json of GPT-NeoX. Raises ValueError for fields that jmat does
    not implement.
    """
    width, heads = read.size("hidden_size", 6144), read.size("num_attention_heads", 64)
    read.require(
        width % heads == 0, f"hidden_size={width} is not a multiple of num_attention_heads={heads}"
    )
    num_positions = read.size("max_position_embeddings", 2048)
    theta, fraction = read.number("rotary_emb_base", 10000.0), read.number("rotary_pct", 0.25)
    bias = read.flag("attention_bias", True)
    config = ModelConfig(
        family="gpt_neox",
        vocab_size=read.size("vocab_size", 50432),
        num_positions=num_positions,
        width=width,
        layers=read.blocks("num_hidden_layers", 44),
        heads=heads,
        head_width=width // heads,
        ffn_width=read.size("intermediate_size", 24576),
        activation=read.choice("hidden_act", "gelu", ACTIVATIONS),
        norm_eps=read.positive("layer_norm_eps", 1e-5),
        causal=True,
        tied_head=read.flag("tie_word_embeddings", False),
        rotary=read_rotary(read, width // heads, num_positions, theta=theta, fraction=fraction),
        qkv_bias=bias,
        out_bias=bias,
        parallel=read.flag("use_parallel_residual", True),
        init_std=read.number("initializer_range", 0.02),
        hf=read.to_json(),
    )
    neutral = ["attention_dropout", "hidden_dropout", "is_decoder"]
    # Some versions of transformers write the same twice, under both names.
    read.finish(
        neutral=neutral,
        fixed={"rope_theta": (None, theta), "partial_rotary_factor": (None, fraction)},
    )
    return config


def keys(config: ModelConfig) -> list[Key]:
    """Returns the checkpoint's tensors; q, k and v are fused head by head."""
    table = [
        Key("embed_in.weight", ("embed.tokens.table",)),
        *norm_keys("final_layer_norm", "final_norm"),
    ]
    if config.has_head and not config.tied_head:
        table.append(Key("embed_out.weight", ("head.out.kernel",), TRANSPOSED))
    for i in range(config.layers):
        file, ours = f"layers.{i}", f"blocks.{i}"
        layout = interleaved(3, config.heads)
        for kind, param in (("weight", "kernel"), ("bias", "bias"))[: 1 + config.qkv_bias]:
            qkv = tuple(f"{ours}.attn.{part}.{param}" for part in "qkv")
            table.append(Key(f"{file}.attention.query_key_value.{kind}", qkv, layout))
        table += [
            *norm_keys(f"{file}.input_layernorm", f"{ours}.ln_1"),
            *dense_keys(f"{file}.attention.dense", f"{ours}.attn.o", bias=config.out_bias),
            *norm_keys(f"{file}.post_attention_layernorm", f"{ours}.ln_2"),
            *dense_keys(f"{file}.mlp.dense_h_to_4h", f"{ours}.ffn.up"),
            *dense_keys(f"{file}.mlp.dense_4h_to_h", f"{ours}.ffn.down"),
        ]
    return table


FAMILY = Family(
    config=read_config,
    embed=Embed,
    block=Block,
    final_norm=LayerNorm,
    head=Head,
    keys=keys,
    prefixes=("gpt_neox.",),
    head_prefixes=("embed_out.",),
    tied=("embed_out.weight", "embed_in.weight"),
    renamed=((r"lm_head\.", "embed_out."),),  # transformers 5 calls the head so
    # Causal-mask buffers of old files.
    ignored=(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
)
