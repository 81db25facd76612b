"""Sub-modules: the mathematics as pure functions, and thin Flax shells that hold
parameters and call them.

Softmax and norms are computed in float32 whatever the dtype of the stream.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jmat.models.config import ModelConfig
from jmat.models.context import IgnoresPadding
from jmat.models.tap import UNTAPPED, Tap

# --- pure functions -------------------------------------------------------------------------------


def erf_gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns `x Φ(x)`, exactly."""
    return jax.nn.gelu(x, approximate=False)


def tanh_gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns `x Φ(x)` with GPT-2's tanh approximation of Φ."""
    return jax.nn.gelu(x, approximate=True)


def quick_gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns `x σ(1.702 x)`."""
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
    """Returns `x @ kernel + bias`."""
    y = x @ kernel
    return y if bias is None else y + bias


def layer_norm(
    x: Float[Array, "*batch D"],
    scale: Float[Array, " D"] | None,
    bias: Float[Array, " D"] | None,
    eps: float,
) -> Float[Array, "*batch D"]:
    """Returns `(x − mean) / sqrt(var + eps) * scale + bias`, with var = mean((x −
    mean)²), in float32.
    """
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    if scale is not None:
        normed = normed * scale.astype(jnp.float32)
    if bias is not None:
        normed = normed + bias.astype(jnp.float32)
    return normed.astype(x.dtype)


def rms_norm(
    x: Float[Array, "*batch D"], scale: Float[Array, " D"], eps: float
) -> Float[Array, "*batch D"]:
    """Returns `x / sqrt(mean(x²) + eps) * scale`, in float32 (Zhang and Sennrich 2019)."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


# --- shells ---------------------------------------------------------------------------------------


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> nnx.Param:
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))


class Dense(nnx.Module, IgnoresPadding):
    """Computes an affine map; `kernel` is [in, out]."""

    def __init__(self, inputs: int, outputs: int, *, std: float, rngs: nnx.Rngs, bias: bool = True):
        self.kernel = _normal(rngs, (inputs, outputs), std)
        self.bias = nnx.Param(jnp.zeros(outputs)) if bias else None

    def __call__(self, x: Float[Array, "*batch I"]) -> Float[Array, "*batch O"]:
        return dense(x, self.kernel[...], None if self.bias is None else self.bias[...])

    def columns(
        self, x: Float[Array, "*batch I"], which: slice | Int[np.ndarray, " o"]
    ) -> Float[Array, "*batch o"]:
        """Returns some of the outputs, at their share of the cost."""
        return dense(x, self.kernel[:, which], None if self.bias is None else self.bias[which])


class LayerNorm(nnx.Module, IgnoresPadding):
    """Computes layer normalisation, with scale and bias unless the config says
    otherwise.
    """

    def __init__(self, config: ModelConfig):
        self.scale = nnx.Param(jnp.ones(config.width)) if config.norm_affine else None
        self.bias = nnx.Param(jnp.zeros(config.width)) if config.norm_affine else None
        self.eps = config.norm_eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        scale = None if self.scale is None else self.scale[...]
        return layer_norm(x, scale, None if self.bias is None else self.bias[...], self.eps)


class RMSNorm(nnx.Module, IgnoresPadding):
    """Computes root-mean-square normalisation over the last axis, D wide by default;
    the scale is stored less its offset.
    """

    def __init__(self, config: ModelConfig, width: int | None = None):
        self.offset = config.norm_scale_offset
        self.scale = nnx.Param(jnp.full(width or config.width, 1 - self.offset))
        self.eps = config.norm_eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return rms_norm(x, self.scale[...].astype(jnp.float32) + self.offset, self.eps)


class NoNorm(nnx.Module, IgnoresPadding):
    """Returns its input: the final norm of a model that has none."""

    def __init__(self, config: ModelConfig):
        del config

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return x


class Embedding(nnx.Module, IgnoresPadding):
    """Holds a table of vectors; `table` is [entries, D]."""

    def __init__(self, entries: int, width: int, *, std: float, rngs: nnx.Rngs):
        self.table = _normal(rngs, (entries, width), std)

    def __call__(self, index: Int[Array, "*batch"]) -> Float[Array, "*batch D"]:
        return self.table[...][index]


class FeedForward(nnx.Module, IgnoresPadding):
    """Computes `down(activation(up(x)))`, or gated `down(activation(gate(x)) · up(x))`:
    [..., D] → [..., D], before the add.
    """

    def __init__(self, config: ModelConfig, *, out_std: float, rngs: nnx.Rngs):
        D, F, std, bias = config.width, config.ffn_width, config.init_std, config.ffn_bias
        self.gate = Dense(D, F, std=std, rngs=rngs, bias=bias) if config.gated_ffn else None
        self.up = Dense(D, F, std=std, rngs=rngs, bias=bias)
        self.down = Dense(F, D, std=out_std, rngs=rngs, bias=bias)
        self.activation = config.activation

    def __call__(
        self, x: Float[Array, "*batch D"], tap: Tap = UNTAPPED
    ) -> Float[Array, "*batch D"]:
        shape = (*x.shape[:-1], self.up.kernel.shape[1])
        return self.down(tap("ffn.hidden", self.hidden, x, shape=shape))

    def hidden(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch F"]:
        """Returns the input of the output projection `down`."""
        activation = ACTIVATIONS[self.activation]
        if self.gate is None:
            return activation(self.up(x))
        return activation(self.gate(x)) * self.up(x)


class Head(nnx.Module, IgnoresPadding):
    """Computes logits in float32, of all words or of those given: the language-model
    head. A tied head reads the token table.

    A model whose token table is narrower than its stream (OPT-350m) projects the stream
    down first.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, E, std = config.width, config.embed_width or config.width, config.init_std
        self.project = Dense(D, E, std=std, rngs=rngs, bias=False) if E != D else None
        self.out = (
            None
            if config.tied_head
            else Dense(E, config.vocab_size, std=std, rngs=rngs, bias=False)
        )

    def __call__(
        self,
        x: Float[Array, "*batch D"],
        table: Float[Array, "V E"],
        words: Int[Array | np.ndarray, " W"] | None = None,
    ) -> Float[Array, "*batch W"]:
        x = x if self.project is None else self.project(x)
        kernel = word_kernel(table, self.out, words)
        return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


def word_kernel(
    table: Float[Array, "V E"], out: Dense | None, words: Int[Array | np.ndarray, " W"] | None
) -> Float[Array, "E W"]:
    """Returns the columns of a head's last product that belong to some words, by
    default to all V.

    `table` is the token table, which is the product's kernel, transposed, where there
    is no kernel `out` of its own.
    """
    if words is None:
        return table.T if out is None else out.kernel[...]
    return table[words].T if out is None else out.kernel[:, words]
