"""Holds the claims of both papers, and decides by a fixed rule which of them a model bears out.

Din et al. 2023: arXiv 2303.09435. Razzhigaev et al. 2024: arXiv 2405.12250. A rule reads nothing but rows of results,
so that everybody can check it. Where a figure that it needs is missing, the claim is not tested.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from jmat.report.tables import Row

HOLDS, DOES_NOT_HOLD, NOT_TESTED = "holds", "does not hold", "not tested"
DIN, RAZZHIGAEV = "Din et al. 2023", "Razzhigaev et al. 2024"
_EARLY = {"precision@1": 0.28, "precision@5": 0.52, "precision@10": 0.62}  # lowest published figures of early layers
_POINTS = {True: 15.0, False: 17.0}  # published advantage of the map, of causal and of masked models
_NEARLY_LINEAR = 0.99
_UNHARMED = 1.05  # times the whole model's perplexity


class Subject(NamedTuple):
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


class Claim(NamedTuple):
    """Holds a claim of a paper.

    Attributes:
      paper: its authors and year.
      statement: what it claims.
      published: its own figures.
      rule: when the claim holds here.
      decide: returns whether it does, and the figures here; raises NotTestedError.
    """

    paper: str
    statement: str
    published: str
    rule: str
    decide: Callable[[Subject], tuple[bool, str]]


class Verdict(NamedTuple):
    """Holds what became of a claim: `holds`, `does not hold` or `not tested`, and the figures that decide it."""

    paper: str
    statement: str
    published: str
    rule: str
    verdict: str
    figures: str


def verdicts(subject: Subject) -> list[Verdict]:
    """Returns the verdict on every claim."""
    decided = []
    for claim in CLAIMS:
        try:
            holds, figures = claim.decide(subject)
            verdict = HOLDS if holds else DOES_NOT_HOLD
        except NotTestedError as reason:
            verdict, figures = NOT_TESTED, str(reason)
        decided.append(Verdict(*claim[:-1], verdict, figures))
    return decided


def _rows(subject: Subject, study: str, **fields: object) -> list[Row]:
    """Returns the rows of a study whose fields have these values. Raises NotTestedError where one has no value."""
    if study not in subject.rows:
        raise NotTestedError(f"There are no results of {study}.")
    found = [row for row in subject.rows[study] if all(row.get(key) == value for key, value in fields.items())]
    if not found:
        words = ", ".join(f"{key} {value}" for key, value in fields.items())
        raise NotTestedError(f"{study} has no row with {words}.")
    if missing := [row for row in found if row["value"] is None]:
        raise NotTestedError(f"{study} has {len(missing)} of {len(found)} such figures without a value.")
    return found


def _by_layer(subject: Subject, study: str, kind: str, metric: str) -> dict[int, Row]:
    """Returns the rows of one map and metric by layer, 0 .. L − 1: at L every map is the identity."""
    found = _rows(subject, study, map=kind, metric=metric)
    return {row["layer"]: row for row in found if row["layer"] < subject.layers}


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


def _map_is_better(subject: Subject) -> tuple[bool, str]:
    mat, lens = (_by_layer(subject, "layer_jump", kind, "precision@1") for kind in ("mat", "id"))
    better = [layer for layer in mat if _apart(mat[layer], lens[layer])]
    return 2 * len(better) > len(mat), (
        f"Intervals are apart at {len(better)} of {len(mat)} layers; precision@1 of the map is "
        f"{_span(row['value'] for row in mat.values())}, of the logit lens {_span(r['value'] for r in lens.values())}."
    )


def _map_is_much_better(subject: Subject) -> tuple[bool, str]:
    mat, lens = (_by_layer(subject, "layer_jump", kind, "precision@1") for kind in ("mat", "id"))
    points = [100 * (mat[layer]["value"] - lens[layer]["value"]) for layer in mat]
    mean, enough = sum(points) / len(points), [p for p in points if p >= _POINTS[subject.causal]]
    figures = f"The differences are {_span(points, 1)} points, {mean:.1f} on average"
    if not subject.causal:
        return mean > _POINTS[False], f"{figures}."
    return 2 * len(enough) > len(points), f"{figures}; {len(enough)} of {len(points)} layers have 15 or more."


def _early_layers(subject: Subject) -> tuple[bool, str]:
    if not subject.causal:
        raise NotTestedError("The published figures are of GPT-2, and this is a masked model.")
    layers = range(1, subject.layers // 2 + 1)
    if not layers:
        raise NotTestedError("The model has a single block.")
    values = {}
    for metric in _EARLY:
        by_layer = _by_layer(subject, "layer_jump", "mat", metric)
        values[metric] = [by_layer[layer]["value"] for layer in layers]
    words = "; ".join(f"{metric} {_span(each)}" for metric, each in values.items())
    return all(min(values[metric]) >= low for metric, low in _EARLY.items()), (f"At layers 1 to {layers[-1]}: {words}.")


def _map_explains_more(subject: Subject) -> tuple[bool, str]:
    mat, lens = (
        {(row["layer"], row["target"]): row for row in _rows(subject, "r2", map=kind, metric="r2")}
        for kind in ("mat", "id")
    )
    better = [pair for pair in mat if _apart(mat[pair], lens[pair])]
    return len(better) == len(mat), (
        f"Intervals are apart for {len(better)} of {len(mat)} pairs; r2 of the map is "
        f"{_span(row['value'] for row in mat.values())}, of the identity {_span(r['value'] for r in lens.values())}."
    )


def _exits_save_more(subject: Subject) -> tuple[bool, str]:
    def saved(kind: str) -> Row:
        return _rows(subject, "early_exit", map=kind, confidence="gap", metric="layers_saved@0.95")[0]

    mat, lens, difference = saved("mat"), saved("id"), saved("mat - id")
    return difference.get("low", 0.0) > 0, (
        f"Share of the blocks saved: map {interval(mat)}, logit lens {interval(lens)}; difference "
        f"{interval(difference)}."
    )


def _attention_is_most_linear(subject: Subject) -> tuple[bool, str]:
    means = {}
    for kind in ("mat_attn", "mat_ffn", "mat_ln1_ln2"):
        values = [row["value"] for row in _by_layer(subject, "submodule_ablation", kind, "precision@1").values()]
        means[kind] = sum(values) / len(values)
    attention, feed_forward, norms = means.values()
    return attention > max(feed_forward, norms), (
        f"Mean precision@1: attention {attention:.3f}, feed-forward {feed_forward:.3f}, layer norms {norms:.3f}."
    )


def _steps(subject: Subject, metric: str) -> list[Row]:
    """Returns the rows of the steps from each layer to the next."""
    return [row for row in _rows(subject, "linearity", map="mat", metric=metric) if row["target"] == row["layer"] + 1]


def _steps_are_linear(subject: Subject) -> tuple[bool, str]:
    here, held_out = (
        [row["value"] for row in _steps(subject, metric)] for metric in ("linearity", "linearity_held_out")
    )
    mean = sum(here) / len(here)
    return mean >= _NEARLY_LINEAR, (
        f"In sample {mean:.3f} on average ({_span(here, 3)}); held out {sum(held_out) / len(held_out):.3f} "
        f"({_span(held_out, 3)})."
    )


def _residual_makes_linear(subject: Subject) -> tuple[bool, str]:
    whole, without = (
        _steps(subject, metric) for metric in ("linearity_held_out", "linearity_without_residual_held_out")
    )
    lower = [a for a, b in zip(whole, without, strict=True) if _apart(a, b)]
    return len(lower) == len(whole), (
        f"Lower at {len(lower)} of {len(whole)} steps; held out with the residual "
        f"{_span((row['value'] for row in whole), 3)}, without {_span((row['value'] for row in without), 3)}."
    )


def _blocks_add_little(subject: Subject) -> tuple[bool, str]:
    steps = _steps(subject, "contribution_norm")
    small = [row for row in steps if row.get("high", row["value"]) < 1]
    largest = max(steps, key=lambda row: row["value"])
    return len(small) == len(steps), (
        f"Below 1 at {len(small)} of {len(steps)} steps ({_span(row['value'] for row in steps)}; the largest is of "
        f"block {largest['layer']})."
    )


def _pruned(subject: Subject, method: str, metric: str) -> tuple[Row, Row]:
    """Returns a figure of the whole model, and that of the most pruned one."""
    if subject.score != "linearity":
        raise NotTestedError(f"Blocks were ordered by {subject.score}: run it with --score=linearity.")
    found = _rows(subject, "prune", method=method, metric=metric)
    return found[0], found[-1]


def _most_linear_can_go(subject: Subject) -> tuple[bool, str]:
    whole, mapped = _pruned(subject, "map", "perplexity")
    return mapped["value"] <= _UNHARMED * whole["value"], (
        f"Without blocks {mapped['blocks']}: perplexity {interval(mapped, 1)}, of the whole model "
        f"{interval(whole, 1)}, {100 * (mapped['value'] / whole['value'] - 1):+.1f} %."
    )


def _cheaper(subject: Subject, method: str, than: str) -> tuple[bool, str]:
    """Returns whether one method costs less KL than another for the same blocks."""
    one, other = (_pruned(subject, each, "kl")[1] for each in (method, than))
    if one["blocks"] != other["blocks"]:
        raise NotTestedError(f"{method} and {than} removed different blocks.")
    return _apart(other, one), (
        f"Without blocks {one['blocks']}, KL in nats: {method} {interval(one)}, {than} {interval(other)}."
    )


def _distillation_helps(subject: Subject) -> tuple[bool, str]:
    if not any(row.get("method") == "distil" for row in subject.rows.get("prune", ())):
        raise NotTestedError("No map was distilled: run it with --method=delete,map,distil, which takes minutes more.")
    return _cheaper(subject, "distil", "map")


def _needs(script: str, why: str) -> Callable[[Subject], tuple[bool, str]]:
    """Returns the decision on a claim that one model and one text do not decide."""

    def decide(subject: Subject) -> tuple[bool, str]:
        raise NotTestedError(f"{why}: python -m experiments.{script}.")

    return decide


CLAIMS = (
    Claim(
        DIN,
        "A linear map reads the prediction off an earlier layer better than the logit lens does.",
        "At most layers of GPT-2 and BERT.",
        "precision@1 of the map is above that of the logit lens, the intervals apart, at more than half of the layers.",
        _map_is_better,
    ),
    Claim(
        DIN,
        "The advantage of the map is large.",
        "GPT-2: 15 to 40 points of precision@1 at most layers. BERT: more than 17 points on average.",
        "Causal models: 15 points or more at more than half of the layers. Masked models: more than 17 on average.",
        _map_is_much_better,
    ),
    Claim(
        DIN,
        "Early layers already hold much of the prediction.",
        "GPT-2: precision@1 0.28 to 0.45, @5 0.52 to 0.74, @10 0.62 to 0.82.",
        "At every layer of the first half but the embedding, no figure is below the lowest published one.",
        _early_layers,
    ),
    Claim(
        DIN,
        "A linear map of a layer explains more of a later layer than the layer itself does.",
        "Heat maps of all pairs of layers.",
        "Held-out r2 of the map is above that of the identity, the intervals apart, for every pair of layers.",
        _map_explains_more,
    ),
    Claim(
        DIN,
        "Early exit by the map saves more blocks than by the logit lens, at 95 % of the accuracy.",
        "GPT-2 (24 blocks): 7.9 % of the blocks more. BERT (24 blocks): 5.4 %.",
        "The interval of the paired difference lies above 0.",
        _exits_save_more,
    ),
    Claim(
        DIN,
        "Of the sub-modules, attention bears linear replacement best.",
        "GPT-2: 2 to 4 points lost; the feed-forward part and the layer norms lose more.",
        "precision@1, averaged over the layers from which on the part is replaced, is highest for attention.",
        _attention_is_most_linear,
    ),
    Claim(
        DIN,
        "Maps fitted on one text serve on another.",
        "Wikipedia and news.",
        "Of `cross_corpus`: a map of one corpus loses little on the other.",
        _needs("cross_corpus", "It takes two corpora"),
    ),
    Claim(
        RAZZHIGAEV,
        "The step from a layer to the next is nearly linear.",
        "A score of 0.99.",
        "The in-sample score, with the residual, is at least 0.99 on average over the steps.",
        _steps_are_linear,
    ),
    Claim(
        RAZZHIGAEV,
        "Without the residual stream, the steps are less linear.",
        "Lower at the layers of all models.",
        "The held-out score without the residual is below the one with it, the intervals apart, at every step.",
        _residual_makes_linear,
    ),
    Claim(
        RAZZHIGAEV,
        "A block adds little to the stream, which makes the step linear.",
        "A low norm of the blocks' contributions.",
        "The norm of what a block adds, relative to the stream's, is below 1 at every step, its interval included.",
        _blocks_add_little,
    ),
    Claim(
        RAZZHIGAEV,
        "The most linear blocks can be replaced by linear maps at little cost.",
        "The loss hardly changes.",
        "Perplexity on held-out text rises by at most 5 % where the map replaces the blocks.",
        _most_linear_can_go,
    ),
    Claim(
        RAZZHIGAEV,
        "A linear map in the place of a block loses less than removal does.",
        "Curves of perplexity.",
        "KL to the whole model is lower with the map, the intervals apart, for the same blocks.",
        lambda subject: _cheaper(subject, "map", "delete"),
    ),
    Claim(
        RAZZHIGAEV,
        "Distillation of the maps wins back more of the loss.",
        "Curves of perplexity.",
        "KL to the whole model is lower with the distilled map, the intervals apart, for the same blocks.",
        _distillation_helps,
    ),
    Claim(
        RAZZHIGAEV,
        "A regulariser that makes steps alike in pretraining improves the model and lowers linearity.",
        "TinyStories 4.86 to 5.44, SuperGLUE 41.10 to 42.78.",
        "Of `regularizer_study`: the score rises, and linearity without the residual falls at every layer.",
        _needs("regularizer_study", "It takes pretraining"),
    ),
    Claim(
        RAZZHIGAEV,
        "Linearity falls in the course of pretraining.",
        "Checkpoints of Pythia, BLOOM, OPT and TinyLlama.",
        "Of `linearity`: the score falls from the first checkpoint to the last.",
        _needs("linearity --revisions=…", "It takes earlier checkpoints"),
    ),
    Claim(
        RAZZHIGAEV,
        "Linearity rises in fine-tuning.",
        "On all tasks.",
        "Of `linearity`: the difference to the model before fine-tuning is above 0.",
        _needs("linearity --against=…", "It takes a fine-tuned model"),
    ),
)
