"""Intrinsic dimension: on a surface of how many dimensions do a layer's activations
lie, however it is bent?

TwoNN (Facco et al. 2017, arXiv 1803.06992): where points are uniform between a point's
first and second neighbour, the ratio μ of their distances has the density
`d μ^(−d − 1)`, whatever the embedding space. Three estimators of d:

- `maximum_likelihood` (ours): `(n − 1) / Σ log μ`, unbiased under that density, with an
  exact interval;
- `linear_fit` (that paper's): the slope through the origin of `−log(1 − F)` over log μ,
  F being the share of points up to this one in the order of μ, without the largest
  tenth of the ratios;
- `public_code` (arXiv 2405.12250's): the same slope over the lowest fifth alone, and
  points without a ratio above 1, such as repeated ones, count in F.

Where the density holds they agree. Points whose second neighbour is far beyond their
first, such as pairs of nearly equal contexts, lower the first estimate much and the
others less, which leave most of them out. Repeated points, such as one word at the
first position, raise the last alone: at layer 1 of gpt2-docs (3,000 positions) the
three are 8.9, 9.2 and 20.0, at layer 0, where most repeat, 4.2, 3.7 and 75.8.
"""

import numpy as np
import scipy.stats
from jaxtyping import Float
from numpy import ndarray

DISCARDED = 0.1  # share of the largest ratios that the linear fit leaves out, as in the paper
# public_code: against the mean norm, points nearer than this are one; ratios no larger above 1 are
# 1
_SAME = 1e-8


def log_ratios(points: Float[ndarray, "N D"]) -> Float[ndarray, " n"]:
    """Returns log μ of every distinct point, rising; the neighbours are scikit-learn's,
    Euclidean.

    Raises:
      ValueError: fewer than four distinct points.
    """
    distinct = np.unique(points.astype(np.float64), axis=0)
    if len(distinct) < 4:
        raise ValueError(
            f"{len(distinct)} distinct points: an intrinsic dimension needs four at least."
        )
    nearest, second = _neighbours(distinct)
    return np.sort(np.log(second / nearest))


def maximum_likelihood(ratios: Float[ndarray, " n"]) -> tuple[float, float, float]:
    """Returns the dimension with its exact 95 % interval under the density above,
    `(value, low, high)`.

    High dimensions are underestimated where there are few points.

    Args:
      ratios: as `log_ratios` gives them.

    Raises:
      ValueError: every point's two neighbours are equally far.
    """
    n, total = len(ratios), float(ratios.sum())
    _check_spread(total)
    low, high = scipy.stats.gamma.ppf([0.025, 0.975], n) / total
    return (n - 1) / total, float(low), float(high)


def linear_fit(ratios: Float[ndarray, " n"]) -> float:
    """Returns the slope through the origin of `−log(1 − F)` over the ratios but for the
    largest tenth. It has no interval: neighbouring points of a distribution function
    are not independent.

    Args:
      ratios: as `log_ratios` gives them.

    Raises:
      ValueError: the two neighbours of all points that are left are equally far.
    """
    n = len(ratios)
    kept = ratios[: int(n * (1 - DISCARDED))]
    share = np.arange(1, len(kept) + 1) / n
    _check_spread(float(kept @ kept))
    return float(kept @ -np.log1p(-share) / (kept @ kept))


def public_code(points: Float[ndarray, "N D"]) -> float:
    """Returns the slope of the fit to the lowest fifth of the ratios, repeated points
    counted in F.

    Raises:
      ValueError: fewer than five points have a second neighbour farther than their
        first.
    """
    wide = points.astype(np.float64)
    N = len(wide)
    if N < 3:
        raise ValueError(f"{N} points: an intrinsic dimension by public_code needs five at least.")
    nearest, second = _neighbours(wide)
    apart = nearest >= _SAME * np.linalg.norm(wide - wide.mean(0), axis=1).mean()
    apart &= second > (1 + _SAME) * nearest
    ratios = np.sort(np.log(second[apart] / nearest[apart]))
    if len(ratios) < 5:
        raise ValueError(
            f"{len(ratios)} of {N} points have a second neighbour farther than their first: an "
            "intrinsic dimension by public_code needs five at least."
        )
    kept = ratios[: len(ratios) // 5]
    share = (N - len(ratios) + np.arange(1, len(kept) + 1)) / N
    return float(kept @ -np.log1p(-share) / (kept @ kept))


def _neighbours(points: Float[ndarray, "N D"]) -> tuple[Float[ndarray, " N"], Float[ndarray, " N"]]:
    """Returns the distances to the nearest and to the second nearest other point."""
    from sklearn.neighbors import NearestNeighbors

    nearest, second = NearestNeighbors(n_neighbors=2).fit(points).kneighbors()[0].T
    return nearest, second


def _check_spread(total: float) -> None:
    if not total > 0:
        raise ValueError(
            "every point's two nearest neighbours are equally far: there is no dimension to tell."
        )
