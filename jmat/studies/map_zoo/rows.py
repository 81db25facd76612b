"""Makes rows of results.json from what every kind of map predicts, and costs.

Rows with a `layer` are of one map. Rows without one are of a kind: the mean over its
source layers, or the cost of all its maps. `kl_minus_mat` is the difference from `mat`
at the same examples, with its interval: it is paired.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int, Shaped
from numpy import ndarray

from jmat.maps.compact import Map
from jmat.maps.costs import map_cost
from jmat.maps.kinds import MAT, Kind
from jmat.metrics.bootstrap import bootstrap_mean, percentiles
from jmat.metrics.r2 import Resampled, varying
from jmat.report.notes import DOES_NOT_VARY, OVERFLOWS, estimate, with_note
from jmat.report.rows import Row
from jmat.studies.evaluation import METRICS
from jmat.studies.r2 import Resamples

# by kind and layer, then by metric
Values = Mapping[tuple[str, int], Mapping[str, Shaped[ndarray, " N"]]]
Scores = Mapping[tuple[str, int], Mapping[str, Float[ndarray, " S"]]]  # r2 of each resample
R2 = ("r2", "r2_weighted")
NOT_WEIGHED = "tokens are weighed in closed forms, and not in this kind"
COSTS = ("parameters", "bytes", "flops_ratio")


def difference(metric: str) -> str:
    """Returns the name of a metric less that of `mat`."""
    return f"{metric}_minus_{MAT}"


def r2_scores(
    maps: Mapping[tuple[str, int], Map], streams: Sequence[Float[ndarray, "N D"]], drawn: Resamples
) -> dict[tuple[str, int], dict[str, Float[ndarray, " S"]]]:
    """Returns r2 of every map under every resample; the first is the data itself."""
    scores, target = {}, Resampled(streams[-1], drawn.everywhere)
    for (kind, layer), stand_in in maps.items():
        predicted = np.broadcast_to(np.asarray(stand_in(streams[layer])), streams[-1].shape)
        all_scores = target.r2(predicted)
        scores[kind, layer] = {metric: all_scores[metric] for metric in R2}
    return scores


def r2_rows(
    scores: Scores, target: Float[ndarray, "N D"], drawn: Resamples, final: int
) -> list[Row]:
    """Returns rows of r2 for every map and, as a mean over layers, for every kind; and
    what they are above `mat`.
    """
    rows: list[Row] = []
    counts = drawn.everywhere[1:]
    for label, by_metric in _labelled(scores, final):
        for metric, values in by_metric.items():
            row = {**label, "metric": metric, "n": len(target)}
            if not varying(target).any():
                rows.append({**row, "value": None, "note": DOES_NOT_VARY})
            else:
                rows.append({**row, **estimate(values[0], *percentiles(values[1:], counts))})
    return rows


def paired_rows(values: Values, final: int, *, groups: Int[ndarray, " N"], seed: int) -> list[Row]:
    """Returns rows of every kind's mean over layers, and of its difference from `mat`,
    also for every layer.

    Args:
      values: of every kind and layer, example by example.
      final: L.
      groups: the sentence of each example; sentences are drawn whole.
      seed: draws the resamples, which are the same for all kinds.
    """
    numbers = {
        key: {metric: np.asarray(read[metric], np.float64) for metric in METRICS}
        for key, read in values.items()
    }
    rows: list[Row] = []
    for label, by_metric in _labelled(numbers, final):
        single = "layer" in label
        wanted = [metric for metric in by_metric if metric not in METRICS or not single]
        finite = [metric for metric in wanted if np.isfinite(by_metric[metric]).all()]
        fields: dict[str, Row] = {metric: {"value": None, "note": OVERFLOWS} for metric in wanted}
        if finite:
            columns = np.stack([by_metric[metric] for metric in finite], axis=1)
            figures = zip(*bootstrap_mean(columns, groups=groups, seed=seed), strict=True)
            fields |= {
                metric: estimate(*figure) for metric, figure in zip(finite, figures, strict=True)
            }
        rows += [
            {**label, "metric": metric, **field, "n": len(groups)}
            for metric, field in fields.items()
        ]
    return rows


def _labelled(
    values: Mapping[tuple[str, int], Mapping[str, Float[ndarray, " N"]]], final: int
) -> list[tuple[Row, dict[str, Float[ndarray, " N"]]]]:
    """Returns the values of every map and of every kind, a mean over layers, with the
    labels of their rows.

    Each has the differences from `mat`, where there is a `mat`.
    """
    kinds, layers = (
        list(dict.fromkeys(kind for kind, _ in values)),
        list(dict.fromkeys(layer for _, layer in values)),
    )
    labelled: list[tuple[Row, dict[str, Float[ndarray, " N"]]]] = []
    for layer in (*layers, None):
        mean: dict[str, dict[str, Float[ndarray, " N"]]] = {}
        for kind in kinds:
            chosen = [values[kind, each] for each in (layers if layer is None else [layer])]
            mean[kind] = {
                metric: np.mean([each[metric] for each in chosen], axis=0) for metric in chosen[0]
            }
        for kind in kinds:
            by_metric = dict(mean[kind])
            if MAT in mean and kind != MAT:
                with np.errstate(invalid="ignore"):  # infinity less infinity
                    by_metric |= {difference(m): mean[kind][m] - mean[MAT][m] for m in mean[kind]}
            label = {"map": kind, "target": final}
            labelled.append((label if layer is None else {**label, "layer": layer}, by_metric))
    return labelled


def cost_rows(
    maps: Mapping[tuple[str, int], Map],
    final: int,
    *,
    n_fit: int,
    block: float,
    seconds: Mapping[str, float],
) -> list[Row]:
    """Returns rows of what each kind costs: parameters and bytes of all its maps
    together, a map of several layers once; the work of one map for one token against
    that of one block.

    Args:
      maps: by kind and layer.
      final: L.
      n_fit: number of tokens that they were fitted on.
      block: floating-point operations of one block for one token.
      seconds: of each kind's fit for one layer; none: no rows of it.
    """
    rows: list[Row] = []
    for kind in dict.fromkeys(kind for kind, _ in maps):
        distinct = {id(stand_in): stand_in for (name, _), stand_in in maps.items() if name == kind}
        costs = [map_cost(stand_in) for stand_in in distinct.values()]
        found = {
            "parameters": sum(cost.parameters for cost in costs),
            "bytes": sum(cost.bytes for cost in costs),
            "flops_ratio": costs[0].flops / block,
        }
        if kind in seconds:
            found["fit_seconds"] = seconds[kind]
        rows += [
            {"map": kind, "target": final, "metric": m, "value": v, "n": n_fit}
            for m, v in found.items()
        ]
    return rows


def with_weights(rows: Sequence[Row], kinds: Iterable[Kind]) -> list[Row]:
    """Returns the rows, with a note on those of kinds that do not weigh tokens."""
    without = {str(kind) for kind in kinds if kind.entry.train or kind.entry.derive}
    return [with_note(row, NOT_WEIGHED if row["map"] in without else None) for row in rows]


def front(rows: Sequence[Row]) -> list[str]:
    """Returns the kinds that no other beats in both bytes and KL, from the smallest to
    the largest.
    """
    kl, held = (
        {row["map"]: row["value"] for row in rows if row["metric"] == metric and "layer" not in row}
        for metric in ("kl", "bytes")
    )
    order = sorted(
        (kind for kind in held if kl.get(kind) is not None), key=lambda kind: (held[kind], kl[kind])
    )
    best: list[str] = []
    for kind in order:
        if not best or kl[kind] < kl[best[-1]]:
            best.append(kind)
    return best
