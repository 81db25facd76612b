"""Bootstrap intervals over examples, or over whole sentences of them. Everything is
numpy, in float64.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Array, Float, Int

# Resamples are drawn in chunks of about this many counts (16 MB).
_CHUNK = 2_000_000


def bootstrap_mean(
    values: Float[Array | np.ndarray, "N *M"],
    *,
    groups: Int[np.ndarray, " N"] | None = None,
    confidence: float = 0.95,
    samples: int = 1000,
    seed: int = 0,
) -> tuple[Float[np.ndarray, "*M"], Float[np.ndarray, "*M"], Float[np.ndarray, "*M"]]:
    """Returns the mean over the examples with its percentile bootstrap interval:
    `(mean, low, high)`, in float64.

    All columns are resampled together, so a difference of columns may be given as one
    more column: it is then paired. `groups` are resampled whole: the examples of one
    sentence are no independent ones. A single example, or group, has no interval: `low`
    and `high` are NaN.

    Raises ValueError if there are no examples, or a value is not finite: leaving such
    examples out would be a choice.
    """
    data = np.asarray(values, np.float64)
    if not 0 < confidence < 1 or samples < 1:
        raise ValueError(
            f"expected 0 < confidence < 1 and samples >= 1, got {confidence} and {samples}"
        )
    check_finite("values", data)
    mean = np.asarray(data.mean(axis=0))
    if len(np.unique(np.arange(len(data)) if groups is None else groups)) < 2:
        unknown = np.full_like(mean, np.nan)
        return mean, unknown, unknown
    flat = (data - mean).reshape(len(data), -1)
    chunks = _count_chunks(len(data), samples, seed, groups)
    shifts = np.concatenate([counts @ flat / counts.sum(1, keepdims=True) for counts in chunks])
    ends = mean + np.percentile(
        shifts, [50 * (1 - confidence), 50 * (1 + confidence)], axis=0
    ).reshape(2, *mean.shape)
    # a share is not below 0, not by rounding either
    low, high = np.clip(ends, data.min(axis=0), data.max(axis=0))
    return mean, np.asarray(low), np.asarray(high)


def bootstrap_counts(
    n: int, *, groups: Int[np.ndarray, " N"] | None = None, samples: int = 1000, seed: int = 0
) -> Float[np.ndarray, "S N"]:
    """Returns how often each of n examples is drawn in each resample; the same ones
    that `bootstrap_mean` uses.
    """
    return np.concatenate(list(_count_chunks(n, samples, seed, groups)))


def bootstrap_ratio(
    sums: Float[np.ndarray, " N"], counts: Float[np.ndarray, " N"], drawn: Float[np.ndarray, "S N"]
) -> tuple[float, float, float]:
    """Returns `Σ sums / Σ counts` with its 95 % interval, `(value, low, high)`: a mean
    over parts of unequal sizes.

    `drawn` says how often each part is drawn (`bootstrap_counts`). A single part has no
    interval: NaN.
    """
    low, high = percentiles((drawn @ sums) / (drawn @ counts), drawn)
    return float(sums.sum() / counts.sum()), low, high


def percentiles(
    values: Float[np.ndarray, " S"], drawn: Float[np.ndarray, "S _"]
) -> tuple[float, float]:
    """Returns the ends of the 95 % interval of a figure under bootstrap resamples.

    NaN where there is nothing to resample, all draws being of one sentence, and where
    the figure is not finite under some resample.
    """
    # Row by row, since the first one that differs settles it: `drawn` has millions of numbers.
    if not np.isfinite(values).all() or all(np.array_equal(row, drawn[0]) for row in drawn):
        return float("nan"), float("nan")
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def _count_chunks(
    n: int, samples: int, seed: int, groups: Int[np.ndarray, " N"] | None
) -> Iterator[Float[np.ndarray, "S N"]]:
    rng = np.random.default_rng(seed)
    group = np.arange(n) if groups is None else np.unique(groups, return_inverse=True)[1]
    drawn = int(group.max()) + 1
    size = max(1, _CHUNK // n)
    for start in range(0, samples, size):
        draws = [rng.integers(drawn, size=drawn) for _ in range(min(size, samples - start))]
        yield np.stack([np.bincount(draw, minlength=drawn)[group] for draw in draws]).astype(
            np.float64
        )


def check_finite(what: str, values: np.ndarray) -> None:
    """Raises ValueError where there are no values, or one is NaN or infinite; `what` is
    their name in the message.
    """
    if values.size == 0:
        raise ValueError(f"no {what} to average: at least one example is needed")
    bad = np.count_nonzero(~np.isfinite(values))
    if bad:
        raise ValueError(
            f"{bad} of {values.size} {what} are NaN or infinite: there is no mean; find out where "
            "they arise"
        )
