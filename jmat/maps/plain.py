"""Fits least squares by the plain formula, `jnp.linalg.lstsq(X, Y, rcond=0)`: one call
a pair.

It decomposes X by an SVD for each target, where `jmat.maps.least_squares` factorises it
once. Where the streams are well conditioned both give the same predictions; beside
large coordinates, an SVD in float32 loses the small ones.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpy import ndarray

from jmat.maps.centring import centre
from jmat.maps.least_squares import checked
from jmat.maps.solution import Solution

SOLVERS = ("qr", "lstsq")


def plain_lstsq(
    X: Float[Array | ndarray, "N D"], Y: Float[Array | ndarray, "N R"], *, intercept: bool = False
) -> Solution:
    """Minimises `||X W (+ b) − Y||²` by `jnp.linalg.lstsq` with `rcond=0`, in float32.

    Args:
      X: inputs, an example a row.
      Y: targets.
      intercept: also fit a bias, by centring.

    Raises:
      ValueError: on shapes that do not fit, no examples, NaN or infinity.
    """
    if X.ndim != 2 or Y.ndim != 2 or len(X) != len(Y) or 0 in X.shape or 0 in Y.shape:
        raise ValueError(
            f"expected X [N, D] and Y [N, R] with the same N of at least 1, got {X.shape} and "
            f"{Y.shape}"
        )
    X, Y = checked("X", X), checked("Y", Y)
    means = (jnp.mean(X, axis=0), jnp.mean(Y, axis=0)) if intercept else None
    with jax.default_matmul_precision("highest"):
        A, B = (centre(X), Y - means[1]) if means else (X, Y)
        weights, _, rank, values = jnp.linalg.lstsq(A, B, rcond=0)
        bias = means[1] - jnp.matmul(means[0], weights) if means else None
        residual = jnp.sum(jnp.square(B - jnp.matmul(A, weights)), axis=0)
    smallest = jnp.maximum(values[jnp.maximum(rank - 1, 0)], jnp.finfo(values.dtype).tiny)
    condition = jnp.where(rank > 0, values[0] / smallest, 1)
    return Solution(weights, bias, rank.astype(jnp.int32), condition, residual, len(X), 0.0)
