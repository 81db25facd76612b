"""Figures drawn from results.json alone, so that they can be drawn again without the model.

figure = plot_by_layer(read_results("runs/layer_jump-gpt2"), ("precision@1", "surprisal"))
save_figure(figure, "figure.png")
"""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatter, MaxNLocator

from jmat.report.tables import Row
from jmat.runtime.errors import NothingToDrawError
from jmat.runtime.files import save_atomically

# A map looks the same in every figure. The colours are Okabe and Ito's, which colour-blind readers can tell apart; the
# markers also survive a black-and-white printer.
_LOOKS = {
    "mat": ("#0072B2", "o"),
    "id": ("#D55E00", "s"),
    "mat_attn": ("#009E73", "^"),
    "mat_ffn": ("#CC79A7", "D"),
    "mat_ln1_ln2": ("#E69F00", "v"),
}
_SPARE_LOOKS = (("#56B4E9", "P"), ("#000000", "X"), ("#999999", "<"), ("#882255", ">"))
_STYLE: Any = {  # matplotlib types every key of it
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.edgecolor": "0.4",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.92",
    "grid.linewidth": 0.8,
    "xtick.color": "0.3",
    "ytick.color": "0.3",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
}
# Metrics that are shares of examples: their axis is [0, 1].
_SHARES = ("precision@", "recall@")
_UNITS = {"surprisal": "nats", "kl": "nats", "cross_entropy": "nats"}


def plot_layer_jump(results: Mapping[str, Any], *, title: str = "") -> Figure:
    """Draws what `mat` and `id` predict from every layer: precision@1, @5, @10 and surprisal."""
    return plot_by_layer(results, ("precision@1", "precision@5", "precision@10", "surprisal"), title=title)


def plot_by_layer(results: Mapping[str, Any], metrics: Sequence[str], *, title: str = "") -> Figure:
    """One panel a metric: source layer 0..L across, one line a map, with its interval as a band.

    Rows with a `layer` and a `target` are drawn; those of single heads (`mat_head.3`) are left out.

    Raises NothingToDrawError if there is nothing to draw for a metric.
    """
    rows = [row for row in results["rows"] if {"layer", "target"} <= row.keys() and "_head." not in row["map"]]
    rows = [row for row in rows if row["metric"] in metrics and row["value"] is not None]
    missing = set(metrics) - {row["metric"] for row in rows}
    if missing or not metrics:
        raise NothingToDrawError(f"no rows by layer for {', '.join(sorted(missing)) or 'no metrics'}: nothing to draw")
    looks = _looks(rows)

    def fill(figure: Figure) -> None:
        panels = figure.subplots(1, len(metrics), squeeze=False)[0]
        for panel, metric in zip(panels, metrics, strict=True):
            for name, look in looks.items():
                mine = sorted(
                    (row for row in rows if (row["map"], row["metric"]) == (name, metric)), key=lambda row: row["layer"]
                )
                line(panel, [row["layer"] for row in mine], mine, look)
            panel.set(title=metric, xlabel="layer")
            count_axis(panel)
            panel.margins(x=0.03)
            _scale(panel, metric)
        for left, right, panel in zip(metrics, metrics[1:], panels[1:], strict=False):
            if left.startswith(_SHARES) and right.startswith(_SHARES):
                panel.tick_params(labelleft=False)  # the same axis as the panel before
        legend(figure, [key(name, look) for name, look in looks.items()])

    return draw(fill, title=title, size=(2.3 * len(metrics) + 0.4, 2.9))


def plot_r2(results: Mapping[str, Any], *, title: str = "", metric: str = "r2") -> Figure:
    """Heat maps side by side, one a map: source layer i down, target j across, r2 in colour and, if it fits, in digits.

    Raises NothingToDrawError if there is nothing to draw.
    """
    rows = [row for row in results["rows"] if row["metric"] == metric and row["map"] in ("mat", "id")]
    rows = [row for row in rows if row["value"] is not None]
    if not rows:
        raise NothingToDrawError(f"no rows of {metric} for mat or id: nothing to draw")
    names = [name for name in ("mat", "id") if any(row["map"] == name for row in rows)]
    L = max(row["target"] for row in rows)
    grids = {name: np.full((L, L), np.nan) for name in names}
    for row in rows:
        grids[row["map"]][row["layer"], row["target"] - 1] = row["value"]

    def fill(figure: Figure) -> None:
        panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
        for panel, (name, grid) in zip(panels, grids.items(), strict=True):
            image = _heat_map(panel, grid)
            panel.set(title=name, xlabel="target layer j")
        panels[0].set_ylabel("source layer i")
        figure.colorbar(image, ax=list(panels), label=f"{metric} (negative values shown as 0)", shrink=0.85, pad=0.02)

    side = float(np.clip(0.4 * L, 3.0, 5.5))
    return draw(fill, title=title, size=(len(names) * side + 1.2, side + 0.7))


def plot_early_exit(results: Mapping[str, Any], *, title: str = "") -> Figure:
    """Precision@1 against mean blocks run, and against FLOPs: dynamic exit, cheap check and fixed exit, `mat` and `id`.

    Raises NothingToDrawError if there is nothing to draw.
    """
    # confidence → the key of a row's setting, line style, and how it reads in the legend
    kinds: dict[str, tuple[str, Any, str]] = {
        "gap": ("lambda", "-", "dynamic exit"),
        "gap_cheap": ("lambda_cheap", "--", "dynamic, cheap check"),
        "fixed": ("layer", ":", "fixed exit"),
    }
    rows = [row for row in results["rows"] if row.get("confidence") in kinds and row["value"] is not None]
    if not rows:
        raise NothingToDrawError("no early-exit rows: nothing to draw")
    looks = _looks(rows, names=("mat", "id"))

    def fill(figure: Figure) -> None:
        panels = figure.subplots(1, 2, squeeze=False, sharey=True)[0]
        for panel, across, label in zip(
            panels, ("layers", "flops_ratio"), ("mean blocks run", "FLOPs, as a share of the full pass"), strict=True
        ):
            panel.axhline(0.95, color="0.6", linewidth=0.8, zorder=1)
            for confidence, (setting, style, _) in kinds.items():
                for name, look in looks.items():
                    x, hits = _curve([row for row in rows if row["map"] == name], confidence, setting, across)
                    line(panel, x, hits, look, linestyle=style)
            panel.set(xlabel=label, ylim=(0, 1.02))
        panels[0].set_ylabel("precision@1")
        panels[0].annotate(
            "95 %", (0, 0.95), xycoords=("axes fraction", "data"), xytext=(4, -2), textcoords="offset points",
            color="0.4", fontsize=7, va="top",
        )  # fmt: skip
        maps = [key(name, look) for name, look in looks.items()]
        found = {row["confidence"] for row in rows}
        styles = [
            Line2D([], [], color="0.3", linestyle=style, label=label)
            for kind, (_, style, label) in kinds.items()
            if kind in found
        ]
        legend(figure, [*maps, *styles])

    return draw(fill, title=title, size=(8.4, 3.7))


def _curve(rows: Sequence[Row], confidence: str, setting: str, across: str) -> tuple[list[float | int], list[Row]]:
    """Values of metric `across`, rising, and the rows of precision@1 at the same settings."""
    mine = [row for row in rows if row["confidence"] == confidence and setting in row]
    at = {row[setting]: row["value"] for row in mine if row["metric"] == across}
    hits = {row[setting]: row for row in mine if row["metric"] == "precision@1"}
    order = sorted(hits.keys() & at.keys(), key=lambda key: (at[key], key))
    return [at[key] for key in order], [hits[key] for key in order]


def draw(fill: Callable[[Figure], None], *, title: str, size: tuple[float, float]) -> Figure:
    """Returns a new figure of a size in inches, in which `fill` has drawn.

    No global state of matplotlib is changed.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        fill(figure)
        if title:
            figure.suptitle(title, fontsize=11)
    return figure


def save_figure(figure: Figure, path: str | pathlib.Path) -> None:
    """Writes a figure as PNG, whole or not at all."""

    def write(temporary: pathlib.Path) -> None:
        figure.savefig(temporary, dpi=200, format="png", bbox_inches="tight", pad_inches=0.06)

    with mpl.rc_context(_STYLE):  # ticks are made when the figure is written
        save_atomically(pathlib.Path(path), write)


def _looks(rows: Sequence[Row], names: Sequence[str] = ()) -> dict[str, tuple[str, str]]:
    """Colour and marker of every map that occurs (of `names`, if given): known maps first, in their usual order."""
    found = list(dict.fromkeys(row["map"] for row in rows if not names or row["map"] in names))
    unknown = [name for name in found if name not in _LOOKS]
    spare = {name: _SPARE_LOOKS[k % len(_SPARE_LOOKS)] for k, name in enumerate(unknown)}
    return {name: look for name, look in _LOOKS.items() if name in found} | spare


def count_axis(panel: Axes) -> None:
    """Ticks of the x axis, at whole numbers: layers, blocks."""
    panel.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=2))


def perplexity_axis(panel: Axes) -> None:
    """Makes the y axis logarithmic, with plain numbers such as 50 in place of 5 × 10¹."""
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(LogFormatter())
    panel.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))


def line(
    panel: Axes, x: Sequence[float | int], rows: Sequence[Row], look: tuple[str, str], linestyle: str = "-"
) -> None:
    """A line through the rows' values, in a band from `low` to `high` where they have them."""
    colour, marker = look
    panel.plot(x, [row["value"] for row in rows], color=colour, marker=marker, linestyle=linestyle, markeredgewidth=0)
    bounds = [(row.get("low"), row.get("high")) for row in rows]
    if rows and all(low is not None and high is not None for low, high in bounds):
        low, high = zip(*bounds, strict=True)
        panel.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)


def _scale(panel: Axes, metric: str) -> None:
    """Shares of examples lie in [0, 1]; perplexities span powers of ten; anything else starts at 0, if that is near."""
    if metric.startswith(_SHARES):
        panel.set_ylim(0, 1.02)
    elif metric == "perplexity":
        perplexity_axis(panel)
    elif 0 <= panel.dataLim.y0 < 0.5 * panel.dataLim.y1:
        panel.set_ylim(bottom=0)
    if metric in _UNITS:
        panel.set_ylabel(_UNITS[metric])


def key(name: str, look: tuple[str, str]) -> Line2D:
    """A line's sample for `legend`."""
    return Line2D([], [], color=look[0], marker=look[1], markeredgewidth=0, label=name)


def legend(figure: Figure, keys: Sequence[Line2D]) -> None:
    """One legend for all panels, below them."""
    figure.legend(handles=list(keys), loc="outside lower center", ncols=len(keys), handlelength=2.2, columnspacing=1.6)


def _heat_map(panel: Axes, grid: np.ndarray) -> AxesImage:
    """Pairs of layers: row i = 0..L−1 down, column j = 1..L across; digits where there are few enough to read."""
    L = len(grid)
    panel.grid(False)
    for side in panel.spines.values():
        side.set_visible(False)
    image = panel.imshow(np.clip(grid, 0, 1), cmap="viridis", vmin=0, vmax=1, aspect="equal")
    step = -(-L // 16)
    panel.set_xticks(range(0, L, step), [str(j + 1) for j in range(0, L, step)])
    panel.set_yticks(range(0, L, step), [str(i) for i in range(0, L, step)])
    panel.tick_params(length=0)
    if L <= 16:
        for i, j in np.argwhere(np.isfinite(grid)):
            text = f"{grid[i, j]:.2f}".replace("-", "−") if grid[i, j] > -10 else "< −10"
            shade = "black" if grid[i, j] > 0.6 else "white"
            panel.text(j, i, text, ha="center", va="center", color=shade, fontsize=6)
    return image
