"""Least squares for maps between activations: one factorisation, any number of
right-hand sides.

Transformer activations are a hard regression problem in float32. A few coordinates are
a thousand times larger than the rest, and condition numbers of 1e4 to 1e6 are usual.
Four choices keep the answer, and its price (errors are relative, against float64):

- QR of X itself, never the normal equations: the error grows with the condition number,
  not with its square.
- A triangular solve where X has full rank. Householder QR and back substitution do not
  care how columns are scaled, whereas an SVD of X, as in `jnp.linalg.lstsq`, loses the
  small columns beside the outliers. With three coordinates 3,000 times as large as the
  other 253, at N = 9,000, its predictions are wrong by 0.99 with the default cut-off,
  by 1e-3 with `rcond=0`, and those of QR by 2e-7
  (`experiments.benchmark --parts=condition`).
- One factorisation of X for all targets: `lstsq` would decompose it again for each.
- Rank is judged, and where it is deficient the minimum-norm solution found, on R with
  its columns scaled (`jmat.maps.conditioning`).
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jmat.maps.centring import _sum_of_squares, centred_by, column_mean, energy
from jmat.maps.conditioning import (
    condition_number,
    matmul,
    minimum_norm,
    numerical_rank,
    ridge_solution,
    scaled_svd,
)
from jmat.maps.solution import Solution
from jmat.runtime.annotations import Leaf
from jmat.runtime.precision import float64
from jmat.runtime.pytrees import register_dataclass
from jmat.runtime.threads import in_threads


def lstsq(
    X: Float[Array | np.ndarray, "N D"],
    Y: Float[Array | np.ndarray, "N R"],
    *,
    intercept: bool = False,
    ridge: float | int = 0.0,
    rcond: float | None = None,
) -> Solution:
    """Minimises `||X W (+ b) − Y||² + ridge ||W||²` over W (and b), for all R columns
    of Y at once.

    Works in the dtype of the inputs, and in float32 for half-precision ones. For
    several targets of one source, `factorise` it once. Not to be called under `jit`,
    since it looks at the values.

    Args:
      X: inputs, an example a row.
      Y: targets.
      intercept: also fit a bias (by centring), which `ridge` does not penalise.
      ridge: the penalty, on the scale of a sum over examples.
      rcond: singular values of X below `rcond` times the largest count as zero. By
        default only coordinates that are dependent up to rounding do, whatever their
        scales; neither numpy's nor jax.numpy's default, `eps · max(N, D)`, which at N =
        9,000 in float32 truncates everything beyond a condition number of 1e3.

    Raises:
      ValueError: on shapes that do not fit, no examples, NaN or infinity, or a negative
        `ridge` or `rcond`.
    """
    if X.ndim != 2 or Y.ndim != 2 or X.shape[0] != Y.shape[0]:
        raise ValueError(
            f"expected X [N, D] and Y [N, R] with the same N, got {X.shape} and {Y.shape}"
        )
    if 0 in X.shape or 0 in Y.shape:
        raise ValueError(
            f"nothing to fit: X is {X.shape} and Y is {Y.shape}; give at least one example"
        )
    dtype = jnp.float64 if jnp.float64 in map(jnp.result_type, (X, Y)) else jnp.float32
    X, Y = checked("X", X, dtype), checked("Y", Y, dtype)
    return factorise(X, intercept=intercept, ridge=ridge, rcond=rcond).solve(Y)


def factorise(
    X: Float[Array | np.ndarray, "N D"],
    *,
    intercept: bool = False,
    ridge: float | int = 0.0,
    rcond: float | None = None,
    condition: bool = True,
) -> "Factors":
    """Computes the part of `lstsq` that all targets of one source share. Takes and
    raises what `lstsq` does.

    The condition number costs an SVD of its own, and is left out (None) by flag.
    """
    if X.ndim != 2 or 0 in X.shape:
        raise ValueError(
            f"expected X [N, D] with at least one example and one coordinate, got {X.shape}"
        )
    if not 0 <= ridge < np.inf:
        raise ValueError(f"ridge must be a finite number >= 0, got {ridge}")
    if rcond is not None and not 0 <= rcond < 1:
        raise ValueError(f"rcond must be in [0, 1), or None for the default, got {rcond}")
    X = checked("X", X, jnp.result_type(X))
    Q, R, mean, rank = _factorise(X, rcond, intercept=intercept)
    spectrum = None
    if int(rank) < X.shape[1]:
        with float64():  # what is large in one coordinate must not drown another
            spectrum = scaled_svd(R, rcond, rank)
    number = condition_number(R, rank) if condition else None
    return Factors(X, Q, R, mean, spectrum, rank, number, float(ridge) if ridge else None)


class Factorising(TypedDict, total=False):
    """Holds the settings of `factorise`."""

    intercept: bool
    ridge: float | int
    rcond: float | None
    condition: bool


def factorise_each(
    sources: Sequence[Float[Array | np.ndarray, "N _"]], **settings: Unpack[Factorising]
) -> Iterator["Factors"]:
    """Applies `factorise` to several sources, in their order; takes its keywords.

    Several at a time, on CPUs each in one thread (`jmat.runtime.threads`).
    """
    return in_threads(functools.partial(factorise, **settings), sources)


@register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Factors:
    """Holds X = Q R (centred, if there is an intercept), for any number of targets.

    Attributes:
      X: as given, [N, D].
      Q: orthonormal columns, [N, min(N, D)].
      R: upper triangular, [min(N, D), D].
      mean: of X's rows, or None without an intercept.
      spectrum: where R is rank deficient, U, s, Vt and scale of
        `R = U diag(s) Vt diag(scale)`, and which s count.
      rank: as in `Solution`.
      condition: as in `Solution`; None if it was not asked for.
      ridge: the penalty, or None.
    """

    X: Leaf[Array]
    Q: Leaf[Array]
    R: Leaf[Array]
    mean: Leaf[Array | None]
    spectrum: Leaf[tuple[Array, ...] | None]
    rank: Leaf[Array]
    condition: Leaf[Array | None]
    ridge: Leaf[float | None]

    def solve(self, Y: Float[Array | np.ndarray, "N R"], *, residual: bool = True) -> Solution:
        """Returns the solution for targets Y; waits for no device where Y is on one.

        Args:
          Y: targets. For those of several sources put `checked` arrays here, which are
            looked at once.
          residual: whether to compute the `residual`, which takes half of the time.

        Raises:
          ValueError: on another number of examples than X has; NaN or infinity in a
            numpy array.
        """
        Y = self._targets(Y)
        with float64(self.spectrum is not None or Y.dtype == jnp.float64):
            weights, bias = _solve(self, Y)
        error = _residual(self.X, Y, weights, bias) if residual else None
        return Solution(weights, bias, self.rank, self.condition, error, len(Y), self.ridge or 0.0)

    def explained(self, Y: Float[Array | np.ndarray, "N R"]) -> float:
        """Returns the share of Y that a map without penalty explains:
        `1 − residual / ||Y||²`.

        Y is centred if there is an intercept. Read off `Qᵀ Y`: no map is solved for.
        Accurate to 1e-6. 1 where there is nothing to explain.

        Raises:
          ValueError: as `solve`.
        """
        Y = self._targets(Y)
        if self.mean is not None:
            Y = Y - column_mean(Y)
        total = float(energy(Y))
        return float(self.projected(Y)) / total if total > 0 else 1.0

    @float64()
    def projected(self, Y: Float[Array, "N R"]) -> Float[Array, ""]:
        """Returns `||Qᵀ Y||²` in float64, what of Y's `energy` a map explains, for
        centred Y where X is centred.

        For many targets: nothing is checked, and nothing waited for.
        """
        return _projected(self.Q, self.spectrum, Y)

    def _targets(self, Y: Array | np.ndarray) -> Array:
        N = self.X.shape[0]
        if Y.ndim != 2 or Y.shape[0] != N or Y.shape[1] == 0:
            raise ValueError(f"expected Y [{N}, R], got {Y.shape}")
        return (
            _on_device(Y, self.X.dtype)
            if isinstance(Y, jax.Array)
            else checked("Y", Y, self.X.dtype)
        )


def checked(
    name: str, values: Float[Array | np.ndarray, "N D"], dtype: DTypeLike = jnp.float32
) -> Array:
    """Returns the values on the device, in float64 if `dtype` is, else in float32;
    waits until they are looked at.

    Args:
      name: what errors call them, such as `X`, the inputs of a map, or `Y`, its
        targets.
      values: an example a row.
      dtype: of the regression.

    Raises:
      ValueError: NaN, infinity, or values so large that sums of their squares overflow.
    """
    array = _on_device(values, dtype)
    # A maximum propagates NaN and infinity, and is five times as fast on a CPU as counting.
    largest, limit = float(_largest(array)), float(jnp.finfo(array.dtype).max)
    if np.isfinite(largest) and largest > np.sqrt(limit / values.size):
        raise ValueError(
            f"the values of {name} reach {largest:.0e}, where sums of squares overflow (X holds "
            "the inputs of the map, Y its targets): scale them down. Activations of a model are so "
            "large where its weights are damaged."
        )
    if not np.isfinite(largest):
        bad = np.count_nonzero(~np.isfinite(np.asarray(array)))
        raise ValueError(
            f"{bad} of the {values.size} values of {name} are NaN or infinite; find the examples "
            "that produce them (text longer than the positions and half-precision overflow are the "
            "usual causes)"
        )
    return array


def _on_device(values: Array | np.ndarray, dtype: DTypeLike) -> Array:
    # Not jnp.asarray, which on a CPU copies what `jmat.capture.sweep` has laid out so that it need
    # not be copied.
    wanted = jnp.float64 if dtype == jnp.float64 else jnp.float32
    return jax.device_put(values if values.dtype == wanted else jnp.asarray(values, wanted))


@jax.jit
def _largest(values: Array) -> Array:
    return jnp.max(jnp.abs(values))


@functools.partial(jax.jit, static_argnames=("intercept",))
def _factorise(
    X: Array, rcond: Array | float | None, *, intercept: bool
) -> tuple[Array, Array, Array | None, Array]:
    # The setting also reaches the products inside QR and SVD on accelerators.
    with jax.default_matmul_precision("highest"):
        mean = column_mean(X) if intercept else None
        Q, R = jnp.linalg.qr(X if mean is None else centred_by(X, mean))
        # Rows less their mean add up to zero: one of N says nothing new, whatever its rounding.
        most = min(X.shape[0] - intercept, X.shape[1])
        return Q, R, mean, jnp.minimum(numerical_rank(R, rcond), most)


@jax.jit
def _solve(factors: Factors, Y: Array) -> tuple[Array, Array | None]:
    # The setting also reaches the products inside the triangular solve.
    with jax.default_matmul_precision("highest"):
        mean = None if factors.mean is None else column_mean(Y)
        B = matmul(factors.Q.T, Y if mean is None else Y - mean)
        if factors.ridge is not None:
            weights = ridge_solution(factors.R, B, factors.ridge)
        elif factors.spectrum is not None:
            weights = minimum_norm(B.astype(jnp.float64), *factors.spectrum).astype(B.dtype)
        else:
            weights = solve_triangular(factors.R, B)
        if factors.mean is None or mean is None:
            return weights, None
        return weights, mean - matmul(factors.mean, weights)


@jax.jit
def _projected(Q: Array, spectrum: tuple[Array, ...] | None, Y: Array) -> Array:
    B = matmul(Q.T, Y)
    if spectrum is not None:  # what Q has beyond X's rank is rounding
        U, *_, kept = spectrum
        B = jnp.where(kept[:, None], matmul(U.T, B.astype(U.dtype)), 0)
    return _sum_of_squares(B)


@jax.jit
def _residual(X: Array, Y: Array, weights: Array, bias: Array | None) -> Array:
    prediction = matmul(X, weights)
    return jnp.sum(jnp.square(Y - (prediction if bias is None else prediction + bias)), axis=0)
