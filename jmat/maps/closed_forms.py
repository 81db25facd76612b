"""Maps in closed form, each from the moments of one pair (`jmat.maps.regression`). All
is computed in float64.

Maps are float32. With X and Y centred, an intercept `b = ȳ − x̄ W` goes with every one
but `id` and `mat`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jmat.maps.compact import Diagonal, Hadamard, LowRank, rotation
from jmat.maps.regression import Regression
from jmat.maps.roots import spectrum
from jmat.maps.types import Constant, Identity, Linear
from jmat.runtime.precision import float64

AUTO = "auto"  # the penalty is chosen by generalised cross-validation
PENALTIES = tuple(10.0 ** (k / 2) for k in range(-16, 5))  # from which it is chosen, as shares


def identity(pair: Regression, parameter: None) -> Identity:
    """Returns `y = x`."""
    return Identity()


@float64()
def constant(pair: Regression, parameter: None) -> Constant:
    """Returns the mean of the target."""
    return Constant(_narrow(pair.y_mean))


@float64()
def linear(pair: Regression, parameter: None) -> Linear:
    """Returns the map of least squares without an intercept, that of minimum norm where
    X is rank deficient.
    """
    return Linear(_narrow(pair.linear))


@float64()
def affine(pair: Regression, parameter: None) -> Linear:
    """Returns the map of least squares with an intercept, that of minimum norm where X
    is rank deficient.
    """
    return _dense(pair, pair.affine)


@float64()
def ridge(pair: Regression, share: float | str) -> Linear:
    """Returns `(XᵀX + αI)⁻¹ XᵀY` with `α = share · tr(XᵀX) / D`; for `auto`, the share
    of the best cross-validation.
    """
    values, vectors = pair.variance
    alpha = _penalty(share, values, pair.rotated, pair.y_spread.sum(), pair.n)
    return _dense(pair, vectors @ (pair.rotated / _positive(values + alpha)[:, None]))


@float64()
def toward_identity(pair: Regression, share: float | str) -> Linear:
    """Returns `I + (XᵀX + αI)⁻¹ Xᵀ(Y − X)`: the penalty pulls the map to the identity
    instead of to zero.
    """
    values, vectors = pair.variance
    change = pair.rotated - values[:, None] * vectors.T
    alpha = _penalty(share, values, change, pair.change_spread, pair.n)
    return _dense(
        pair, jnp.eye(len(values)) + vectors @ (change / _positive(values + alpha)[:, None])
    )


@float64()
def orthogonal(pair: Regression, parameter: None) -> Linear:
    """Returns `s · U Vᵀ` of `XᵀY = U Σ Vᵀ`, with `s = tr Σ / tr XᵀX`: a rotation and
    one scale (Procrustes).
    """
    return _dense(pair, _orthogonal(pair.gram, pair.cross))


@float64()
def diagonal(pair: Regression, parameter: None) -> Diagonal:
    """Returns one slope a coordinate: covariance over variance; 0 where the coordinate
    does not vary.
    """
    s = jnp.where(pair.roots.varies, jnp.diag(pair.cross) / _positive(jnp.diag(pair.gram)), 0)
    return Diagonal(_narrow(s), _narrow(pair.y_mean - pair.x_mean * s))


@float64()
def hadamard(pair: Regression, parameter: None) -> Hadamard:
    """Returns one slope a coordinate after a rotation (`jmat.maps.compact.rotation`)."""
    H = jnp.asarray(rotation(len(pair.x_mean)))
    s = jnp.sum(H * (H @ pair.cross), axis=1) / _positive(jnp.sum(H * (H @ pair.gram), axis=1))
    return Hadamard(_narrow(s), _narrow(pair.y_mean - ((pair.x_mean @ H) * s) @ H))


@float64()
def low_rank(pair: Regression, rank: int) -> LowRank:
    """Returns the best map of a rank: `B V Vᵀ`, with B the affine map and V the
    components of its predictions.
    """
    V = pair.explained.vectors[:, :rank]
    return _factored(pair, pair.affine @ V, V.T)


@float64()
def low_rank_logits(pair: Regression, rank: int) -> LowRank:
    """Returns the best map of a rank in the metric Γ of the head: `B Γ^½ V Vᵀ Γ^−½`.

    Raises ValueError where the regression has no metric.
    """
    V = pair.explained_logits.vectors[:, :rank]
    assert pair.metric is not None
    return _factored(pair, pair.affine @ (pair.metric.root @ V), V.T @ pair.metric.inverse_root)


@float64()
def standardised(pair: Regression, rank: int) -> LowRank:
    """Returns the ridge map of a rank on inputs of unit variance, its penalty chosen by
    cross-validation.

    It is the optimum of N-NJTC (arXiv 2409.14091): batch norm, then `D x r`, then
    `r x E`.
    """
    s, Vt, scale, _, varies = pair.roots
    rotated = Vt @ (jnp.where(varies[:, None], pair.cross, 0) / scale[:, None])
    alpha = _penalty(AUTO, s**2, rotated, pair.y_spread.sum(), pair.n)
    inverse = 1 / _positive(s**2 + alpha)[:, None]
    seen = jnp.sqrt(inverse) * rotated
    V = spectrum(seen.T @ seen).vectors[:, :rank]
    return _factored(pair, (Vt.T @ (inverse * (rotated @ V))) / scale[:, None], V.T)


def _dense(pair: Regression, W: Float[Array, "D E"]) -> Linear:
    return Linear(_narrow(W), _narrow(pair.bias(W)))


def _factored(pair: Regression, A: Float[Array, "D r"], B: Float[Array, "r E"]) -> LowRank:
    return LowRank(_narrow(A), _narrow(B), _narrow(pair.y_mean - (pair.x_mean @ A) @ B))


def _narrow(values: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jnp.asarray(np.asarray(values, np.float32))


def _positive(values: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns what can be divided by: 1 in place of 0, where the numerator is 0, too."""
    return jnp.where(values > 0, values, 1)


def _penalty(
    share: float | str,
    values: Float[Array, " D"],
    rotated: Float[Array, "D E"],
    total: Float[Array, ""],
    n: int,
) -> Float[Array, ""]:
    """Returns α, for `auto` that of the share with the smallest error of generalised
    cross-validation.

    Args:
      share: of the mean eigenvalue, or `auto`.
      values: eigenvalues of XᵀX.
      rotated: Vᵀ XᵀT, with V their eigenvectors in columns and T the targets.
      total: `‖T‖²`.
      n: number of tokens.
    """
    unit = values.sum() / len(values)
    if not isinstance(share, str):
        return share * unit
    return (
        jnp.asarray(PENALTIES)[
            jnp.argmin(_validation_errors(values, rotated, total, jnp.float64(n)))
        ]
        * unit
    )


@jax.jit
def _validation_errors(values: Array, rotated: Array, total: Array, n: Array) -> Array:
    """Returns `n RSS / (n − degrees of freedom)²` for every share of `PENALTIES`; the
    intercept is one degree.
    """
    energy = jnp.sum(rotated**2, axis=1)
    alphas = jnp.asarray(PENALTIES)[:, None] * values.sum() / len(values)
    shrunk = 1 / _positive(values + alphas)
    residual = (
        total - 2 * jnp.sum(energy * shrunk, axis=1) + jnp.sum(values * energy * shrunk**2, axis=1)
    )
    freedom = 1 + jnp.sum(values * shrunk, axis=1)
    return jnp.where(freedom < n, n * residual / _positive(n - freedom) ** 2, jnp.inf)


@jax.jit
def _orthogonal(gram: Array, cross: Array) -> Array:
    U, s, Vt = jnp.linalg.svd(cross, full_matrices=False)
    return (s.sum() / _positive(jnp.trace(gram))) * (U @ Vt)
