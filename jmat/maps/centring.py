"""Centres activations, and sums their squares, without loss where they are far from zero."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jmat.maps.conditioning import matmul
from jmat.runtime.precision import float64


@float64()
def energy(Y: Float[Array | np.ndarray, "N R"]) -> Float[Array, ""]:
    """Returns `||Y||²`, in float64."""
    return _sum_of_squares(Y)


@jax.jit
def _sum_of_squares(values: Array) -> Array:
    return jnp.sum(jnp.square(values), dtype=jnp.float64)


def column_mean(values: Array) -> Array:
    """Returns the mean over examples in two passes: the second removes the rounding of
    the first, which outliers make large.
    """
    # a product sums faster than a reduction
    average = jnp.full(values.shape[0], 1 / values.shape[0], values.dtype)
    first = matmul(average, values)
    return first + matmul(average, values - first)


@jax.jit
def centre(X: Float[Array | np.ndarray, "N D"]) -> Float[Array, "N D"]:
    """Returns X without its mean; a coordinate that is constant up to rounding becomes
    exactly zero, not scaled-up noise.
    """
    X = jnp.asarray(X)
    return centred_by(X, column_mean(X))


def centred_by(X: Array, mean: Array) -> Array:
    """Returns X less a mean, without coordinates that are constant up to rounding."""
    centred = X - mean
    spread = jnp.sqrt(jnp.mean(jnp.square(centred), axis=0))
    constant = spread <= 4 * jnp.finfo(X.dtype).eps * jnp.abs(mean)
    return jnp.where(constant, 0, centred)
