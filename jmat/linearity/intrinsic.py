"""Intrinsic dimension: on a surface of how many dimensions do a layer's activations lie, however it is bent?

TwoNN (Facco et al. 2017, arXiv 1803.06992): where points are uniform between a point's first and second neighbour, the
ratio μ of their distances has the density `d μ^(−d − 1)`, whatever the embedding space. Two estimators of d:

- `maximum_likelihood` (ours): `(n − 1) / Σ log μ`, unbiased under that density, with an exact interval;
- `linear_fit` (that paper, and public code): the slope through the origin of `−log(1 − F)` over log μ, F being the
  share of points up to this one in the order of μ, without the largest tenth of the ratios.

Where the density holds they agree. Points whose second neighbour is far beyond their first, such as pairs of nearly
equal contexts, lower the first estimate much and the second little, which leaves most of them out.
"""

import numpy as np
import scipy.stats
from jaxtyping import Float
from numpy import ndarray

DISCARDED = 0.1  # share of the largest ratios that the linear fit leaves out, as in the paper


def log_ratios(points: Float[ndarray, "N D"]) -> Float[ndarray, " n"]:
    """Returns log μ of every distinct point, rising; the neighbours are scikit-learn's, Euclidean.

    Raises:
        ValueError: fewer than four distinct points.
    """
    from sklearn.neighbors import NearestNeighbors

    distinct = np.unique(points.astype(np.float64), axis=0)
    if len(distinct) < 4:
        raise ValueError(f"{len(distinct)} distinct points: an intrinsic dimension needs four at least.")
    nearest, second = NearestNeighbors(n_neighbors=2).fit(distinct).kneighbors()[0].T
    return np.sort(np.log(second / nearest))


def maximum_likelihood(ratios: Float[ndarray, " n"]) -> tuple[float, float, float]:
    """Returns the dimension with its exact 95 % interval under the density above, `(value, low, high)`.

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
    """Returns the slope through the origin of `−log(1 − F)` over the ratios but for the largest
    tenth. It has no interval: neighbouring points of a distribution function are not independent.

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


def _check_spread(total: float) -> None:
    if not total > 0:
        raise ValueError("every point's two nearest neighbours are equally far: there is no dimension to tell.")
