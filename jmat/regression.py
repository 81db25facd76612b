"""Least squares for maps between activations: one factorisation, any number of right-hand sides.

Transformer activations are a hard regression problem in float32. A few coordinates are a thousand times larger than the
rest, and condition numbers of 1e4 to 1e6 are usual. Three choices keep the answer (measured against float64):

- QR of X itself, never the normal equations: the error grows with the condition number, not with its square.
- A triangular solve where X has full rank. Householder QR and back substitution do not care how columns are scaled,
  whereas an SVD of X loses the small columns beside the outliers.
- Rank is judged on R with its columns scaled to unit length. What is large or small is then dependence between
  coordinates, not their units. Where the rank is deficient, the scaled SVD gives a solution that is as accurate, and
  projecting it onto the row space of X makes it the one of minimum norm in the *original* units.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

# Rounding leaves exactly dependent columns with scaled singular values of up to 4 eps, for every N and D tried
# (N to 50,000, D to 1,600); genuine condition numbers of 1e6 stay above twice that.
RANK_EPS = 8.0

_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["weights", "bias", "rank", "condition", "residual"],
    meta_fields=["n", "ridge"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
    """The map `y = x @ weights (+ bias)` with the statistics of its fit.

    Attributes:
        weights: [D, R].
        bias: [R], or None without an intercept.
        rank: of X (centred, if there is an intercept), as the solver judged it; int32 scalar.
        condition: largest over smallest singular value of X that counts; 1 where none does.
        residual: [R], the sum over examples of `(Y − prediction)²`, from the predictions themselves.
        n: number of examples.
        ridge: the penalty.
    """

    # Any, since a pytree's leaves can be anything: jax.tree.map puts shapes, shardings or numpy arrays here.
    weights: Any
    bias: Any
    rank: Any
    condition: Any
    residual: Any
    n: int
    ridge: float

    def describe(self) -> str:
        """One sentence on how well X determines the map, and what was done if it does not."""
        rank, dimensions = int(self.rank), self.weights.shape[0]
        if rank == dimensions:
            return f"full rank {dimensions} from {self.n} examples, condition number {float(self.condition):.1e}"
        few = self.n - (self.bias is not None) < dimensions  # a bias takes one example
        cause = "fewer examples than dimensions" if few else "linearly dependent input coordinates"
        remedy = f"ridge {self.ridge:g} makes it unique" if self.ridge else "the minimum-norm solution is used"
        return f"rank {rank} of {dimensions}: {cause}; {remedy}"


def lstsq(
    X: Float[Array | np.ndarray, "N D"],
    Y: Float[Array | np.ndarray, "N R"],
    *,
    intercept: bool = False,
    ridge: float | int = 0.0,
    rcond: float | None = None,
) -> Solution:
    """Minimises `||X W (+ b) − Y||² + ridge ||W||²` over W (and b), for all R columns of Y at once.

    Works in the dtype of the inputs, and in float32 for half-precision ones. Stack the targets of one source side by
    side: they share the factorisation. Not to be called under `jit`, since it looks at the values.

    Args:
        X: inputs, an example a row.
        Y: targets.
        intercept: also fit a bias (by centring), which `ridge` does not penalise.
        ridge: the penalty, on the scale of a sum over examples.
        rcond: singular values of X below `rcond` times the largest count as zero. By default only coordinates that
            are dependent up to rounding do, whatever their scales; neither numpy's nor jax.numpy's default,
            `eps · max(N, D)`, which at N = 9,000 in float32 truncates everything beyond a condition number of 1e3.

    Raises:
        ValueError: on shapes that do not fit, no examples, NaN or infinity, or a negative `ridge` or `rcond`.
    """
    if X.ndim != 2 or Y.ndim != 2 or X.shape[0] != Y.shape[0]:
        raise ValueError(f"expected X [N, D] and Y [N, R] with the same N, got {X.shape} and {Y.shape}")
    if 0 in X.shape or 0 in Y.shape:
        raise ValueError(f"nothing to fit: X is {X.shape} and Y is {Y.shape}; give at least one example")
    if not 0 <= ridge < np.inf:
        raise ValueError(f"ridge must be a finite number >= 0, got {ridge}")
    if rcond is not None and not 0 <= rcond < 1:
        raise ValueError(f"rcond must be in [0, 1), or None for the default, got {rcond}")
    X, Y = jnp.asarray(X), jnp.asarray(Y)
    dtype = jnp.float64 if jnp.float64 in (X.dtype, Y.dtype) else jnp.float32
    X, Y = X.astype(dtype), Y.astype(dtype)
    for name, values in (("X", X), ("Y", Y)):
        if not _all_finite(values):
            bad = np.count_nonzero(~np.isfinite(np.asarray(values)))
            raise ValueError(
                f"{bad} of the {values.size} values of {name} are NaN or infinite; find the examples that produce "
                "them (text longer than the positions and half-precision overflow are the usual causes)"
            )
    fitted = _fit(X, Y, float(ridge) if ridge else None, rcond, intercept=intercept)
    return Solution(**fitted, n=X.shape[0], ridge=float(ridge))


@jax.jit
def _all_finite(values: Array) -> Array:
    # A maximum propagates NaN and infinity, and is five times as fast on a CPU as counting.
    return jnp.isfinite(jnp.max(jnp.abs(values)))


@functools.partial(jax.jit, static_argnames=("intercept",))
def _fit(X: Array, Y: Array, ridge: Array | float | None, rcond: Array | float | None, *, intercept: bool) -> dict:
    # Also reaches the products inside QR, SVD and the triangular solve on accelerators.
    with jax.default_matmul_precision("highest"):
        x_mean, y_mean = (_mean(X), _mean(Y)) if intercept else (None, None)
        Q, R = jnp.linalg.qr(X if x_mean is None else _centre(X, x_mean))
        B = _matmul(Q.T, Y if y_mean is None else Y - y_mean)

        U, s, Vt, scale = _spectrum(R, equilibrate=rcond is None)
        kept = s > (RANK_EPS * jnp.finfo(s.dtype).eps if rcond is None else rcond) * s[0]
        rank = jnp.sum(kept, dtype=jnp.int32)

        if ridge is not None:
            weights = ridge_solution(R, B, ridge)
        elif R.shape[0] < R.shape[1]:
            weights = minimum_norm(B, U, s, Vt, scale, kept)
        else:
            weights = jax.lax.cond(
                rank == R.shape[1],
                lambda: solve_triangular(R, B),
                lambda: minimum_norm(B, U, s, Vt, scale, kept),
            )
        bias = None if x_mean is None or y_mean is None else y_mean - _matmul(x_mean, weights)
        prediction = _matmul(X, weights) if bias is None else _matmul(X, weights) + bias
        residual = jnp.sum(jnp.square(Y - prediction), axis=0)
    return {
        "weights": weights,
        "bias": bias,
        "rank": rank,
        "condition": condition_number(R, rank),
        "residual": residual,
    }


def _mean(values: Array) -> Array:
    """Mean over examples in two passes: the second removes the rounding of the first, which outliers make large."""
    average = jnp.full(values.shape[0], 1 / values.shape[0], values.dtype)  # a product sums faster than a reduction
    first = _matmul(average, values)
    return first + _matmul(average, values - first)


def _centre(X: Array, mean: Array) -> Array:
    """X − mean, where a coordinate that is constant up to rounding becomes exactly zero instead of scaled-up noise."""
    centred = X - mean
    spread = jnp.sqrt(jnp.mean(jnp.square(centred), axis=0))
    constant = spread <= 4 * jnp.finfo(X.dtype).eps * jnp.abs(mean)
    return jnp.where(constant, 0, centred)


def _spectrum(R: Array, *, equilibrate: bool) -> tuple[Array, Array, Array, Array]:
    """SVD of R / scale, where scale is the length of R's columns if `equilibrate`, else 1."""
    length = jnp.linalg.norm(R, axis=0)
    scale = jnp.where(length > 0, length, 1) if equilibrate else jnp.ones_like(length)
    U, s, Vt = jnp.linalg.svd(R / scale, full_matrices=False)
    return U, s, Vt, scale


def minimum_norm(B: Array, U: Array, s: Array, Vt: Array, scale: Array, kept: Array) -> Array:
    """The smallest W among the minimisers of `||R W − B||`, for `R = U diag(s) Vt diag(scale)` truncated to `kept`."""
    inverse = jnp.where(kept, 1 / jnp.where(kept, s, 1), 0)
    solution = _matmul(Vt.T, inverse[:, None] * _matmul(U.T, B)) / scale[:, None]
    # Minimum norm after scaling is not minimum norm: remove what lies outside the row space. The kept directions come
    # first, so the zero columns behind them do not disturb the basis.
    mask = kept.astype(Vt.dtype)
    basis = jnp.linalg.qr(scale[:, None] * Vt.T * mask)[0] * mask
    return _matmul(basis, _matmul(basis.T, solution))


def ridge_solution(R: Array, B: Array, ridge: Array | float) -> Array:
    """`V s/(s² + ridge) Uᵀ B` with the singular values of R, as QR of `[R; √ridge I]`: no product s² is ever formed."""
    penalty = jnp.sqrt(jnp.asarray(ridge, R.dtype)) * jnp.eye(R.shape[1], dtype=R.dtype)
    Q, R_ridge = jnp.linalg.qr(jnp.concatenate([R, penalty]))
    return solve_triangular(R_ridge, _matmul(Q[: R.shape[0]].T, B))


def condition_number(R: Array, rank: Array) -> Array:
    """Largest over smallest singular value of R, of those that count; 1 where none does."""
    s = jnp.linalg.svd(R, compute_uv=False)
    smallest = jnp.maximum(s[rank - 1], jnp.finfo(s.dtype).tiny)
    return jnp.where(rank > 0, s[0] / smallest, 1)
