"""Draws the figures of the study from its rows."""

import pathlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from numpy import ndarray

from jmat.report.plots import draw, key, legend, line
from jmat.studies.cross_corpus.rows import over_layers

# Okabe and Ito's colours, with markers that survive a black-and-white printer.
_LOOKS = [*zip(("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"), "os^DvPX", strict=True)]


def plot_pairs(results: Mapping[str, Any], *, title: str = "") -> Figure:
    """Heat maps, a panel a metric: fit corpus down (below them `id`), evaluation corpus across, mean over the layers.

    The maps are those fitted on the most examples.
    """
    rows = over_layers(results["rows"])
    most = max(row["n_fit"] for row in rows)
    metrics = ("precision@1", "precision@10", "r2")
    across = _corpora(rows)
    down, labels = [*across, None], _labels(across)
    shown = [r for r in rows if r["n_fit"] in (0, most) and r["value"] is not None]
    found = {(r["metric"], r["fit_corpus"], r["eval_corpus"]): r["value"] for r in shown}

    def fill(figure: Figure) -> None:
        panels = figure.subplots(1, len(metrics), squeeze=False, sharey=True)[0]
        for panel, metric in zip(panels, metrics, strict=True):
            grid = np.array([[found.get((metric, a, b), np.nan) for b in across] for a in down])
            image = pair_map(panel, grid, [*labels.values(), "id"], list(labels.values()))
            panel.set(title=metric, xlabel="evaluated on")
        panels[0].set_ylabel(f"fitted on {most:,} examples of")
        figure.colorbar(image, ax=list(panels), label="mean over layers (< 0 as 0)", shrink=0.85, pad=0.02)

    side = 0.65 * len(across) + 1.0
    return draw(fill, title=title, size=(len(metrics) * side + 2.0, side + 1.3))


def pair_map(panel: Axes, grid: Float[ndarray, "A B"], down: Sequence[str], across: Sequence[str]) -> AxesImage:
    """Shares in colour and digits."""
    panel.grid(False)
    panel.spines[:].set_visible(False)
    image = panel.imshow(np.clip(grid, 0, 1), cmap="viridis", vmin=0, vmax=1, aspect="equal")
    panel.set_xticks(range(len(across)), across, rotation=30, ha="right", rotation_mode="anchor")
    panel.set_yticks(range(len(down)), down)
    panel.tick_params(length=0)
    for i, j in np.argwhere(np.isfinite(grid)):
        shade = "black" if grid[i, j] > 0.6 else "white"
        text = f"{grid[i, j]:.2f}".replace("-", "−") if grid[i, j] > -10 else "< −10"
        panel.text(j, i, text, ha="center", va="center", color=shade, fontsize=8)
    return image


def plot_learning_curve(results: Mapping[str, Any], *, title: str = "") -> Figure:
    """A row of panels an evaluation corpus, a panel a metric, a line a fit corpus: means over layers, over examples."""
    rows = [row for row in over_layers(results["rows"]) if row["value"] is not None]
    corpora = _corpora(rows)
    labels = _labels(corpora)
    metrics = {"precision@1": "precision@1", "surprisal": "surprisal, nats", "r2": "r2, cut off at −1"}
    sizes = sorted({row["n_fit"] for row in rows if row["n_fit"]})
    ticks = [n for n, after in zip(sizes, [*sizes[1:], np.inf], strict=True) if after >= 1.5 * n]
    looks = {name: _LOOKS[k % len(_LOOKS)] for k, name in enumerate(corpora)}

    def fill(figure: Figure) -> None:
        panels = figure.subplots(len(corpora), len(metrics), squeeze=False, sharex=True, sharey="col")
        for across, evaluated in zip(panels, corpora, strict=True):
            across[0].set_ylabel(f"on {labels[evaluated]}")
            for panel, metric in zip(across, metrics, strict=True):
                mine = [r for r in rows if r["eval_corpus"] == evaluated and r["metric"] == metric]
                for name, look in looks.items():
                    curve = sorted((r for r in mine if r["fit_corpus"] == name), key=lambda row: row["n_fit"])
                    line(panel, [r["n_fit"] for r in curve], curve, look)
                for row in (r for r in mine if r["map"] == "id"):
                    panel.axhline(row["value"], color="0.5", linestyle=":")
        for panel, label in zip(panels[0], metrics.values(), strict=True):
            panel.set_title(label)
        for panel in panels[-1]:
            panel.set(xscale="log", xlabel="examples fitted on")
            panel.set_xticks(ticks, [f"{n:,}" for n in ticks])
            panel.minorticks_off()
        panels[0, 2].set_ylim(bottom=max(panels[0, 2].get_ylim()[0], -1))
        dotted = Line2D([], [], color="0.5", linestyle=":", label="id")
        legend(figure, [*(key(f"fitted on {labels[name]}", look) for name, look in looks.items()), dotted])

    return draw(fill, title=title, size=(8.8, 2.1 * len(corpora) + 0.9))


def _corpora(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["eval_corpus"] for row in rows))


def _labels(corpora: Iterable[str]) -> dict[str, str]:
    """Files' names for figures: without their folders, unless two are alike."""
    names = {corpus: pathlib.PurePath(corpus).name for corpus in corpora}
    alike = Counter(names.values())
    return {corpus: name if alike[name] == 1 else corpus for corpus, name in names.items()}
