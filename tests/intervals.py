"""Bootstrap intervals as one would compute them by hand: sentence by sentence, resample
by resample, in float64.
"""

from collections.abc import Callable

import numpy as np


def by_hand(
    statistic: Callable[[np.ndarray], np.ndarray | float],
    groups: np.ndarray,
    *,
    seed: int,
    samples: int = 1000,
) -> tuple[np.ndarray, np.ndarray]:
    """The 2.5th and 97.5th percentile of a statistic over resamples in which whole
    groups are drawn with replacement.

    `statistic` takes the indices of the examples of a resample, repeated as often as
    they are drawn.
    """
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    rng = np.random.default_rng(seed)
    values = []
    for _ in range(samples):
        drawn = rng.integers(len(members), size=len(members))
        values.append(statistic(np.concatenate([members[group] for group in drawn])))
    ordered = np.sort(np.asarray(values, np.float64), axis=0)
    low, high = (_quantile(ordered, share) for share in (0.025, 0.975))
    return low, high


def _quantile(ordered: np.ndarray, share: float) -> np.ndarray:
    """Between the two order statistics next to it, linearly."""
    place = share * (len(ordered) - 1)
    before = int(place)
    after = min(before + 1, len(ordered) - 1)
    return ordered[before] + (place - before) * (ordered[after] - ordered[before])
