"""Held-out r2 of maps between all pairs of layers, with bootstrap intervals."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from jmat.maps.types import Linear
from jmat.metrics.bootstrap import bootstrap_counts, percentiles
from jmat.metrics.r2 import _scores, varying
from jmat.report.notes import DOES_NOT_VARY, estimate, with_note
from jmat.runtime.progress import track


class Resamples(NamedTuple):
    """Bootstrap counts of the examples, and of those that are not at a first position; row 0 is the data itself."""

    everywhere: Float[ndarray, "S N"]
    later: Float[ndarray, "S M"]
    is_later: Bool[ndarray, " N"]


def resamples(
    positions: Int[ndarray, " N"], groups: Int[ndarray, " N"] | None = None, *, samples: int = 200, seed: int = 0
) -> Resamples:
    """Draws them once, for all pairs; `groups` of examples, the sentences, are drawn whole."""
    is_later = positions > 0
    every = np.arange(len(positions)) if groups is None else groups
    return Resamples(_counts(every, samples, seed), _counts(every[is_later], samples, seed), is_later)


def r2_rows(
    streams: Sequence[Float[ndarray, "N D"]],
    maps: Mapping[tuple[int, int], Linear],
    drawn: Resamples,
    *,
    progress: str | None = None,
) -> list[dict[str, Any]]:
    """Rows of results.json for `mat` and `id` of every pair in `maps`, on held-out streams h_0 .. h_L."""
    rows = []
    for j in track(sorted({j for _, j in maps}), progress):
        for i in sorted(i for i, target in maps if target == j):
            for name, predicted in (("mat", np.asarray(maps[i, j](streams[i]))), ("id", streams[i])):
                rows += pair_rows({"map": name, "layer": i, "target": j}, streams[j], predicted, drawn)
    return rows


def pair_rows(
    label: Mapping[str, Any], target: Float[ndarray, "N D"], predicted: Float[ndarray, "N D"], drawn: Resamples
) -> list[dict[str, Any]]:
    """Rows of one prediction.

    Metrics: `r2` (uniform mean over the coordinates, as in Din et al.), `r2_weighted` (by the coordinates' variances),
      `r2_no_outliers` (uniform, coordinates of outlying variance left out), `r2_no_first` (uniform, examples at
      position 0 left out). The value is None, with a note, where no coordinate of the target varies.
    """
    scores = _scores(target, predicted, drawn.everywhere)
    later = drawn.is_later
    if later.any():
        scores["r2_no_first"] = _scores(target[later], predicted[later], drawn.later)["r2"]
    rows = []
    for metric, values in scores.items():
        first = metric != "r2_no_first"
        row = {**label, "metric": metric, "n": len(target) if first else int(later.sum())}
        varies = varying(target if first else target[later])
        if not varies.any():
            rows.append({**row, "value": None, "note": DOES_NOT_VARY})
            continue
        ends = percentiles(values[1:], (drawn.everywhere if first else drawn.later)[1:])
        row |= estimate(values[0], *ends)
        rows.append(row if metric == "r2_weighted" else with_note(row, _constant_note(varies)))
    return rows


def _constant_note(varies: Bool[ndarray, " D"]) -> str | None:
    """Returns a note on what a uniform mean counts where some coordinates of the target do not vary."""
    constant = int((~varies).sum())
    if constant == 0:
        return None
    return (
        f"{constant} of {len(varies)} coordinates of the target do not vary: each counts 1 where it is predicted "
        "exactly, else 0, as in scikit-learn"
    )


def _counts(groups: Int[ndarray, " N"], samples: int, seed: int) -> Float[ndarray, "S N"]:
    """The data itself in row 0, then bootstrap resamples, as counts of the examples."""
    n = len(groups)
    if n == 0:
        return np.ones((1, 0))
    return np.concatenate([np.ones((1, n)), bootstrap_counts(n, groups=groups, samples=samples, seed=seed)])
