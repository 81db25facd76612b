"""The factor R of `X = Q R` from the second moments of X alone, and least squares by it;
all in float64.

Second moments are scaled to unit diagonal before they are factored, as in
`jmat.maps.least_squares`: what is then large or small is dependence between
coordinates, not their units. Rank is judged by the same rule as there. Q is never
needed, only `P = QᵀY`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jmat.maps.conditioning import RANK_EPS, minimum_norm

EPS32 = float(np.finfo(np.float32).eps)


class Spectrum(NamedTuple):
    """Eigenvalues of a symmetric matrix, falling, and its eigenvectors in columns."""

    values: Float[Array, " D"]
    vectors: Float[Array, "D D"]


class Roots(NamedTuple):
    """Holds R of `X = Q R` as `R = diag(s) Vt diag(scale)`, and which s count; `varies`
    leaves out constant coordinates.
    """

    s: Float[Array, " D"]
    Vt: Float[Array, "D D"]
    scale: Float[Array, " D"]
    kept: Bool[Array, " D"]
    varies: Bool[Array, " D"]

    @property
    def factor(self) -> Float[Array, "D D"]:
        """Returns R itself, with zeros for the s that do not count."""
        return jnp.where(self.kept, self.s, 0)[:, None] * self.Vt * self.scale


@jax.jit
def spectrum(A: Float[Array, "D D"]) -> Spectrum:
    """Returns eigenvalues and eigenvectors of a symmetric matrix without negative
    eigenvalues, the largest first.
    """
    values, vectors = jnp.linalg.eigh(A)
    return Spectrum(jnp.maximum(values[::-1], 0), vectors[:, ::-1])


def varying(
    gram: Float[Array, "D D"], x_mean: Float[Array, " D"], n: float | int
) -> Bool[Array, " D"]:
    """Returns which coordinates vary, given XᵀX of centred X: one that is constant up to
    the rounding of float32 is zero, not scaled-up noise.
    """
    return jnp.diag(gram) > n * (4 * EPS32 * jnp.abs(x_mean)) ** 2


@jax.jit
def roots(A: Float[Array, "D D"], varies: Bool[Array, " D"]) -> Roots:
    """Returns R of X, given XᵀX and which coordinates vary."""
    A = jnp.where(varies & varies[:, None], A, 0)
    length = jnp.sqrt(jnp.diag(A))
    scale = jnp.where(length > 0, length, 1)
    values, vectors = spectrum(A / scale / scale[:, None])
    s = jnp.sqrt(values)
    return Roots(s, vectors.T, scale, s > RANK_EPS * EPS32 * s[0], varies)


@jax.jit
def projected(found: Roots, B: Float[Array, "D E"]) -> Float[Array, "D E"]:
    """Returns P = QᵀY, given XᵀY."""
    B = jnp.where(found.varies[:, None], B, 0) / found.scale[:, None]
    inverse = jnp.where(found.kept, 1 / jnp.where(found.kept, found.s, 1), 0)
    return inverse[:, None] * (found.Vt @ B)


@jax.jit
def solved(found: Roots, P: Float[Array, "D E"]) -> Float[Array, "D E"]:
    """Returns the weights of least squares, those of minimum norm where X is rank
    deficient.
    """
    s, Vt, scale, kept, _ = found
    return jax.lax.cond(
        kept.all(),
        lambda: (Vt.T @ (P / jnp.where(kept, s, 1)[:, None])) / scale[:, None],
        lambda: minimum_norm(P, jnp.eye(len(s)), s, Vt, scale, kept),
    )
