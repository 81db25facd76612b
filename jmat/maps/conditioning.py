"""Computes rank, condition number and minimum-norm solutions of a regression from R of
X = Q R.

Rank is judged on R with its columns scaled to unit length. What is large or small is
then dependence between coordinates, not their units. Where the rank is deficient, the
scaled SVD gives a solution that is as accurate, and projecting it onto the row space of
X makes it the one of minimum norm in the *original* units. Both are done in float64,
since only D² numbers are left by then.
"""

import functools

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array

# Rounding leaves exactly dependent columns with scaled singular values of up to 4 eps, for every N
# and D tried (N to 50,000, D to 1,600); genuine condition numbers of 1e6 stay above twice that.
RANK_EPS = 8.0

matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def numerical_rank(R: Array, rcond: Array | float | None) -> Array:
    """Counts the singular values of the scaled R [min(N, D), D] that are not zero up to
    rounding, or by `rcond`; int32.

    They are computed unless `||R|| ||R⁻¹||`, which costs a tenth, shows that all of
    them count by far.
    """
    rows, D = R.shape
    R = R / _column_scale(R, rcond)

    def by_values() -> Array:
        return jnp.sum(_counts(jnp.linalg.svd(R, compute_uv=False), rcond), dtype=jnp.int32)

    if rows < D:
        return by_values()
    bound = jnp.linalg.norm(R) * jnp.linalg.norm(solve_triangular(R, jnp.eye(D, dtype=R.dtype)))
    full = 10 * _smallest(R, rcond) * bound < 1  # NaN and infinity are not
    return jax.lax.cond(full, lambda: jnp.int32(D), by_values)


def _column_scale(R: Array, rcond: Array | float | None) -> Array:
    """Returns the length of R's columns, unless the user decides by rcond what counts
    in X as it is.
    """
    length = jnp.linalg.norm(R, axis=0)
    return jnp.where(length > 0, length, 1) if rcond is None else jnp.ones_like(length)


@jax.jit
def scaled_svd(R: Array, rcond: Array | float | None, rank: Array) -> tuple[Array, ...]:
    """Returns U, s, Vt and scale of `R = U diag(s) Vt diag(scale)`, and which s count:
    as many as the rank. Float64.
    """
    with jax.default_matmul_precision("highest"):
        R = R.astype(jnp.float64)
        scale = _column_scale(R, rcond)
        U, s, Vt = jnp.linalg.svd(R / scale, full_matrices=False)
        return U, s, Vt, scale, jnp.arange(len(s), dtype=rank.dtype) < rank


def _counts(s: Array, rcond: Array | float | None) -> Array:
    """Returns which singular values are not zero up to rounding."""
    return s > _smallest(s, rcond) * s[0]


def _smallest(values: Array, rcond: Array | float | None) -> Array | float:
    """Returns the share of the largest singular value that another must exceed to
    count.
    """
    return RANK_EPS * float(jnp.finfo(values.dtype).eps) if rcond is None else rcond


def minimum_norm(B: Array, U: Array, s: Array, Vt: Array, scale: Array, kept: Array) -> Array:
    """Returns the smallest W among the minimisers of `||R W − B||`, for
    `R = U diag(s) Vt diag(scale)` truncated to `kept`.
    """
    inverse = jnp.where(kept, 1 / jnp.where(kept, s, 1), 0)
    solution = matmul(Vt.T, inverse[:, None] * matmul(U.T, B)) / scale[:, None]
    # Minimum norm after scaling is not minimum norm: remove what lies outside the row space. The
    # kept directions come first, so the zero columns behind them do not disturb the basis.
    mask = kept.astype(Vt.dtype)
    basis = jnp.linalg.qr(scale[:, None] * Vt.T * mask)[0] * mask
    return matmul(basis, matmul(basis.T, solution))


def ridge_solution(R: Array, B: Array, ridge: Array | float) -> Array:
    """Returns `V s/(s² + ridge) Uᵀ B` with the singular values of R, as QR of
    `[R; √ridge I]`: no product s² is ever formed.
    """
    penalty = jnp.sqrt(jnp.asarray(ridge, R.dtype)) * jnp.eye(R.shape[1], dtype=R.dtype)
    Q, R_ridge = jnp.linalg.qr(jnp.concatenate([R, penalty]))
    return solve_triangular(R_ridge, matmul(Q[: R.shape[0]].T, B))


@jax.jit
def condition_number(R: Array, rank: Array) -> Array:
    """Returns the largest over the smallest singular value of R, of those that count; 1
    where none does.
    """
    s = jnp.linalg.svd(R, compute_uv=False)
    smallest = jnp.maximum(s[rank - 1], jnp.finfo(s.dtype).tiny)
    return jnp.where(rank > 0, s[0] / smallest, 1)
