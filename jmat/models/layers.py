"""Sub-modules: the mathematics as pure functions, and thin Flax shells that hold parameters and call them.

Softmax and norms are computed in float32 whatever the dtype of the stream.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jmat.models.config import ModelConfig
from jmat.models.rotary import rotate
from jmat.models.sites import Tap


class Context(NamedTuple):
    """The inputs of a block besides the stream."""

    positions: Int[Array, "B T"]  # index of each token in its own text, from 0
    segments: Int[Array, "B T"] | None  # which text a token belongs to; 0 is padding; None: one text a row, no padding
    layer: Int[
        Array | np.ndarray | np.integer, ""
    ]  # 0-based index of the block; traced, so that all blocks share one compiled program


# --- pure functions ---------------------------------------------------------------------------------------------------


def erf_gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`x Φ(x)`, exactly."""
    return jax.nn.gelu(x, approximate=False)


def tanh_gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`x Φ(x)` with GPT-2's tanh approximation of Φ."""
    return jax.nn.gelu(x, approximate=True)


def quick_gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`x σ(1.702 x)`."""
    return x * jax.nn.sigmoid(1.702 * x)


# By the names that config.json files use.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": erf_gelu,
    "gelu_python": erf_gelu,
    "gelu_new": tanh_gelu,
    "gelu_fast": tanh_gelu,
    "gelu_accurate": tanh_gelu,
    "gelu_pytorch_tanh": tanh_gelu,
    "gelu_python_tanh": tanh_gelu,
    "quick_gelu": quick_gelu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
    "linear": lambda x: x,
}


def dense(
    x: Float[Array, "*batch I"], kernel: Float[Array, "I O"], bias: Float[Array, " O"] | None
) -> Float[Array, "*batch O"]:
    """`x @ kernel + bias`."""
    y = x @ kernel
    return y if bias is None else y + bias


def layer_norm(
    x: Float[Array, "*batch D"], scale: Float[Array, " D"] | None, bias: Float[Array, " D"] | None, eps: float
) -> Float[Array, "*batch D"]:
    """`(x − mean) / sqrt(var + eps) * scale + bias`, with var = mean((x − mean)²), in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    if scale is not None:
        normed = normed * scale.astype(jnp.float32)
    if bias is not None:
        normed = normed + bias.astype(jnp.float32)
    return normed.astype(x.dtype)


def rms_norm(x: Float[Array, "*batch D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "*batch D"]:
    """`x / sqrt(mean(x²) + eps) * scale`, in float32 (Zhang and Sennrich 2019)."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def attention_mask(
    segments: Int[Array, "B T"] | None, length: int, causal: bool, window: Int[Array, ""] | None = None
) -> Bool[Array, "#B T T"]:
    """Returns which token (axis 1) may look at which (axis 2): the same text, never padding, nothing later if causal.

    With a window, a token sees only the last `window` tokens, itself included.
    """
    allowed = jnp.ones((1, length, length), bool)
    if causal:
        allowed = jnp.tril(allowed)
    if window is not None:
        index = jnp.arange(length)
        allowed &= index[:, None] - index < window
    if segments is not None:
        allowed &= (segments[:, :, None] == segments[:, None, :]) & (segments[:, None, :] > 0)
    return allowed


def attend(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H K"],
    allowed: Bool[Array, "#B T T"],
    scale: Float[Array, ""],
    bias: Float[Array, "B H T T"] | None = None,
) -> Float[Array, "B T H K"]:
    """`softmax(scale · q kᵀ + bias) v` for each head. A token that may look at nothing (padding) gets the mean of v."""
    scores = jnp.einsum("BTHK,BSHK->BHTS", q, k, preferred_element_type=jnp.float32) * scale
    scores = scores if bias is None else scores + bias
    scores = jnp.where(allowed[:, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("BHTS,BSHK->BTHK", weights, v)


def alibi_slopes(heads: int) -> Float[np.ndarray, " H"]:
    """`2^(−8h/H)` for head h = 1 .. H (ALiBi; Press et al. 2022).

    Where H is not a power of two, the slopes of the next smaller one, then every second one of its double.
    """
    power = 2 ** int(math.log2(heads))
    slopes = 2.0 ** (-8 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4 / power * np.arange(1, 2 * power + 1, 2))
    return np.concatenate([slopes, between])[:heads].astype(np.float32)


def alibi_bias(positions: Int[Array, "B T"], slopes: Float[np.ndarray, " H"]) -> Float[Array, "B H T T"]:
    """`−slope · distance` between the token that looks (axis 2) and the one that is looked at (axis 3)."""
    distance = positions[:, None, None, :] - positions[:, None, :, None]
    return jnp.asarray(slopes)[:, None, None] * distance.astype(jnp.float32)


# --- shells -----------------------------------------------------------------------------------------------------------


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> nnx.Param:
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))


class Dense(nnx.Module):
    """An affine map; `kernel` is [in, out]."""

    def __init__(self, inputs: int, outputs: int, *, std: float, rngs: nnx.Rngs, bias: bool = True):
        self.kernel = _normal(rngs, (inputs, outputs), std)
        self.bias = nnx.Param(jnp.zeros(outputs)) if bias else None

    def __call__(self, x: Float[Array, "*batch I"]) -> Float[Array, "*batch O"]:
        return dense(x, self.kernel[...], None if self.bias is None else self.bias[...])

    def columns(self, x: Float[Array, "*batch I"], which: slice) -> Float[Array, "*batch o"]:
        """Some of the outputs, at their share of the cost."""
        return dense(x, self.kernel[:, which], None if self.bias is None else self.bias[which])


class LayerNorm(nnx.Module):
    """Layer normalisation, with scale and bias unless the config says otherwise."""

    def __init__(self, config: ModelConfig):
        self.scale = nnx.Param(jnp.ones(config.width)) if config.norm_affine else None
        self.bias = nnx.Param(jnp.zeros(config.width)) if config.norm_affine else None
        self.eps = config.norm_eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        scale = None if self.scale is None else self.scale[...]
        return layer_norm(x, scale, None if self.bias is None else self.bias[...], self.eps)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis, D wide by default; the scale is stored less its offset."""

    def __init__(self, config: ModelConfig, width: int | None = None):
        self.offset = config.norm_scale_offset
        self.scale = nnx.Param(jnp.full(width or config.width, 1 - self.offset))
        self.eps = config.norm_eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return rms_norm(x, self.scale[...].astype(jnp.float32) + self.offset, self.eps)


class NoNorm(nnx.Module):
    """The final norm of a model that has none: the identity."""

    def __init__(self, config: ModelConfig):
        del config

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return x


class Embedding(nnx.Module):
    """A table of vectors; `table` is [entries, D]."""

    def __init__(self, entries: int, width: int, *, std: float, rngs: nnx.Rngs):
        self.table = _normal(rngs, (entries, width), std)

    def __call__(self, index: Int[Array, "*batch"]) -> Float[Array, "*batch D"]:
        return self.table[...][index]


class Attention(nnx.Module):
    """Multi-head self-attention: [B, T, D] → [B, T, D], before the residual add."""

    def __init__(self, config: ModelConfig, *, out_std: float, rngs: nnx.Rngs):
        D, K, std, bias = config.width, config.head_width, config.init_std, config.qkv_bias
        kv_heads = config.kv_heads or config.heads
        self.q = Dense(D, config.heads * K, std=std, rngs=rngs, bias=bias)
        self.k = Dense(D, kv_heads * K, std=std, rngs=rngs, bias=bias)
        self.v = Dense(D, kv_heads * K, std=std, rngs=rngs, bias=bias)
        self.o = Dense(config.heads * K, D, std=out_std, rngs=rngs, bias=config.out_bias)
        self.q_norm = RMSNorm(config, K) if config.qk_norm else None
        self.k_norm = RMSNorm(config, K) if config.qk_norm else None
        self.config = config

    def __call__(self, x: Float[Array, "B T D"], context: Context, tap: Tap) -> Float[Array, "B T D"]:
        H, K = self.config.heads, self.config.head_width
        if tap.touches("attn.head."):  # one head at a time, so that a replaced one costs nothing
            one = [partial(self.heads, first=h, last=h + 1) for h in range(H)]
            heads = [tap(f"attn.head.{h}", one[h], x, context, width=K) for h in range(H)]
            return self.o(jnp.concatenate(heads, axis=-1))
        return self.o(self.heads(x, context, 0, H))

    def heads(self, x: Float[Array, "B T D"], context: Context, first: int, last: int) -> Float[Array, "B T hK"]:
        """The outputs of heads `first` .. `last − 1`, side by side, before the output projection."""
        B, T, _ = x.shape
        c = self.config
        group = c.heads // (c.kv_heads or c.heads)  # query heads that share one head of keys and values
        first_kv, last_kv = first // group, (last - 1) // group + 1

        def project(part: Dense, first: int, last: int) -> jax.Array:
            columns = slice(first * c.head_width, last * c.head_width)
            return part.columns(x, columns).reshape(B, T, last - first, c.head_width)

        q, k = project(self.q, first, last), project(self.k, first_kv, last_kv)
        v = project(self.v, first_kv, last_kv)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if c.rotary is not None:
            q, k = rotate(q, context.positions, c.rotary), rotate(k, context.positions, c.rotary)
        if group > 1:
            of_query = np.arange(first, last) // group - first_kv
            k, v = k[:, :, of_query], v[:, :, of_query]
        scale = jnp.float32(1 / math.sqrt(c.head_width) if c.scale_attention else 1)
        if c.scale_attention_by_layer:
            scale = scale / (context.layer + 1).astype(jnp.float32)
        # The window of the block is looked up by its traced index: all blocks share one program.
        window = jnp.asarray(c.windows)[context.layer] if c.windows and min(c.windows) < T else None
        bias = alibi_bias(context.positions, alibi_slopes(c.heads)[first:last]) if c.alibi else None
        allowed = attention_mask(context.segments, T, c.causal, window)
        return attend(q, k, v, allowed, scale, bias).reshape(B, T, -1)


class FeedForward(nnx.Module):
    """`down(activation(up(x)))`, or gated `down(activation(gate(x)) · up(x))`: [..., D] → [..., D], before the add."""

    def __init__(self, config: ModelConfig, *, out_std: float, rngs: nnx.Rngs):
        D, F, std, bias = config.width, config.ffn_width, config.init_std, config.ffn_bias
        self.gate = Dense(D, F, std=std, rngs=rngs, bias=bias) if config.gated_ffn else None
        self.up = Dense(D, F, std=std, rngs=rngs, bias=bias)
        self.down = Dense(F, D, std=out_std, rngs=rngs, bias=bias)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return self.down(self.hidden(x))

    def hidden(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch F"]:
        """Returns the input of the output projection `down`."""
        activation = ACTIVATIONS[self.activation]
        if self.gate is None:
            return activation(self.up(x))
        return activation(self.gate(x)) * self.up(x)


class Head(nnx.Module):
    """The language-model head: logits in float32. Reads the token table where it is tied to it.

    A model whose token table is narrower than its stream (OPT-350m) projects the stream down first.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, E, std = config.width, config.embed_width or config.width, config.init_std
        self.project = Dense(D, E, std=std, rngs=rngs, bias=False) if E != D else None
        self.out = None if config.tied_head else Dense(E, config.vocab_size, std=std, rngs=rngs, bias=False)

    def __call__(self, x: Float[Array, "*batch D"], table: Float[Array, "V E"]) -> Float[Array, "*batch V"]:
        x = x if self.project is None else self.project(x)
        kernel = table.T if self.out is None else self.out.kernel[...]
        return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)
