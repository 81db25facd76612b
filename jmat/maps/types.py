"""Maps that stand in for a part of a model, or for many blocks: callable pytrees."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Identity:
    """`y = x`."""

    def __call__(self, x: Float[Array | np.ndarray, "*batch D"]) -> Float[Array | np.ndarray, "*batch D"]:
        return x


@functools.partial(jax.tree_util.register_dataclass, data_fields=["W", "bias"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class Linear:
    """`y = x @ W (+ bias)`, in the dtype of x, for `W [D, E]` and `bias [E]`."""

    W: Any
    bias: Any = None

    def __call__(self, x: Float[Array | np.ndarray, "*batch D"]) -> Float[Array, "*batch E"]:
        y = jnp.matmul(x, self.W.astype(x.dtype))
        return y if self.bias is None else y + self.bias.astype(x.dtype)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """`y = value` whatever x is, for `value [E]`, or `[*batch, E]`, one for each place.

    With the mean over examples it is mean ablation; with the activations of another run, activation patching.
    """

    value: Any

    def __call__(self, x: Float[Array | np.ndarray, "*batch D"]) -> Float[Array, "*batch E"]:
        return jnp.broadcast_to(self.value.astype(x.dtype), (*x.shape[:-1], self.value.shape[-1]))


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["width"])
@dataclasses.dataclass(frozen=True)
class Zero:
    """`y = 0` with `width` coordinates: the part is deleted."""

    width: int

    def __call__(self, x: Float[Array | np.ndarray, "*batch D"]) -> Float[Array, "*batch E"]:
        return jnp.zeros((*x.shape[:-1], self.width), x.dtype)
