"""Maps that cost less than a matrix, or more: callable pytrees, as those of
`jmat.maps.types`.

A matrix of a map can also be a `Quantised` one, int8 by row, which takes a quarter of
the memory.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8
from numpy import ndarray

from jmat.maps.types import Constant, Identity, Linear
from jmat.models.context import IgnoresPadding
from jmat.runtime.annotations import Leaf
from jmat.runtime.pytrees import register_dataclass

_STEPS = 127  # of int8 on either side of zero


@functools.partial(register_dataclass, data_fields=["A", "B", "bias"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class LowRank(IgnoresPadding):
    """Computes `y = (x @ A) @ B (+ bias)`, in the dtype of x, for `A [D, r]`,
    `B [r, E]` and `bias [E]`.
    """

    A: Leaf[Array | ndarray]
    B: Leaf[Array | ndarray]
    bias: Leaf[Array | ndarray | None] = None

    def __call__(self, x: Float[Array | ndarray, "*batch D"]) -> Float[Array, "*batch E"]:
        y = jnp.matmul(jnp.matmul(x, self.A.astype(x.dtype)), self.B.astype(x.dtype))
        return y if self.bias is None else y + self.bias.astype(x.dtype)


@functools.partial(register_dataclass, data_fields=["s", "bias"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class Diagonal(IgnoresPadding):
    """Computes `y = x * s (+ bias)`, coordinate by coordinate, for `s [D]` and
    `bias [D]`.
    """

    s: Leaf[Array | ndarray]
    bias: Leaf[Array | ndarray | None] = None

    def __call__(self, x: Float[Array | ndarray, "*batch D"]) -> Float[Array, "*batch D"]:
        y = jnp.asarray(x) * self.s.astype(x.dtype)
        return y if self.bias is None else y + self.bias.astype(x.dtype)


@functools.partial(register_dataclass, data_fields=["s", "bias"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class Hadamard(IgnoresPadding):
    """Computes `y = ((x @ H) * s) @ H (+ bias)`: a diagonal map in rotated coordinates,
    H being `rotation(D)`.
    """

    s: Leaf[Array | ndarray]
    bias: Leaf[Array | ndarray | None] = None

    def __call__(self, x: Float[Array | ndarray, "*batch D"]) -> Float[Array, "*batch D"]:
        y = rotate(rotate(x) * self.s.astype(x.dtype))
        return y if self.bias is None else y + self.bias.astype(x.dtype)


@functools.partial(register_dataclass, data_fields=["W", "U", "c", "V", "bias"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class Hidden(IgnoresPadding):
    """Computes `y = x @ W + gelu(x @ U + c) @ V + bias`: an affine map and one hidden
    layer of m units beside it.

    With `W [D, E]`, `U [D, m]`, `c [m]`, `V [m, E]` and `bias [E]`; gelu is the exact
    one.
    """

    W: Leaf[Array | ndarray]
    U: Leaf[Array | ndarray]
    c: Leaf[Array | ndarray]
    V: Leaf[Array | ndarray]
    bias: Leaf[Array | ndarray]

    def __call__(self, x: Float[Array | ndarray, "*batch D"]) -> Float[Array, "*batch E"]:
        W, U, c, V, bias = (
            leaf.astype(x.dtype) for leaf in (self.W, self.U, self.c, self.V, self.bias)
        )
        units = jax.nn.gelu(jnp.matmul(x, U) + c, approximate=False)
        return jnp.matmul(x, W) + jnp.matmul(units, V) + bias


def rotate(x: Float[Array | ndarray, "*batch D"]) -> Float[Array, "*batch D"]:
    """Returns `x @ H` for H = `rotation(D)`, in about D log D steps where D is a power
    of two.
    """
    *lead, D = x.shape
    block = D & -D
    y = jnp.asarray(x)
    half = 1
    while half < block:
        pairs = y.reshape(*lead, D // (2 * half), 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        y = jnp.stack([first + second, first - second], axis=-2)
        half *= 2
    y = y.reshape(*lead, D // block, block) * jnp.asarray(1 / math.sqrt(block), y.dtype)
    if block < D:
        y = jnp.einsum("mn,...nk->...mk", jnp.asarray(_hartley(D // block), y.dtype), y)
    return y.reshape(*lead, D)


def rotation(D: int) -> Float[ndarray, "D D"]:
    """Returns the symmetric orthogonal matrix H, float64.

    Where D is a power of two it is Sylvester's Hadamard matrix over √D. Else, with m
    the odd factor of D, it is the Kronecker product of the Hartley matrix of m and that
    of D / m.
    """
    block = D & -D
    hadamard = np.ones((1, 1))
    while len(hadamard) < block:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    return np.kron(_hartley(D // block), hadamard / math.sqrt(block))


def rotation_flops(D: int) -> int:
    """Returns the floating-point operations of `rotate` on one vector."""
    block = D & -D
    return D * (block.bit_length() - 1) + D + (2 * D * (D // block) if block < D else 0)


def _hartley(m: int) -> Float[ndarray, "m m"]:
    """Returns `(cos + sin)(2π i j / m) / √m`, which is symmetric and its own inverse."""
    angle = 2 * np.pi * np.outer(np.arange(m), np.arange(m)) / m
    return (np.cos(angle) + np.sin(angle)) / math.sqrt(m)


Map = Identity | Constant | Linear | LowRank | Diagonal | Hadamard | Hidden


@functools.partial(register_dataclass, data_fields=["values", "scale"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class Quantised:
    """Holds a matrix `[D, E]` as `values * scale[:, None]`: int8 numbers from −127 to
    127, and one float32 a row.

    A row holds the weights of one coordinate of x. Coordinates with large values have
    small weights, so one scale for all rows would lose these.
    """

    values: Leaf[Array | ndarray]
    scale: Leaf[Array | ndarray]

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns (D, E)."""
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        """Returns 2."""
        return len(self.shape)

    def astype(self, dtype: jnp.dtype | type) -> Float[Array, "D E"]:
        """Returns the matrix in floating point, as maps take it."""
        return jnp.asarray(self.values).astype(dtype) * self.scale.astype(dtype)[:, None]


@jax.jit
def quantise(W: Float[Array | ndarray, "D E"]) -> Quantised:
    """Returns a matrix as int8 by row, rounded to nearest; the largest weight of a row
    becomes ±127.
    """
    W = jnp.asarray(W, jnp.float32)
    scale = jnp.max(jnp.abs(W), axis=1) / _STEPS
    values: Int8[Array, "D E"] = jnp.round(W / jnp.where(scale > 0, scale, 1)[:, None]).astype(
        jnp.int8
    )
    return Quantised(values, scale)


def is_quantised(leaf: object) -> bool:
    """Returns whether a part of a map is a matrix in int8."""
    return isinstance(leaf, Quantised)


def quantised(stand_in: Map) -> Map:
    """Returns a map with its matrices in int8 by row; vectors stay as they are."""
    return jax.tree.map(lambda leaf: quantise(leaf) if jnp.ndim(leaf) == 2 else leaf, stand_in)
