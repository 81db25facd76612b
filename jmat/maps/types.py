"""Maps that stand in for a part of a model, or for many blocks: callable pytrees."""

import dataclasses
import functools
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jmat.models.context import IgnoresInput, IgnoresPadding
from jmat.runtime.annotations import Leaf
from jmat.runtime.checks import check_whole
from jmat.runtime.pytrees import register_dataclass

Values = TypeVar("Values", Array, np.ndarray)


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Identity(IgnoresPadding):
    """Computes `y = x`.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> batch = jmat.encode(tokenizer, ["Return a new array", "The default is None"])
      >>> without_last = {"block.7": jmat.Identity()}
      >>> x, acts = jmat.run(model, batch, keep="block.6", sites=without_last)
      >>> bool((x == acts["block.6"]).all())
      True
    """

    def __call__(self, x: Float[Values, "*batch D"]) -> Float[Values, "*batch D"]:
        return x


@functools.partial(register_dataclass, data_fields=["W", "bias"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class Linear(IgnoresPadding):
    """Computes `y = x @ W (+ bias)`, in the dtype of x, for `W [D, E]` and `bias [E]`.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> batch = jmat.encode(tokenizer, ["Return a new array", "The default is None"])
      >>> import numpy as np
      >>> half = jmat.Linear(0.5 * np.eye(192, dtype=np.float32))
      >>> x, _ = jmat.run(model, batch, sites={"block.3.ffn": half})
    """

    W: Leaf[Array | np.ndarray]
    bias: Leaf[Array | np.ndarray | None] = None

    def __call__(self, x: Float[Array | np.ndarray, "*batch D"]) -> Float[Array, "*batch E"]:
        y = jnp.matmul(x, self.W.astype(x.dtype))
        return y if self.bias is None else y + self.bias.astype(x.dtype)

    @property
    def weights(self) -> Array | np.ndarray:
        """Returns W [D, E]."""
        return self.W


@functools.partial(register_dataclass, data_fields=["value"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class Constant(IgnoresInput):
    """Computes `y = value` whatever x is, for `value [E]`, or `[*batch, E]`, one for
    each place; at any site, `embed` too.

    With the mean over examples it is mean ablation; with the activations of another
    run, activation patching.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> batch = jmat.encode(tokenizer, ["Return a new array", "The default is None"])
      >>> acts = jmat.capture(model, batch, "block.3.ffn")
      >>> mean = jmat.Constant(acts["block.3.ffn"].mean(0))
      >>> x, _ = jmat.run(model, batch, sites={"block.3.ffn": mean})
    """

    value: Leaf[Array | np.ndarray]

    def __call__(self, x: Float[Array | np.ndarray, "*batch D"]) -> Float[Array, "*batch E"]:
        value = jnp.asarray(self.value).astype(x.dtype)
        return jnp.broadcast_to(value, (*x.shape[:-1], *(value.shape[-1:] or x.shape[-1:])))

    def fill(self, shape: tuple[int, ...]) -> Float[Array, "*shape"]:
        """Returns the value for every place of a site of this shape."""
        return jnp.broadcast_to(jnp.asarray(self.value), shape)


@functools.partial(register_dataclass, data_fields=[], meta_fields=["width"])
@dataclasses.dataclass(frozen=True)
class Zero(IgnoresInput):
    """Computes `y = 0`: the part is deleted. With `width` coordinates, by default as
    many as the site has, or as x.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> batch = jmat.encode(tokenizer, ["Return a new array", "The default is None"])
      >>> x, _ = jmat.run(model, batch, sites={"block.3.attn": jmat.Zero()})
    """

    width: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a width that is no whole number of at least 1."""
        if self.width is not None:
            check_whole("width", self.width, 1)

    def __call__(self, x: Float[Array | np.ndarray, "*batch D"]) -> Float[Array, "*batch E"]:
        return jnp.zeros(
            (*x.shape[:-1], x.shape[-1] if self.width is None else self.width), x.dtype
        )

    def fill(self, shape: tuple[int, ...]) -> Float[Array, "*shape"]:
        """Returns zeros for a site of this shape, or with `width` coordinates where
        that was given.
        """
        return jnp.zeros(shape if self.width is None else (*shape[:-1], self.width))
