"""Maps and scores from moments alone, without any stored activations; all in float64."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jmat.capture.moments import Moments, mean, width
from jmat.capture.statistics import check_pairs, second_moments, spread
from jmat.maps.conditioning import condition_number, ridge_solution
from jmat.maps.roots import EPS32, Roots, projected, roots, solved, varying
from jmat.maps.solution import Solution
from jmat.maps.types import Identity, Linear
from jmat.runtime.precision import float64

# of a sum of squares: what varies less than that is constant up to rounding
_ROUNDING = (4 * EPS32) ** 2


@float64()
def fit(
    moments: Moments,
    source: str,
    targets: Sequence[str],
    *,
    intercept: bool = False,
    ridge: float | int = 0.0,
) -> tuple[dict[str, Linear], Solution]:
    """Minimises `||X W (+ b) − Y||² + ridge ||W||²` for all targets at once, as
    `jmat.maps.least_squares.lstsq`.

    One eigen-decomposition of the source's scaled second moments serves all targets.
    Where X is rank deficient, the solution is the one of minimum norm. Accuracy against
    float64 least squares on the activations themselves: about 1e-11 in predictions at
    condition number 1e4, 1e-7 at 1e6 (of dependence: scales of coordinates cost
    nothing). A map of condition number 1e6 loses more where it is rounded to float32:
    1e-4, as any float32 map.

    Returns:
      Maps by target, float32; and the solution in float64, the targets' columns side by
      side in their order.

    Raises:
      ValueError: a pair that was not summed up, no tokens, NaN or infinity, or a
        negative ridge.
    """
    if not 0 <= ridge < np.inf:
        raise ValueError(f"ridge must be a finite number >= 0, got {ridge}")
    n = check_pairs(moments, source, targets)
    fits = []
    A = jnp.asarray(second_moments(moments, source, source, centred=intercept))
    x_mean = jnp.asarray(mean(moments, source))
    varies = varying(A, x_mean, n) if intercept else jnp.full(len(A), True)
    found = roots(A, varies)
    rank, condition = _condition(found)
    for target in targets:
        B = jnp.asarray(second_moments(moments, source, target, centred=intercept))
        total = spread(moments, target, centred=intercept)
        W, residual = _solve(found, B, total, jnp.float64(ridge) if ridge else None)
        bias = mean(moments, target) - x_mean @ W if intercept else None
        fits.append(jax.tree.map(np.asarray, (W, residual, bias)))
    weights, residuals, biases = zip(*fits, strict=True)
    solution = Solution(
        weights=np.concatenate(weights, axis=1),
        bias=np.concatenate(biases) if intercept else None,
        rank=np.asarray(rank),
        condition=np.asarray(condition),
        residual=np.concatenate(residuals),
        n=n,
        ridge=float(ridge),
    )
    narrow = [
        jax.tree.map(lambda leaf: jnp.asarray(leaf.astype(np.float32)), (W, b)) for W, _, b in fits
    ]
    return {
        target: Linear(*arrays) for target, arrays in zip(targets, narrow, strict=True)
    }, solution


@jax.jit
def _condition(found: Roots) -> tuple[jax.Array, jax.Array]:
    """Returns the rank of X, and its condition number."""
    rank = jnp.sum(found.kept, dtype=jnp.int32)
    return rank, condition_number(found.factor, rank)


@jax.jit
def _solve(
    found: Roots, B: jax.Array, total: jax.Array, ridge: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the weights, and the sum of squared errors of each coordinate."""
    with jax.default_matmul_precision("highest"):
        Q_Y = projected(found, B)
        weights = solved(found, Q_Y) if ridge is None else ridge_solution(found.factor, Q_Y, ridge)
        outside = jnp.maximum(total - jnp.sum(Q_Y**2, axis=0), 0)
        return weights, outside + jnp.sum((Q_Y - found.factor @ weights) ** 2, axis=0)


@float64()
def r2(moments: Moments, source: str, target: str, shortcut: Identity | Linear) -> dict[str, float]:
    """Returns how much of the target a map of the source explains, on the text of these
    moments.

    The figure is held out if the map was not fitted on that text.

    Returns:
      `r2`, the uniform mean over the coordinates of `1 − Σ(y − ŷ)² / Σ(y − ȳ)²`, and
      `r2_weighted`, by the coordinates' variances. A constant coordinate scores 1 where
      it is predicted, else 0, as in scikit-learn; both are NaN where no coordinate
      varies.

    Raises:
      ValueError: a pair that was not summed up, no tokens, NaN or infinity, or a map of
        another shape.
    """
    n = check_pairs(moments, source, [target])
    D, E = width(moments, source), width(moments, target)
    given = (D, D) if isinstance(shortcut, Identity) else shortcut.W.shape
    if given != (D, E):
        raise ValueError(f"the map is {given}; expected {(D, E)}, from {source!r} to {target!r}.")
    total = spread(moments, target, centred=True)
    XX = second_moments(moments, source, source, centred=True)
    XY = second_moments(moments, source, target, centred=True)
    x_mean, y_mean = mean(moments, source), mean(moments, target)
    if isinstance(shortcut, Identity):
        error = total - 2 * jnp.diag(XY) + jnp.diag(XX)
        offset = y_mean - x_mean
    else:
        W = jnp.asarray(np.asarray(shortcut.W, np.float64))
        error = total - 2 * jnp.sum(W * XY, axis=0) + jnp.sum(W * (XX @ W), axis=0)
        offset = y_mean - x_mean @ W
        offset = (
            offset
            if shortcut.bias is None
            else offset - jnp.asarray(np.asarray(shortcut.bias, np.float64))
        )
    error = np.maximum(np.asarray(error + n * offset**2), 0)
    total, rounding = np.asarray(total), n * (1e-14 * np.abs(np.asarray(y_mean))) ** 2
    varies = total > rounding
    if not varies.any():
        return {"r2": float("nan"), "r2_weighted": float("nan")}
    each = np.where(varies, 1 - error / np.where(varies, total, 1), error <= rounding)
    return {"r2": float(each.mean()), "r2_weighted": float(1 - error.sum() / total.sum())}


@dataclasses.dataclass(frozen=True)
class Linearity:
    """Holds the scores of Razzhigaev et al. 2024, section 3: one affine least-squares
    fit of Y from X gives both.

    Attributes:
      residual: min over A, b of `||X A + b − Y||²`.
      total: `||Y − ȳ||²`.
      contribution: `||(Y − X) − mean||²`, what the block adds to the stream; None where
        the widths differ.
      n: number of tokens.
      dimensions: D, of X.
    """

    residual: float
    total: float
    contribution: float | None
    n: int
    dimensions: int

    @property
    def score(self) -> float:
        """Returns `1 − min_A ||X A − Y||²` for centred X and Y of Frobenius norm 1; NaN
        where Y is constant.
        """
        return _share(self.residual, self.total)

    @property
    def without_residual(self) -> float:
        """Returns the score between X and Y − X: the same residual, divided by the
        spread of Y − X.
        """
        return np.nan if self.contribution is None else _share(self.residual, self.contribution)

    def adjusted(self, score: float) -> float:
        """Returns `1 − (1 − s)(n − 1)/(n − D − 1)`: about 0 for noise, for which s is
        about D/(n − 1).

        NaN with n ≤ D + 1.
        """
        freedom = self.n - self.dimensions - 1
        return 1 - (1 - score) * (self.n - 1) / freedom if freedom > 0 else np.nan


def _total(moments: Moments, site: str) -> float:
    """Returns `||Y − ȳ||²`; 0 where Y is constant up to the rounding of float32. Needs
    64-bit numbers enabled.
    """
    total = float(spread(moments, site, centred=True).sum())
    return total if total > _ROUNDING * float(spread(moments, site, centred=False).sum()) else 0.0


def _share(part: float, whole: float) -> float:
    return 1 - part / whole if whole > 0 else np.nan


@float64()
def linearity(
    moments: Moments, source: str, targets: Sequence[str], solution: Solution | None = None
) -> dict[str, Linearity]:
    """Returns the linearity of every target in the source. `solution` is the affine fit
    of these targets, where it is at hand.
    """
    n = check_pairs(moments, source, targets)
    if solution is None:
        _, solution = fit(moments, source, targets, intercept=True)
    if solution.bias is None or solution.residual is None or solution.ridge:
        raise ValueError(
            "linearity is of an affine fit without ridge; this solution is of another kind."
        )
    scores, start = {}, 0
    x_total = _total(moments, source)
    for target in targets:
        columns = slice(start, start + width(moments, target))
        start = columns.stop
        residual = float(solution.residual[columns].sum())
        total = _total(moments, target)
        contribution = None
        if width(moments, target) == width(moments, source):
            XY = second_moments(moments, source, target, centred=True)
            contribution = max(total + x_total - 2 * float(jnp.trace(XY)), 0.0)
            if contribution <= _ROUNDING * (total + x_total):
                contribution = 0.0
        scores[target] = Linearity(residual, total, contribution, n, width(moments, source))
    return scores


@float64()
def anisotropy(moments: Moments, source: str) -> float:
    """Returns the share of the variance along the first principal component:
    `σ_1² / Σ σ²` of the centred activations.

    1/D if all directions are alike, 1 if all vectors lie on a line (Razzhigaev et al.
    2023, arXiv 2311.05928); NaN if they are all the same.
    """
    check_pairs(moments, source, [source])
    if not _total(moments, source):
        return float("nan")
    A = second_moments(moments, source, source, centred=True)
    return float(jnp.linalg.eigvalsh(A)[-1] / jnp.trace(A))
