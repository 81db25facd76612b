"""Sub-modules: the mathematics as pure functions, and thin Flax shells that hold parameters and call them.

Softmax and norms are computed in float32 whatever the dtype of the stream.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jmat.config import ModelConfig
from jmat.sites import Tap


class Context(NamedTuple):
    """What a block knows besides the stream."""

    positions: Int[Array, "B T"]  # index of each token in its own text, from 0
    segments: Int[Array, "B T"] | None  # which text a token belongs to; 0 is padding; None: one text a row, no padding
    layer: Int[Array, ""]  # 0-based index of the block; traced, so that all blocks share one compiled program


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
    x: Float[Array, "*batch D"], scale: Float[Array, " D"], bias: Float[Array, " D"], eps: float
) -> Float[Array, "*batch D"]:
    """`(x − mean) / sqrt(var + eps) * scale + bias`, with var = mean((x − mean)²), in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    return (normed * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def attention_mask(segments: Int[Array, "B T"] | None, length: int, causal: bool) -> Bool[Array, "#B T T"]:
    """Which token (axis 1) may look at which (axis 2): the same text, never padding, nothing later if causal."""
    allowed = jnp.ones((1, length, length), bool)
    if causal:
        allowed = jnp.tril(allowed)
    if segments is not None:
        allowed &= (segments[:, :, None] == segments[:, None, :]) & (segments[:, None, :] > 0)
    return allowed


def attend(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H K"],
    allowed: Bool[Array, "#B T T"],
    scale: Float[Array, ""],
) -> Float[Array, "B T H K"]:
    """`softmax(scale · q kᵀ) v` for each head. A token that may look at nothing (padding) gets the mean of v, not NaN."""
    scores = jnp.einsum("BTHK,BSHK->BHTS", q, k, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(allowed[:, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("BHTS,BSHK->BTHK", weights, v)


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
    """Layer normalisation with scale and bias."""

    def __init__(self, width: int, eps: float):
        self.scale = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return layer_norm(x, self.scale[...], self.bias[...], self.eps)


class Embedding(nnx.Module):
    """A table of vectors; `table` is [entries, D]."""

    def __init__(self, entries: int, width: int, *, std: float, rngs: nnx.Rngs):
        self.table = _normal(rngs, (entries, width), std)

    def __call__(self, index: Int[Array, "*batch"]) -> Float[Array, "*batch D"]:
        return self.table[...][index]


class Attention(nnx.Module):
    """Multi-head self-attention: [B, T, D] → [B, T, D], before the residual add."""

    def __init__(self, config: ModelConfig, *, out_std: float, rngs: nnx.Rngs):
        D, inner = config.width, config.heads * config.head_width
        self.q = Dense(D, inner, std=config.init_std, rngs=rngs)
        self.k = Dense(D, inner, std=config.init_std, rngs=rngs)
        self.v = Dense(D, inner, std=config.init_std, rngs=rngs)
        self.o = Dense(inner, D, std=out_std, rngs=rngs)
        self.config = config

    def __call__(self, x: Float[Array, "B T D"], context: Context, tap: Tap) -> Float[Array, "B T D"]:
        H, K = self.config.heads, self.config.head_width
        if tap.touches("attn.head."):  # one head at a time, so that a replaced one costs nothing
            one = [partial(self.heads, first=h, last=h + 1) for h in range(H)]
            heads = [tap(f"attn.head.{h}", one[h], x, context, width=K) for h in range(H)]
            return self.o(jnp.concatenate(heads, axis=-1))
        return self.o(self.heads(x, context, 0, H))

    def heads(self, x: Float[Array, "B T D"], context: Context, first: int, last: int) -> Float[Array, "B T h*K"]:
        """The outputs of heads `first` .. `last − 1`, side by side, before the output projection."""
        B, T, _ = x.shape
        c = self.config
        columns = slice(first * c.head_width, last * c.head_width)
        q, k, v = (part.columns(x, columns).reshape(B, T, -1, c.head_width) for part in (self.q, self.k, self.v))
        scale = jnp.float32(1 / math.sqrt(c.head_width) if c.scale_attention else 1)
        if c.scale_attention_by_layer:
            scale = scale / (context.layer + 1).astype(jnp.float32)
        return attend(q, k, v, attention_mask(context.segments, T, c.causal), scale).reshape(B, T, -1)


class FeedForward(nnx.Module):
    """`out(activation(in(x)))`: [..., D] → [..., D], before the residual add."""

    def __init__(self, config: ModelConfig, *, out_std: float, rngs: nnx.Rngs):
        self.up = Dense(config.width, config.ffn_width, std=config.init_std, rngs=rngs)
        self.down = Dense(config.ffn_width, config.width, std=out_std, rngs=rngs)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return self.down(ACTIVATIONS[self.activation](self.up(x)))


class NoNorm(nnx.Module):
    """The final norm of a model that has none: the identity."""

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return x
