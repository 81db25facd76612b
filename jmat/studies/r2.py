"""Measures how much of a later layer a linear map of an earlier one explains: held-out
r2 of all pairs of layers.

`r2` is that of Din et al. 2023: the uniform mean over the coordinates. The others weigh
them by variance, or leave out first positions or outlier coordinates.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Unpack

import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.figure import Figure
from numpy import ndarray

from jmat.capture.shared import SharedActivations
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Examples
from jmat.maps.types import Linear
from jmat.metrics.bootstrap import bootstrap_counts, percentiles
from jmat.metrics.r2 import Resampled
from jmat.models.family import Transformer
from jmat.report.drawing import Drawing, titled
from jmat.report.names import model_name
from jmat.report.notes import DOES_NOT_VARY, estimate, with_note
from jmat.report.plots import plot_layer_pairs
from jmat.report.results import Results
from jmat.report.rows import Content, Row
from jmat.report.tables import format_table
from jmat.runtime.progress import track
from jmat.studies.fitting import FitSettings, fit_layers
from jmat.studies.settings import Say, read_subject, report

FIGURE = "r2.png"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(FitSettings):
    """Holds the settings of the study."""


def run(
    model: Transformer,
    examples: Examples | Sequence[str],
    options: Options = Options(),
    *,
    tokenizer: Tokenizer | None = None,
    say: Say | None = None,
    shared: SharedActivations | None = None,
) -> Results:
    """Fits maps between all layers and measures each on held-out text. Arguments as for
    `layer_jump.run`.

    Returns:
      Rows for every pair of layers and map (`mat`, `id`), and the maps by name, such as
      `mat.3.8`.

    Raises:
      ValueError: as `jmat.studies.settings.read_subject`.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"Entry {i} holds a list of {i % 7} values." for i in range(40)]
      >>> results = jmat.studies.r2.run(model, texts, tokenizer=tokenizer)
      >>> figure, table = results.plot(), results.table()
    """
    subject = read_subject(
        model, examples, tokenizer, options, needs_head=False, say=say, shared=shared
    )
    held_out = subject.examples.eval
    maps, n = fit_layers(subject, options)
    streams = subject.streams("eval")
    drawn = resamples(held_out.positions, held_out.rows, seed=options.seed)
    rows = r2_rows(streams, maps, drawn, progress=subject.bar("evaluate"))
    named = {f"mat.{i}.{j}": linear for (i, j), linear in maps.items()}
    return report(
        "r2", subject, options, rows, maps=named, n=n, tables=table, figures={FIGURE: plot}
    )


def table(rows: Sequence[Row]) -> str:
    """Returns a table of r2 for each map: source layer down, target layer across."""
    tables = []
    for name in ("mat", "id"):
        shown = [row for row in rows if row["map"] == name and row["metric"] == "r2"]
        heading = f"r2 of {name}: layer i (down) to target j (across)"
        tables.append(
            f"{heading}\n{format_table(shown, index='layer', columns=('target',), metrics=('r2',))}"
        )
    return "\n\n".join(tables)


def plot(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws heat maps of r2, one a map."""
    return plot_layer_pairs(
        results, **titled(drawing, f"{model_name(results)}: $R^2$ of layer $j$ from layer $i$")
    )


class Resamples(NamedTuple):
    """Holds bootstrap counts of the examples, and of those that are not at a first
    position; row 0 is the data itself.
    """

    everywhere: Float[ndarray, "S N"]
    later: Float[ndarray, "S M"]
    is_later: Bool[ndarray, " N"]


def resamples(
    positions: Int[ndarray, " N"],
    groups: Int[ndarray, " N"] | None = None,
    *,
    samples: int = 200,
    seed: int = 0,
) -> Resamples:
    """Draws them once, for all pairs; `groups` of examples, the sentences, are drawn
    whole.
    """
    is_later = positions > 0
    every = np.arange(len(positions)) if groups is None else groups
    return Resamples(
        _counts(every, samples, seed), _counts(every[is_later], samples, seed), is_later
    )


def r2_rows(
    streams: Sequence[Float[ndarray, "N D"]],
    maps: Mapping[tuple[int, int], Linear],
    drawn: Resamples,
    *,
    progress: str | None = None,
) -> list[Row]:
    """Returns rows of results.json for `mat` and `id` of every pair in `maps`, on
    held-out streams h_0 .. h_L.
    """
    rows: list[Row] = []
    for j in track(sorted({j for _, j in maps}), progress):
        target = Target(streams[j], drawn)
        for i in sorted(i for i, end in maps if end == j):
            for name, predicted in (
                ("mat", np.asarray(maps[i, j](streams[i]))),
                ("id", streams[i]),
            ):
                rows += target.rows({"map": name, "layer": i, "target": j}, predicted)
    return rows


class Target:
    """Scores predictions of one site on held-out text; what all of them need of the
    site itself is computed once.
    """

    def __init__(self, values: Float[ndarray, "N D"], drawn: Resamples) -> None:
        """Takes the site's activations, and resamples of the examples."""
        self._everywhere = Resampled(values, drawn.everywhere)
        self._later = Resampled(values[drawn.is_later], drawn.later)
        self._is_later = drawn.is_later

    def rows(self, label: Row, predicted: Float[ndarray, "N D"]) -> list[Row]:
        """Returns the rows of one prediction.

        Metrics: `r2` (uniform mean over the coordinates, as in Din et al.),
          `r2_weighted` (by the coordinates' variances), `r2_no_outliers` (uniform,
          coordinates of outlying variance left out), `r2_no_first` (uniform, examples
          at position 0 left out). The value is None, with a note, where no coordinate
          of the target varies.
        """
        scores = self._everywhere.r2(predicted)
        if self._is_later.any():
            scores["r2_no_first"] = self._later.r2(predicted[self._is_later])["r2"]
        rows: list[Row] = []
        for metric, values in scores.items():
            seen = self._later if metric == "r2_no_first" else self._everywhere
            row = {**label, "metric": metric, "n": len(seen.target)}
            if not seen.varies.any():
                rows.append({**row, "value": None, "note": DOES_NOT_VARY})
                continue
            row |= estimate(values[0], *percentiles(values[1:], seen.counts[1:]))
            note = None if metric == "r2_weighted" else _constant_note(seen.varies)
            rows.append(with_note(row, note))
        return rows


def _constant_note(varies: Bool[ndarray, " D"]) -> str | None:
    """Returns a note on what a uniform mean counts where some coordinates of the target
    do not vary.
    """
    constant = int((~varies).sum())
    if constant == 0:
        return None
    return (
        f"{constant} of {len(varies)} coordinates of the target do not vary: each counts 1 where "
        "it is predicted exactly, else 0, as in scikit-learn"
    )


def _counts(groups: Int[ndarray, " N"], samples: int, seed: int) -> Float[ndarray, "S N"]:
    """Returns the data itself in row 0, then bootstrap resamples, as counts of the
    examples.
    """
    n = len(groups)
    if n == 0:
        return np.ones((1, 0))
    return np.concatenate(
        [np.ones((1, n)), bootstrap_counts(n, groups=groups, samples=samples, seed=seed)]
    )
