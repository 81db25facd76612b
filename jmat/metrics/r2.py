"""Coefficient of determination (r2) of predicted activations, also under bootstrap
resamples.
"""

import dataclasses
import functools

import numpy as np
from jaxtyping import Array, Bool, Float
from numpy import ndarray

from jmat.metrics.bootstrap import check_finite


def r2_score(
    Y: Float[Array | np.ndarray, "N D"],
    Y_hat: Float[Array | np.ndarray, "N D"],
    *,
    variance_weighted: bool = False,
) -> float:
    """Returns the coefficient of determination of each coordinate,
    `1 − Σ(y − ŷ)² / Σ(y − ȳ)²`, averaged over the D coordinates.

    The average is uniform, or weighted by the coordinates' variances in Y. As in
    scikit-learn, a coordinate that is constant in Y scores 1 where it is predicted
    exactly and 0 elsewhere, with weight 0 unless all are. In float64.

    Raises ValueError if the shapes differ, there are fewer than two examples, or a
    value is not finite.
    """
    if Y.shape != Y_hat.shape or len(Y) < 2:
        raise ValueError(
            f"expected Y and Y_hat of one shape [N, D] with N >= 2, got {Y.shape} and {Y_hat.shape}"
        )
    wide = np.asarray(Y, np.float64)
    error = np.sum(np.square(wide - np.asarray(Y_hat, np.float64)), axis=0)
    spread = np.sum(np.square(wide - wide.mean(axis=0)), axis=0)
    check_finite("coordinates' errors and variances", np.stack([error, spread]))
    # the mean of equal numbers may differ from them by rounding
    spread[wide.max(axis=0) == wide.min(axis=0)] = 0
    varies = spread > 0
    scores = np.where(varies, 1 - error / np.where(varies, spread, 1), error == 0)
    return float(np.average(scores, weights=spread if variance_weighted and varies.any() else None))


def varying(values: Float[Array | np.ndarray, "N D"]) -> Bool[np.ndarray, " D"]:
    """Returns which coordinates differ between examples, by any amount; the others have
    no R².
    """
    if len(values) == 0:
        return np.zeros(values.shape[1], bool)
    return np.asarray(values.max(axis=0) != values.min(axis=0))


# A coordinate is an outlier where its standard deviation is this many times the median
# coordinate's.
OUTLIER = 6.0


def usual_coordinates(stream: Float[ndarray, "N D"]) -> Bool[ndarray, " D"]:
    """Returns the coordinates that are not outliers (GPT-2 has a few whose spread is
    hundreds of times that of the others).
    """
    spread = stream.std(0, dtype=np.float64)
    varies = varying(stream)
    return spread <= OUTLIER * np.median(spread[varies] if varies.any() else spread)


@dataclasses.dataclass(frozen=True, eq=False)
class Resampled:
    """Holds a target and the bootstrap resamples under which predictions of it are
    scored; its own spread is found once, for all of them.

    Attributes:
      target: activations, an example a row.
      counts: how often each resample draws each example.
    """

    target: Float[ndarray, "N D"]
    counts: Float[ndarray, "S N"]

    def r2(self, predicted: Float[ndarray, "N D"]) -> dict[str, Float[ndarray, " S"]]:
        """Returns r2 under every resample: `1 − Σ (y − ŷ)² / Σ (y − mean)²`; NaN where
        no coordinate varies.
        """
        total = self._total
        error = self.counts @ np.square(self.target.astype(np.float64) - predicted)
        # As scikit-learn has it: a constant coordinate scores 1 if it is predicted exactly, else 0.
        exact = np.where(error == 0, 1.0, 0.0)
        each = np.where(total > 0, 1 - error / np.where(total > 0, total, 1), exact)
        varies, whole = (total > 0).any(1), total.sum(1)
        scores = {
            "r2": each.mean(1),
            "r2_weighted": 1 - error.sum(1) / np.where(varies, whole, 1),
            "r2_no_outliers": each[:, self._usual].mean(1),
        }
        return {metric: np.where(varies, values, np.nan) for metric, values in scores.items()}

    @functools.cached_property
    def varies(self) -> Bool[ndarray, " D"]:
        """Returns which coordinates of the target differ between examples."""
        return varying(self.target)

    @functools.cached_property
    def _total(self) -> Float[ndarray, "S D"]:
        """Returns `Σ (y − mean)²` of every resample; 0 where a coordinate is constant."""
        centred = self.target.astype(np.float64) - self.target.mean(0, dtype=np.float64)
        squares = self.counts @ np.square(centred)
        total = squares - np.square(self.counts @ centred) / self.counts.sum(1, keepdims=True)
        # The mean of equal numbers may differ from them by rounding, and so may a sum of squares
        # from that of the mean.
        return np.where(self.varies & (total > 1e-13 * squares), total, 0)

    @functools.cached_property
    def _usual(self) -> Bool[ndarray, " D"]:
        return usual_coordinates(self.target)
