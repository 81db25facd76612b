"""Makes rows of results.json from what every kind of map predicts, and costs.

Rows with a `layer` are of one map. Rows without one are of a kind: the mean over all
its maps to one layer (`target`), or of one part (`site`), or the cost of these maps.
`kl_minus_mat` is the difference from `mat` at the same examples, with its interval: it
is paired.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int, Shaped
from numpy import ndarray

from jmat.maps.compact import Map
from jmat.maps.costs import map_cost
from jmat.maps.kinds import MAT, Kind
from jmat.metrics.bootstrap import percentiles
from jmat.metrics.r2 import Resampled, varying
from jmat.report.notes import DOES_NOT_VARY, estimate, with_note
from jmat.report.rows import Row
from jmat.studies.evaluation import METRICS, mean_fields
from jmat.studies.map_zoo.jumps import Jump, grouped
from jmat.studies.r2 import Resamples

# by kind and jump, then by metric
Values = Mapping[tuple[str, Jump], Mapping[str, Shaped[ndarray, " N"]]]
Scores = Mapping[tuple[str, Jump], Mapping[str, Float[ndarray, " S"]]]  # r2 of each resample
R2 = ("r2", "r2_weighted")
# of arXiv 2405.12250: the share of the target's variance, and of what is added to the source
LINEARITY = ("linearity_held_out", "linearity_without_residual_held_out")
NOT_WEIGHED = "tokens are weighed in closed forms, and not in this kind"
COSTS = ("parameters", "bytes", "flops_ratio")


def difference(metric: str) -> str:
    """Returns the name of a metric less that of `mat`."""
    return f"{metric}_minus_{MAT}"


def r2_scores(
    maps: Mapping[tuple[str, Jump], Map],
    acts: Mapping[str, Float[ndarray, "N _"]],
    drawn: Resamples,
) -> dict[tuple[str, Jump], dict[str, Float[ndarray, " S"]]]:
    """Returns r2 and linearity of every map under every resample; the first is the data
    itself. NaN where the target does not vary.

    `linearity_held_out` is `r2_weighted` by the name that it has in arXiv 2405.12250.
    `linearity_without_residual_held_out` is that of the change from source to target.
    """
    scores: dict[tuple[str, Jump], dict[str, Float[ndarray, " S"]]] = {}
    targets: dict[str, Resampled] = {}
    changes: dict[Jump, Resampled] = {}
    for (kind, jump), stand_in in maps.items():
        source, target = acts[jump.source], acts[jump.target]
        if jump.target not in targets:
            targets = {jump.target: Resampled(target, drawn.everywhere)}
        if jump not in changes:
            changes = {jump: Resampled(target - source, drawn.everywhere)}
        predicted = np.broadcast_to(np.asarray(stand_in(source)), target.shape)
        found = targets[jump.target].r2(predicted)
        change = changes[jump].r2(predicted - source)
        scores[kind, jump] = {metric: found[metric] for metric in R2} | dict(
            zip(LINEARITY, (found["r2_weighted"], change["r2_weighted"]), strict=True)
        )
    return scores


def r2_rows(
    scores: Scores, acts: Mapping[str, Float[ndarray, "N _"]], drawn: Resamples
) -> list[Row]:
    """Returns rows of r2 and linearity for every map and, as a mean over a group, for
    every kind; and what they are above `mat`.
    """
    rows: list[Row] = []
    still, counts = _still(dict.fromkeys(jump for _, jump in scores), acts), drawn.everywhere
    for label, by_metric in _labelled(scores):
        place = str({key: value for key, value in label.items() if key != "map"})
        for metric, values in by_metric.items():
            row = {**label, "metric": metric, "n": counts.shape[1]}
            if (place, metric.removesuffix(difference(""))) in still:
                rows.append({**row, "value": None, "note": DOES_NOT_VARY})
            else:
                rows.append({**row, **estimate(values[0], *percentiles(values[1:], counts[1:]))})
    return rows


def _still(
    jumps: Iterable[Jump], acts: Mapping[str, Float[ndarray, "N _"]]
) -> set[tuple[str, str]]:
    """Returns the labels of jumps and groups, as text, with the scores that they do not
    have since the target, or what is added to the source, is the same at all tokens.
    """
    found: set[tuple[str, str]] = set()
    for jump in jumps:
        source, target = acts[jump.source], acts[jump.target]
        metrics = [] if varying(target).any() else [*R2, LINEARITY[0]]
        metrics += [] if varying(target - source).any() else LINEARITY[1:]
        found |= {(str(label), m) for label in (jump.label, jump.group) for m in metrics}
    return found


def paired_rows(values: Values, *, groups: Int[ndarray, " N"], seed: int) -> list[Row]:
    """Returns rows of every kind's mean over a group of jumps, and of its difference
    from `mat`, also for every jump.

    Args:
      values: of every kind and jump, example by example.
      groups: the sentence of each example; sentences are drawn whole.
      seed: draws the resamples, which are the same for all kinds.
    """
    numbers = {
        key: {metric: np.asarray(read[metric], np.float64) for metric in METRICS}
        for key, read in values.items()
    }
    rows: list[Row] = []
    for label, by_metric in _labelled(numbers):
        single = "layer" in label
        wanted = [metric for metric in by_metric if metric not in METRICS or not single]
        fields = mean_fields({m: by_metric[m] for m in wanted}, groups=groups, seed=seed)
        rows += [
            {**label, "metric": metric, **field, "n": len(groups)}
            for metric, field in fields.items()
        ]
    return rows


def _labelled(
    values: Mapping[tuple[str, Jump], Mapping[str, Float[ndarray, " N"]]],
) -> list[tuple[Row, dict[str, Float[ndarray, " N"]]]]:
    """Returns the values of every map, and of every kind as a mean over each group of
    jumps, with the labels of their rows.

    Each has the differences from `mat`, where there is a `mat`.
    """
    by_jump: dict[Jump, dict[str, Mapping[str, Float[ndarray, " N"]]]] = {}
    for (kind, jump), by_metric in values.items():
        by_jump.setdefault(jump, {})[kind] = by_metric
    rows = [(jump.label, kinds) for jump, kinds in by_jump.items()]
    rows += [
        (
            group[0].group,
            {
                kind: {
                    metric: np.mean([by_jump[jump][kind][metric] for jump in group], axis=0)
                    for metric in by_metric
                }
                for kind, by_metric in by_jump[group[0]].items()
            },
        )
        for group in grouped(by_jump)
    ]
    labelled: list[tuple[Row, dict[str, Float[ndarray, " N"]]]] = []
    for label, kinds in rows:
        for kind, own in kinds.items():
            by_metric = dict(own)
            if MAT in kinds and kind != MAT:
                with np.errstate(invalid="ignore"):  # infinity less infinity
                    by_metric |= {difference(m): own[m] - kinds[MAT][m] for m in own}
            labelled.append(({"map": kind, **label}, by_metric))
    return labelled


def cost_rows(
    maps: Mapping[tuple[str, Jump], Map],
    *,
    n_fit: int,
    block: float,
    seconds: Mapping[str, float],
) -> list[Row]:
    """Returns rows of what each kind costs: parameters and bytes of all its maps of a
    group together, a map of several jumps once; the work of one map for one token
    against that of one block.

    Args:
      maps: by kind and jump.
      n_fit: number of tokens that they were fitted on.
      block: floating-point operations of one block for one token.
      seconds: of each kind's fit for one jump; none: no rows of it.
    """
    rows: list[Row] = []
    for group in grouped(jump for _, jump in maps):
        for kind in dict.fromkeys(kind for kind, jump in maps if jump == group[0]):
            distinct = {id(maps[kind, jump]): maps[kind, jump] for jump in group}
            costs = [map_cost(stand_in) for stand_in in distinct.values()]
            found = {
                "parameters": sum(cost.parameters for cost in costs),
                "bytes": sum(cost.bytes for cost in costs),
                "flops_ratio": costs[0].flops / block,
            }
            if kind in seconds:
                found["fit_seconds"] = seconds[kind]
            rows += [
                {"map": kind, **group[0].group, "metric": m, "value": v, "n": n_fit}
                for m, v in found.items()
            ]
    return rows


def with_weights(rows: Sequence[Row], kinds: Iterable[Kind]) -> list[Row]:
    """Returns the rows, with a note on those of kinds that do not weigh tokens."""
    without = {str(kind) for kind in kinds if kind.entry.train or kind.entry.derive}
    return [with_note(row, NOT_WEIGHED if row["map"] in without else None) for row in rows]


def rows_of_models(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns the rows of each model by its name, in their order; "" is the only model of
    rows that name none.
    """
    by_model: dict[str, list[Row]] = {}
    for row in rows:
        by_model.setdefault(row.get("model", ""), []).append(row)
    return by_model


def of_kinds(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of kinds, those without a `layer`: of maps to the last layer
    that some lead to, or of parts.
    """
    means = [row for row in rows if "layer" not in row]
    last = max((row["target"] for row in means if "target" in row), default=None)
    return [row for row in means if row.get("target") == last]


def front(rows: Sequence[Row]) -> list[str]:
    """Returns the kinds that no other beats in both bytes and KL, from the smallest to
    the largest.
    """
    kl, held = (
        {row["map"]: row["value"] for row in of_kinds(rows) if row["metric"] == metric}
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
