"""Intrinsic dimension: on a surface of how many dimensions do a layer's activations lie, however it is bent?

TwoNN (Facco et al. 2017, arXiv 1803.06992): where points are uniform between a point's first and second neighbour, the
ratio μ of their distances has the density `d μ^(−d − 1)`, whatever the embedding space.
"""

import numpy as np
import scipy.stats
from jaxtyping import Float
from numpy import ndarray


def intrinsic_dimension(points: Float[ndarray, "N D"]) -> tuple[float, float, float]:
    """The dimension with its exact 95 % interval under that density, `(value, low, high)`; equal points count once.

    The neighbours are scikit-learn's, Euclidean. High dimensions are underestimated where there are few points.

    Raises:
        ValueError: fewer than four distinct points, or all of them are equally far apart.
    """
    from sklearn.neighbors import NearestNeighbors

    distinct = np.unique(points.astype(np.float64), axis=0)
    n = len(distinct)
    if n < 4:
        raise ValueError(f"{n} distinct points: an intrinsic dimension needs four at least.")
    nearest, second = NearestNeighbors(n_neighbors=2).fit(distinct).kneighbors()[0].T
    total = float(np.log(second / nearest).sum())
    if not total > 0:
        raise ValueError("every point's two nearest neighbours are equally far: there is no dimension to tell.")
    low, high = scipy.stats.gamma.ppf([0.025, 0.975], n) / total
    return (n - 1) / total, float(low), float(high)
