"""Decides claims of both papers by the figures of one model: a rule reads nothing but
rows of results.

A rule returns whether the claim holds, and the figures that decide; where one that it
needs is missing, the claim is not tested.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from jmat.report.rows import Row

Decision = tuple[bool, str]  # whether the claim holds, and the figures

# lowest published figures of early layers
_EARLY = {"precision@1": 0.28, "precision@5": 0.52, "precision@10": 0.62}
# published advantage of the map, of causal and of masked models
_POINTS = {True: 15.0, False: 17.0}
_NEARLY_LINEAR = 0.99
_UNHARMED = 1.05  # times the whole model's perplexity


class Evidence(NamedTuple):
    """Holds what rules read.

    Attributes:
      rows: rows of results by study.
      layers: L, the number of blocks.
      causal: whether the model predicts the next token; else it predicts masked ones.
      score: the score by which blocks were removed.
    """

    rows: Mapping[str, Sequence[Row]]
    layers: int
    causal: bool
    score: str


class NotTestedError(Exception):
    """Says why a claim is not tested here."""


def _rows(seen: Evidence, study: str, **fields: object) -> list[Row]:
    """Returns the rows of a study whose fields have these values. Raises NotTestedError
    where one has no value.
    """
    if study not in seen.rows:
        raise NotTestedError(f"There are no results of {study}.")
    found = [
        row
        for row in seen.rows[study]
        if all(row.get(key) == value for key, value in fields.items())
    ]
    if not found:
        words = ", ".join(f"{key} {value}" for key, value in fields.items())
        raise NotTestedError(f"{study} has no row with {words}.")
    if missing := [row for row in found if row["value"] is None]:
        raise NotTestedError(
            f"{study} has {len(missing)} of {len(found)} such figures without a value."
        )
    return found


def _by_layer(seen: Evidence, study: str, kind: str, metric: str) -> dict[int, Row]:
    """Returns the rows of one map and metric by layer, 0 .. L − 1: at L every map is
    the identity.
    """
    found = _rows(seen, study, map=kind, metric=metric)
    return {row["layer"]: row for row in found if row["layer"] < seen.layers}


def _apart(higher: Row, lower: Row) -> bool:
    """Returns whether one figure is above another, and their intervals do not meet."""
    if "low" not in higher or "high" not in lower:
        raise NotTestedError("There are no intervals: they take two sentences at least.")
    return bool(higher["low"] > lower["high"])


def _span(values: Iterable[float], digits: int = 2) -> str:
    """Returns the lowest and the highest of some numbers."""
    values = list(values)
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def interval(row: Row, digits: int = 3) -> str:
    """Returns the value of a row and, where it has one, its interval."""
    ends = f" [{row['low']:.{digits}f}, {row['high']:.{digits}f}]" if "low" in row else ""
    return f"{row['value']:.{digits}f}{ends}"


def map_is_better(seen: Evidence) -> Decision:
    """Decides whether the map reads predictions better than the logit lens at most
    layers.
    """
    mat, lens = (_by_layer(seen, "layer_jump", kind, "precision@1") for kind in ("mat", "id"))
    better = [layer for layer in mat if _apart(mat[layer], lens[layer])]
    return 2 * len(better) > len(mat), (
        f"Intervals are apart at {len(better)} of {len(mat)} layers; precision@1 of the map is "
        f"{_span(row['value'] for row in mat.values())}, of the logit lens "
        f"{_span(r['value'] for r in lens.values())}."
    )


def map_is_much_better(seen: Evidence) -> Decision:
    """Decides whether the advantage of the map over the logit lens is as large as
    published.
    """
    mat, lens = (_by_layer(seen, "layer_jump", kind, "precision@1") for kind in ("mat", "id"))
    points = [100 * (mat[layer]["value"] - lens[layer]["value"]) for layer in mat]
    mean, enough = sum(points) / len(points), [p for p in points if p >= _POINTS[seen.causal]]
    figures = f"The differences are {_span(points, 1)} points, {mean:.1f} on average"
    if not seen.causal:
        return mean > _POINTS[False], f"{figures}."
    return 2 * len(enough) > len(
        points
    ), f"{figures}; {len(enough)} of {len(points)} layers have 15 or more."


def early_layers(seen: Evidence) -> Decision:
    """Decides whether the first half of the layers predicts as well as published."""
    if not seen.causal:
        raise NotTestedError("The published figures are of GPT-2, and this is a masked model.")
    layers = range(1, seen.layers // 2 + 1)
    if not layers:
        raise NotTestedError("The model has a single block.")
    values = {}
    for metric in _EARLY:
        by_layer = _by_layer(seen, "layer_jump", "mat", metric)
        values[metric] = [by_layer[layer]["value"] for layer in layers]
    words = "; ".join(f"{metric} {_span(each)}" for metric, each in values.items())
    return all(min(values[metric]) >= low for metric, low in _EARLY.items()), (
        f"At layers 1 to {layers[-1]}: {words}."
    )


def map_explains_more(seen: Evidence) -> Decision:
    """Decides whether the map explains more of each later layer than the identity."""
    mat, lens = (
        {(row["layer"], row["target"]): row for row in _rows(seen, "r2", map=kind, metric="r2")}
        for kind in ("mat", "id")
    )
    better = [pair for pair in mat if _apart(mat[pair], lens[pair])]
    return len(better) == len(mat), (
        f"Intervals are apart for {len(better)} of {len(mat)} pairs; r2 of the map is "
        f"{_span(row['value'] for row in mat.values())}, of the identity "
        f"{_span(r['value'] for r in lens.values())}."
    )


def exits_save_more(seen: Evidence) -> Decision:
    """Decides whether early exit by the map saves more blocks than by the logit lens."""

    def saved(kind: str) -> Row:
        return _rows(seen, "early_exit", map=kind, confidence="gap", metric="layers_saved@0.95")[0]

    mat, lens, difference = saved("mat"), saved("id"), saved("mat - id")
    return difference.get("low", 0.0) > 0, (
        f"Share of the blocks saved: map {interval(mat)}, logit lens {interval(lens)}; difference "
        f"{interval(difference)}."
    )


def attention_is_most_linear(seen: Evidence) -> Decision:
    """Decides whether the replacement of attention costs less than that of other parts."""
    means = {}
    for kind in ("mat_attn", "mat_ffn", "mat_ln1_ln2"):
        values = [
            row["value"]
            for row in _by_layer(seen, "submodule_ablation", kind, "precision@1").values()
        ]
        means[kind] = sum(values) / len(values)
    attention, feed_forward, norms = means.values()
    return attention > max(feed_forward, norms), (
        f"Mean precision@1: attention {attention:.3f}, feed-forward {feed_forward:.3f}, layer "
        f"norms {norms:.3f}."
    )


def _steps(seen: Evidence, metric: str) -> list[Row]:
    """Returns the rows of the steps from each layer to the next."""
    return [
        row
        for row in _rows(seen, "linearity", map="mat", metric=metric)
        if row["target"] == row["layer"] + 1
    ]


def steps_are_linear(seen: Evidence) -> Decision:
    """Decides whether the steps between layers are nearly linear."""
    here, held_out = (
        [row["value"] for row in _steps(seen, metric)]
        for metric in ("linearity", "linearity_held_out")
    )
    mean = sum(here) / len(here)
    return mean >= _NEARLY_LINEAR, (
        f"In sample {mean:.3f} on average ({_span(here, 3)}); held out "
        f"{sum(held_out) / len(held_out):.3f} ({_span(held_out, 3)})."
    )


def residual_makes_linear(seen: Evidence) -> Decision:
    """Decides whether the steps are less linear without the residual stream."""
    whole, without = (
        _steps(seen, metric)
        for metric in ("linearity_held_out", "linearity_without_residual_held_out")
    )
    lower = [a for a, b in zip(whole, without, strict=True) if _apart(a, b)]
    return len(lower) == len(whole), (
        f"Lower at {len(lower)} of {len(whole)} steps; held out with the residual "
        f"{_span((row['value'] for row in whole), 3)}, without "
        f"{_span((row['value'] for row in without), 3)}."
    )


def blocks_add_little(seen: Evidence) -> Decision:
    """Decides whether what each block adds is small against the stream."""
    steps = _steps(seen, "contribution_norm")
    small = [row for row in steps if row.get("high", row["value"]) < 1]
    largest = max(steps, key=lambda row: row["value"])
    return len(small) == len(steps), (
        f"Below 1 at {len(small)} of {len(steps)} steps ({_span(row['value'] for row in steps)}; "
        f"the largest is of block {largest['layer']})."
    )


def _pruned(seen: Evidence, method: str, metric: str) -> tuple[Row, Row]:
    """Returns a figure of the whole model, and that of the most pruned one."""
    if seen.score != "linearity":
        raise NotTestedError(f"Blocks were ordered by {seen.score}: run it with --score=linearity.")
    found = _rows(seen, "prune", method=method, metric=metric)
    return found[0], found[-1]


def most_linear_can_go(seen: Evidence) -> Decision:
    """Decides whether maps in the place of the most linear blocks leave perplexity as
    it is.
    """
    whole, mapped = _pruned(seen, "map", "perplexity")
    return mapped["value"] <= _UNHARMED * whole["value"], (
        f"Without {_named(mapped)}: perplexity {interval(mapped, 1)}, of the whole model "
        f"{interval(whole, 1)}, {100 * (mapped['value'] / whole['value'] - 1):+.1f} %."
    )


def _named(row: Row) -> str:
    """Returns the removed blocks of a row in words."""
    return f"block {row['blocks']}" if str(row["blocks"]).isdigit() else f"blocks {row['blocks']}"


def cheaper(seen: Evidence, method: str, than: str) -> Decision:
    """Returns whether one method costs less KL than another for the same blocks."""
    one, other = (_pruned(seen, each, "kl")[1] for each in (method, than))
    if one["blocks"] != other["blocks"]:
        raise NotTestedError(f"{method} and {than} removed different blocks.")
    return _apart(other, one), (
        f"Without {_named(one)}, KL in nats: {method} {interval(one)}, {than} {interval(other)}."
    )


def distillation_helps(seen: Evidence) -> Decision:
    """Decides whether distilled maps cost less than fitted ones."""
    if not any(row.get("method") == "distil" for row in seen.rows.get("prune", ())):
        raise NotTestedError(
            "No map was distilled: run it with --method=delete,map,distil, which takes minutes "
            "more."
        )
    return cheaper(seen, "distil", "map")


def needs(script: str, why: str) -> Callable[[Evidence], Decision]:
    """Returns the decision on a claim that one model and one text do not decide."""

    def decide(seen: Evidence) -> Decision:
        raise NotTestedError(f"{why}: python -m experiments.{script}.")

    return decide
