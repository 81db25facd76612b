"""Maps that stand in for a part of a model, or for many blocks: callable pytrees."""

import dataclasses
import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jmat.models.edits import IgnoresInput, IgnoresPadding
from jmat.runtime.annotations import Leaf

Values = TypeVar("Values", Array, np.ndarray)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Identity(IgnoresPadding):
    """`y = x`."""

    def __call__(self, x: Float[Values, "*batch D"]) -> Float[Values, "*batch D"]:
        return x


@functools.partial(jax.tree_util.register_dataclass, data_fields=["W", "bias"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class Linear(IgnoresPadding):
    """`y = x @ W (+ bias)`, in the dtype of x, for `W [D, E]` and `bias [E]`."""

    W: Leaf[Array | np.ndarray]
    bias: Leaf[Array | np.ndarray | None] = None

    def __call__(self, x: Float[Array | np.ndarray, "*batch D"]) -> Float[Array, "*batch E"]:
        y = jnp.matmul(x, self.W.astype(x.dtype))
        return y if self.bias is None else y + self.bias.astype(x.dtype)

    @property
    def weights(self) -> Array | np.ndarray:
        """Returns W [D, E]."""
        return self.W


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class Constant(IgnoresInput):
    """`y = value` whatever x is, for `value [E]`, or `[*batch, E]`, one for each place; at any site, `embed` too.

    With the mean over examples it is mean ablation; with the activations of another run, activation patching.
    """

    value: Leaf[Array | np.ndarray]

    def __call__(self, x: Float[Array | np.ndarray, "*batch D"]) -> Float[Array, "*batch E"]:
        return jnp.broadcast_to(jnp.asarray(self.value).astype(x.dtype), (*x.shape[:-1], self.value.shape[-1]))

    def fill(self, shape: tuple[int, ...]) -> Float[Array, "*shape"]:
        """Returns the value for every place of a site of this shape."""
        return jnp.broadcast_to(jnp.asarray(self.value), shape)


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["width"])
@dataclasses.dataclass(frozen=True)
class Zero(IgnoresInput):
    """`y = 0`: the part is deleted. With `width` coordinates, by default as many as the site has, or as x."""

    width: int | None = None

    def __call__(self, x: Float[Array | np.ndarray, "*batch D"]) -> Float[Array, "*batch E"]:
        return jnp.zeros((*x.shape[:-1], x.shape[-1] if self.width is None else self.width), x.dtype)

    def fill(self, shape: tuple[int, ...]) -> Float[Array, "*shape"]:
        """Returns zeros for a site of this shape, or with `width` coordinates where that was given."""
        return jnp.zeros(shape if self.width is None else (*shape[:-1], self.width))
