"""LLaMA and its relatives: LLaMA 1–3, TinyLlama, SmolLM2, Mistral, Qwen2, Qwen3, Gemma
1.

Pre-norm and causal, with RMSNorm, rotary positions, gated feed-forward, grouped-query
attention (Touvron et al. 2023).
"""

from collections.abc import Mapping

from flax import nnx
from jaxtyping import Array, Float, Int

from jmat.models.attention import Attention
from jmat.models.config import ModelConfig
from jmat.models.config_reader import ConfigReader
from jmat.models.context import Context, IgnoresPadding, NeedsContext
from jmat.models.family import TRANSPOSED, Family, Key, dense_keys, norm_keys
from jmat.models.layers import ACTIVATIONS, Embedding, FeedForward, Head, RMSNorm
from jmat.models.rotary import read_rotary
from jmat.models.tap import UNTAPPED, Tap
from jmat.runtime.errors import shortened


class Embed(nnx.Module):
    """Computes the token embedding, scaled in Gemma: h_0. Positions enter in attention."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.tokens = Embedding(config.vocab_size, config.width, std=config.init_std, rngs=rngs)
        self.scale = config.embed_scale

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        type_ids: Int[Array, "B T"] | None,
    ) -> Float[Array, "B T D"]:
        del positions, type_ids
        return self.scale * self.tokens(tokens)


class Block(nnx.Module, NeedsContext, IgnoresPadding):
    """Computes one pre-norm block."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.ln_1 = RMSNorm(config)
        self.attn = Attention(config, out_std=config.init_std, rngs=rngs)
        self.ln_2 = RMSNorm(config)
        self.ffn = FeedForward(config, out_std=config.init_std, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, tap: Tap = UNTAPPED
    ) -> Float[Array, "B T D"]:
        x = tap.read("mid", x + tap("attn", self.attn, tap("ln_1", self.ln_1, x), context, tap))
        return x + tap("ffn", self.ffn, tap("ln_2", self.ln_2, x), tap)


# What a config.json that leaves a field out means: vocab_size, hidden_size, intermediate_size,
# num_hidden_layers, num_attention_heads, num_key_value_heads, max_position_embeddings, head_dim,
# hidden_act.
_DEFAULTS: Mapping[str, tuple[int, int, int, int, int, int | None, int, int | None, str]] = {
    "llama": (32000, 4096, 11008, 32, 32, None, 2048, None, "silu"),
    "mistral": (32000, 4096, 14336, 32, 32, 8, 131072, None, "silu"),
    "qwen2": (151936, 4096, 22016, 32, 32, 32, 32768, None, "silu"),
    "qwen3": (151936, 4096, 22016, 32, 32, 32, 32768, 128, "silu"),
    "gemma": (256000, 3072, 24576, 28, 16, 16, 8192, 256, "gelu_pytorch_tanh"),
}
# These say nothing unless use_sliding_window is set.
_SLIDING = ["sliding_window", "max_window_layers"]


def read_config(read: ConfigReader) -> ModelConfig:
    """Reads the config.json of any of these. Raises ValueError for fields that jmat
    does not implement, by name.
    """
    family = read.hf["model_type"]
    is_gemma = family == "gemma"
    vocab_size, width, ffn_width, layers, heads, kv_heads, num_positions, head_width, activation = (
        _DEFAULTS[family]
    )
    width, heads = read.size("hidden_size", width), read.size("num_attention_heads", heads)
    layers = read.blocks("num_hidden_layers", layers)
    num_positions = read.size("max_position_embeddings", num_positions)
    # A null is not a missing field: it means one key-value head per head.
    kv_heads = read.size(
        "num_key_value_heads", heads if "num_key_value_heads" in read.hf else kv_heads or heads
    )
    read.require(
        heads % kv_heads == 0,
        f"num_attention_heads={heads} is not a multiple of {kv_heads} key-value heads",
    )
    if read.get("head_dim", head_width) is None:
        read.require(
            width % heads == 0,
            f"hidden_size={width} is not a multiple of num_attention_heads={heads}",
        )
    head_width = read.size("head_dim", head_width or max(width // heads, 1))
    rotary = read_rotary(read, head_width, num_positions)
    read.require(
        rotary.width == head_width, f"partial_rotary_factor is not implemented for {family}"
    )
    activation = read.choice("hidden_act", activation, ACTIVATIONS)
    bias = family in ("llama", "qwen3", "gemma") and read.flag("attention_bias", False)
    config = ModelConfig(
        family=family,
        vocab_size=read.size("vocab_size", vocab_size),
        num_positions=num_positions,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        ffn_width=read.size("intermediate_size", ffn_width),
        # Gemma's first config files say gelu where they mean its tanh approximation.
        activation="gelu_pytorch_tanh" if is_gemma and activation == "gelu" else activation,
        norm_eps=read.positive("rms_norm_eps", 1e-6),
        causal=True,
        tied_head=read.flag("tie_word_embeddings", is_gemma),
        windows=_windows(read, family, layers, num_positions),
        rotary=rotary,
        qkv_bias=bias or family == "qwen2",
        out_bias=bias,
        ffn_bias=family == "llama" and read.flag("mlp_bias", False),
        gated_ffn=True,
        qk_norm=family == "qwen3",
        norm_scale_offset=1.0 if is_gemma else 0.0,
        embed_scale=width**0.5 if is_gemma else 1.0,
        init_std=read.number("initializer_range", 0.02),
        hf=read.to_json(),
    )
    # pretraining_tp splits a product into a sum of parts, which only moves rounding.
    neutral = ["attention_dropout", "pretraining_tp"]
    neutral += {"mistral": ["sliding_window"], "qwen2": _SLIDING, "qwen3": _SLIDING}.get(family, [])
    fixed = {
        "layer_types": (None, ["full_attention"] * layers),
        "hidden_activation": (None, config.activation),
        "partial_rotary_factor": (None, 1),
        "use_bidirectional_attention": (None, False),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
    }
    read.finish(neutral=neutral, fixed=fixed)
    return config


def _windows(read: ConfigReader, family: str, layers: int, num_positions: int) -> tuple[int, ...]:
    """Returns each block's attention window; () where no block has one that a text can
    exceed.
    """
    slides = family == "mistral" or (
        family in ("qwen2", "qwen3") and read.flag("use_sliding_window", False)
    )
    if not slides or read.hf.get("sliding_window", 4096) is None:
        return ()
    window = {
        "sliding_attention": read.size("sliding_window", 4096),
        "full_attention": num_positions,
    }
    first = 0 if family == "mistral" else read.number("max_window_layers", 28.0)
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if family != "mistral":
        kinds = read.get("layer_types", kinds)
    names = tuple(window)
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or any(kind not in names for kind in kinds)
    ):
        read.require(
            False,
            f"layer_types={shortened(kinds)} should name {' or '.join(names)} for each of {layers} "
            "blocks",
        )
        return ()
    windows = tuple(window[kind] for kind in kinds)
    return windows if min(windows) < num_positions else ()


def keys(config: ModelConfig) -> list[Key]:
    """Returns the checkpoint's tensors."""
    table = [
        Key("embed_tokens.weight", ("embed.tokens.table",)),
        *norm_keys("norm", "final_norm", bias=False),
    ]
    if config.has_head and not config.tied_head:
        table.append(Key("lm_head.weight", ("head.out.kernel",), TRANSPOSED))
    for i in range(config.layers):
        file, ours = f"layers.{i}", f"blocks.{i}"
        table += norm_keys(f"{file}.input_layernorm", f"{ours}.ln_1", bias=False)
        for part in "qkv":
            table += dense_keys(
                f"{file}.self_attn.{part}_proj", f"{ours}.attn.{part}", bias=config.qkv_bias
            )
        table += dense_keys(f"{file}.self_attn.o_proj", f"{ours}.attn.o", bias=config.out_bias)
        for part in "qk" if config.qk_norm else "":
            table += norm_keys(
                f"{file}.self_attn.{part}_norm", f"{ours}.attn.{part}_norm", bias=False
            )
        table += norm_keys(f"{file}.post_attention_layernorm", f"{ours}.ln_2", bias=False)
        for part in ("gate", "up", "down"):
            table += dense_keys(
                f"{file}.mlp.{part}_proj", f"{ours}.ffn.{part}", bias=config.ffn_bias
            )
    return table


FAMILY = Family(
    config=read_config,
    embed=Embed,
    block=Block,
    final_norm=RMSNorm,
    head=Head,
    keys=keys,
    prefixes=("model.",),
    head_prefixes=("lm_head.",),
    tied=("lm_head.weight", "embed_tokens.weight"),
    ignored=(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
)
