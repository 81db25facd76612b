"""Draws the figures of the study from its rows."""

import pathlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from jmat.report.drawing import Drawing, Layout, Panel, draw, key, line
from jmat.report.names import metric_name, plain, readable
from jmat.report.plots import share_map
from jmat.report.rows import Content, Row
from jmat.studies.cross_corpus.rows import over_layers

# Okabe and Ito's colours, with markers that survive a black-and-white printer.
_LOOKS = [
    *zip(
        ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"),
        "os^DvPX",
        strict=True,
    )
]

_CURVES = {
    "precision@1": "precision@1",
    "surprisal": "surprisal, nats",
    "r2": "$R^2$, cut off at −1",
}


def plot_pairs(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws heat maps, a panel a metric: fit corpus down, evaluation corpus across,
    mean over the layers.

    The logit lens, which is not fitted, stands below the corpora. The maps are those
    fitted on the most examples. The panels are called as the metrics.
    """
    rows = over_layers(results["rows"])
    metrics = ("precision@1", "precision@10", "r2")
    by_metric = {metric: [row for row in rows if row["metric"] == metric] for metric in metrics}
    return draw_pairs(
        {metric: (metric_name(metric), each) for metric, each in by_metric.items()}, **drawing
    )


def draw_pairs(
    panels: Mapping[str, tuple[str, Sequence[Row]]], **drawing: Unpack[Drawing]
) -> Figure:
    """Draws heat maps of the means of one metric each: fit corpus down, evaluation corpus
    across, maps that are fitted on the most examples.

    Args:
      panels: name → title and rows.
      drawing: see `Drawing`.
    """
    rows = [row for _, each in panels.values() for row in each]
    most = max(row["n_fit"] for row in rows)
    across = corpora_in(rows)
    down, labels = [*across, None], corpus_labels(across)

    def panel(title: str, mine: Sequence[Row]) -> Panel:
        shown = [r for r in mine if r["n_fit"] in (0, most) and r["value"] is not None]
        found = {(r["fit_corpus"], r["eval_corpus"]): r["value"] for r in shown}

        def fill(ax: Axes) -> AxesImage:
            grid = np.array([[found.get((a, b), np.nan) for b in across] for a in down])
            image = share_map(ax, grid)
            ax.set_xticks(
                range(len(across)),
                list(labels.values()),
                rotation=30,
                ha="right",
                rotation_mode="anchor",
            )
            ax.set_yticks(range(len(down)), [*labels.values(), readable("id")])
            ax.set(title=title, xlabel="evaluated on", ylabel=f"fitted on {most:,} examples of")
            return image

        return Panel(fill, scale="corpora")

    side = 0.65 * len(across) + 1.0
    layout = Layout(
        panel=(side + 0.5, side + 0.8),
        narrowest=2.0,
        ratio=1.05,
        colour_bar="mean over layers (< 0 as 0)",
    )
    return draw({name: panel(*given) for name, given in panels.items()}, layout, **drawing)


def plot_learning_curve(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws means over layers against the examples fitted on: a panel a metric and
    evaluation corpus, a line a map.

    The panels are called by metric and corpus, such as "precision@1 on docs".
    """
    rows = [row for row in over_layers(results["rows"]) if row["value"] is not None]
    corpora = corpora_in(rows)
    labels = corpus_labels(corpora)
    looks = {name: _LOOKS[k % len(_LOOKS)] for k, name in enumerate(corpora)}
    dotted = Line2D([], [], color="0.5", linestyle=":", label=readable("id"))
    keys = [*(key(f"fitted on {labels[name]}", look) for name, look in looks.items()), dotted]

    def panel(evaluated: str, metric: str) -> Panel:
        def fill(ax: Axes) -> None:
            mine = [r for r in rows if r["eval_corpus"] == evaluated and r["metric"] == metric]
            for name, look in looks.items():
                curve = sorted(
                    (r for r in mine if r["fit_corpus"] == name), key=lambda row: row["n_fit"]
                )
                line(ax, [r["n_fit"] for r in curve], curve, look)
            for row in (r for r in mine if r["map"] == "id"):
                ax.axhline(row["value"], color="0.5", linestyle=":")
            ax.set_title(f"{_CURVES[metric]}\non {labels[evaluated]}")
            size_axis(ax, rows)
            ax.set_ylim(*_limits(rows, metric))

        return Panel(fill, keys)

    panels = {
        f"{metric} on {labels[name]}": panel(name, metric) for name in corpora for metric in _CURVES
    }
    return draw(panels, curve_layout(len(_CURVES)), **drawing)


def curve_layout(columns: int) -> Layout:
    """Returns the layout of panels of curves, so many a row."""
    return Layout(panel=(2.8, 2.3), ratio=0.9, columns=columns)


def size_axis(ax: Axes, rows: Iterable[Row]) -> None:
    """Makes the x axis that of the examples fitted on, logarithmic, with a tick at each
    number that has room.
    """
    sizes = sorted({row["n_fit"] for row in rows if row["n_fit"]})
    ticks = [n for n, after in zip(sizes, [*sizes[1:], np.inf], strict=True) if after >= 1.5 * n]
    ax.set(xscale="log", xlabel="examples fitted on")
    ax.set_xticks(ticks, [f"{n:,}" for n in ticks])
    ax.xaxis.set_minor_locator(NullLocator())


def _limits(rows: Iterable[Row], metric: str) -> tuple[float, float]:
    """Returns the same ends of the y axis for all corpora; r2 is cut off at −1."""
    values = [row["value"] for row in rows if row["metric"] == metric]
    low, high = max(min(values), -1 if metric == "r2" else -np.inf), max(values)
    margin = 0.05 * (high - low) or 0.05
    return low - margin, high + margin


def corpora_in(rows: Iterable[Row]) -> list[str]:
    """Returns the corpora that rows are evaluated on."""
    return list(dict.fromkeys(row["eval_corpus"] for row in rows))


def corpus_labels(corpora: Iterable[str]) -> dict[str, str]:
    """Returns files' names for figures: without their folders, unless two are alike."""
    names = {corpus: pathlib.PurePath(corpus).name for corpus in corpora}
    alike = Counter(names.values())
    return {corpus: plain(name if alike[name] == 1 else corpus) for corpus, name in names.items()}
