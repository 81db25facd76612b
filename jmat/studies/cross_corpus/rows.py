"""Do linear shortcuts travel? Maps to the final layer, fitted on some examples of one
corpus, evaluated on another.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from jmat.maps.compact import Map
from jmat.maps.kinds import MAT
from jmat.maps.least_squares import checked, factorise_each
from jmat.maps.types import Identity, Linear
from jmat.metrics.predictions import Predictions
from jmat.metrics.r2 import r2_score, varying
from jmat.models.family import Transformer
from jmat.models.sites import Site
from jmat.report.notes import DOES_NOT_VARY, OVERFLOWS, noted
from jmat.report.rows import Row
from jmat.runtime.progress import track
from jmat.studies.cross_corpus.means import KL, mean_rows
from jmat.studies.evaluation import evaluate, metric_rows

METRICS = ("precision@1", "precision@5", "precision@10", "surprisal", "r2")
SIZES = (250, 500, 1000, 2000, 4000, 8000)

# layer → h_layer at the same examples; the last is h_L
Streams = Mapping[int, Float[ndarray, "N D"]]


@dataclasses.dataclass(frozen=True)
class Fit:
    """Holds maps from every source layer to the final one, with where they come from."""

    corpus: str
    n: int
    maps: Mapping[int, Map]
    problem: str  # how a fit was not determined by its examples; empty if all were
    kind: str = MAT


def check_sizes(sizes: Sequence[int], available: int) -> list[int]:
    """Returns the numbers of examples to fit on, rising; by default those of `SIZES`
    that there are, and all there are.

    Raises:
      ValueError: a number below 1 or above `available`, the fit examples of the
        smallest corpus.
    """
    if wrong := [size for size in sizes if not 1 <= size <= available]:
        raise ValueError(
            f"sizes has {wrong[0]}; expected 1 to {available}, the fit examples of the smallest "
            "corpus."
        )
    return sorted({*sizes}) or [*(size for size in SIZES if size < available), available]


def fit_sizes(
    corpus: str,
    streams: Streams,
    sizes: Iterable[int],
    *,
    intercept: bool = False,
    seed: int = 0,
    progress: str | None = None,
) -> list[Fit]:
    """Fits `mat` from every layer to the last, from so many examples each; the fewer
    are among the more.
    """
    final = max(streams)
    order = np.random.default_rng(seed).permutation(len(streams[final]))
    layers, fits = sorted(streams.keys() - {final}), []
    for n in track(list(sizes), progress):
        chosen = order[:n]
        maps, problem, target = {}, "", checked("Y", streams[final][chosen])
        sources = factorise_each([streams[layer][chosen] for layer in layers], intercept=intercept)
        for layer, source in zip(layers, sources, strict=True):
            solution = source.solve(target, residual=False)
            maps[layer] = Linear(solution.weights, solution.bias)
            if not problem and int(solution.rank) < solution.weights.shape[0]:
                problem = f"layer {layer}: {solution.describe()}"
        fits.append(Fit(corpus, n, maps, problem))
    return fits


def cross_rows(
    model: Transformer,
    fits: Sequence[Fit],
    corpus: str,
    held_out: Streams,
    *,
    groups: Int[ndarray, " N"] | None = None,
    seed: int = 0,
    several: bool = False,
    progress: str | None = None,
) -> list[Row]:
    """Evaluates all fits, and `id`, on one corpus: rows of results.json with
    `fit_corpus`, `eval_corpus` and `n_fit`.

    Intervals are over examples, or whole `groups` of them. `fit_corpus` is null and
    `n_fit` 0 for `id`, which nothing is fitted for. The full model's predictions are
    computed once for all of them. With `several` kinds there are also rows of KL, and
    those of `jmat.studies.cross_corpus.means.mean_rows`.
    """
    final = max(held_out)
    layers = sorted(held_out.keys() - {final})
    labels: dict[str, Row] = {
        "id": {"fit_corpus": None, "eval_corpus": corpus, "n_fit": 0, "map": "id"}
    }
    shortcuts: dict[tuple[str, int], tuple[Site, ndarray]] = {
        ("id", layer): (Identity(), held_out[layer]) for layer in layers
    }
    for number, fit in enumerate(fits):
        key = f"{fit.kind} {number}"
        labels[key] = {
            "fit_corpus": fit.corpus,
            "eval_corpus": corpus,
            "n_fit": fit.n,
            "map": fit.kind,
        }
        shortcuts |= {(key, layer): (fit.maps[layer], held_out[layer]) for layer in layers}
    predictions, metrics = Predictions(), (*METRICS, KL) if several else METRICS
    values = evaluate(model, held_out[final], shortcuts, predictions=predictions, progress=progress)
    rows: list[Row] = [
        {**labels[row["map"]], **{name: value for name, value in row.items() if name != "map"}}
        for row in noted(metric_rows(values, final, groups=groups, seed=seed), predictions.note())
        if row["metric"] in metrics
    ]
    target = held_out[final]
    constant = not varying(target).any()
    for (key, layer), (shortcut, stream) in shortcuts.items():
        row = {**labels[key], "layer": layer, "target": final, "metric": "r2", "n": len(stream)}
        figure = (
            {"value": None, "note": DOES_NOT_VARY}
            if constant
            else _r2(target, np.asarray(shortcut(stream)))
        )
        rows.append({**row, **figure})
    if several:
        means = mean_rows(values, shortcuts, target, labels, groups=groups, seed=seed)
        rows += noted(means, predictions.note())
    return rows


def _r2(target: Float[ndarray, "N D"], predicted: Float[ndarray, "N D"]) -> Row:
    """Returns the fields of a row; a map that overflows has no r2."""
    if not np.isfinite(predicted).all():
        return {"value": None, "note": OVERFLOWS}
    return {"value": r2_score(target, predicted)}


def over_layers(rows: Iterable[Row]) -> list[Row]:
    """Returns the mean of every metric over the source layers, by map, fit and evaluation
    corpus: that which the rows have, with its interval, or else that of their values.

    A mean has no value where one of the layers has none.
    """
    values: dict[tuple[str | int | None, ...], list[float | None]] = {}
    given: dict[tuple[str | int | None, ...], Row] = {}
    keys = ("map", "fit_corpus", "eval_corpus", "n_fit", "metric")
    for row in rows:
        key = tuple(row[name] for name in keys)
        if "layer" in row:
            values.setdefault(key, []).append(row["value"])
        else:
            given[key] = row
    means = {
        key: None
        if None in each
        else float(np.mean([value for value in each if value is not None]))
        for key, each in values.items()
    }
    computed = {
        key: {**dict(zip(keys, key, strict=True)), "value": mean} for key, mean in means.items()
    }
    return list((computed | given).values())
