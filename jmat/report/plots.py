"""Draws figures from results.json alone, so that they can be drawn again without the
model.

    results = read_results("runs/layer_jump-gpt2")
    figure = plot_by_layer(results, ("precision@1", "surprisal"), width="page")
    save_figure(figure, "figure.pdf")

Every plot function takes `title`, `width`, `ax` and `panel`: see
`jmat.report.drawing.Drawing`.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

from jmat.report.axes import is_share, layer_axis, metric_axis, pair_axes
from jmat.report.compare import compare as compare
from jmat.report.drawing import Drawing, Layout, Look, Panel, Picture, draw, key, line
from jmat.report.names import MAPS, STREAMS, metric_name, readable
from jmat.report.rows import Content, Row
from jmat.report.saving import save_figure as save_figure
from jmat.runtime.errors import NothingToDrawError

# A map looks the same in every figure. The colours are Okabe and Ito's, which colour-blind readers
# can tell apart; the markers also survive a black-and-white printer.
_LOOKS: dict[str, Look] = {
    "mat": ("#0072B2", "o"),
    "id": ("#D55E00", "s"),
    "mat_attn": ("#009E73", "^"),
    "mat_ffn": ("#CC79A7", "D"),
    "mat_ln1_ln2": ("#E69F00", "v"),
}
_SPARE_COLOURS = (
    "#56B4E9",
    "#000000",
    "#999999",
    "#882255",
    "#44AA99",
    "#332288",
    "#DDCC77",
    "#117733",
)
_SPARE_MARKERS = ("P", "X", "<", ">", "*", "h", "p")
# Confidence of an early exit → the key of a row's setting, line style, and its words in the legend.
_EXITS: dict[str, tuple[str, Literal["-", "--", ":"], str]] = {
    "gap": ("lambda", "-", "dynamic exit"),
    "gap_cheap": ("lambda_cheap", "--", "dynamic, cheap check"),
    "fixed": ("layer", ":", "fixed exit"),
}
_COSTS = {"layers": "mean blocks run", "flops_ratio": "FLOPs, as a share of the full pass"}
_LEVEL = 0.95


def plot_layer_jump(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws what `mat` and `id` predict from every layer: precision@1, @5, @10 and
    surprisal.
    """
    return plot_by_layer(
        results, ("precision@1", "precision@5", "precision@10", "surprisal"), **drawing
    )


def plot_by_layer(
    results: Content,
    metrics: Sequence[str],
    *,
    names: Mapping[str, str] = MAPS,
    **drawing: Unpack[Drawing],
) -> Figure:
    """Draws one panel a metric: source layer 0..L across, one line a map, with its
    interval as a band.

    Rows with a `layer` and a `target` are drawn; those of single heads (`mat_head.3`)
    are left out.

    Args:
      results: what results.json holds.
      metrics: names of the panels.
      names: code name of a map → its words in the legend.
      drawing: see `Drawing`.

    Raises:
      NothingToDrawError: there is nothing to draw for a metric.
    """
    rows = [
        row
        for row in results["rows"]
        if {"layer", "target"} <= row.keys() and "_head." not in row["map"]
    ]
    rows = [row for row in rows if row["metric"] in metrics and row["value"] is not None]
    missing = set(metrics) - {row["metric"] for row in rows}
    if missing or not metrics:
        raise NothingToDrawError(
            f"no rows by layer for {', '.join(sorted(missing)) or 'no metrics'}: nothing to draw"
        )
    looks = map_looks(rows)
    panels = {metric: _layer_panel(metric, rows, looks, names) for metric in metrics}
    return draw(panels, **drawing)


def _layer_panel(
    metric: str, rows: Sequence[Row], looks: Mapping[str, Look], names: Mapping[str, str]
) -> Panel:
    def fill(panel: Axes) -> None:
        for name, look in looks.items():
            mine = [row for row in rows if (row["map"], row["metric"]) == (name, metric)]
            mine.sort(key=lambda row: row["layer"])
            line(panel, [row["layer"] for row in mine], mine, look)
        panel.set(title=metric_name(metric), xlabel="layer")
        layer_axis(panel)
        panel.margins(x=0.03)
        metric_axis(panel, metric)

    keys = [key(readable(name, names), look) for name, look in looks.items()]
    return Panel(fill, keys, scale="share" if is_share(metric) else "")


def plot_layer_pairs(
    results: Content,
    *,
    metric: str = "r2",
    maps: Sequence[str] = ("mat", "id"),
    **drawing: Unpack[Drawing],
) -> Figure:
    """Draws a heat map a map: source layer i down, target j across, a metric in colour
    and, if it fits, in digits.

    The panels are called as the maps.

    Args:
      results: what results.json holds.
      metric: what is drawn, `r2` or a share.
      maps: names of the maps that are drawn, in this order.
      drawing: see `Drawing`.

    Raises:
      NothingToDrawError: there is nothing to draw.
    """
    rows = [row for row in results["rows"] if row["metric"] == metric and row["map"] in maps]
    rows = [row for row in rows if row["value"] is not None and row["layer"] < row["target"]]
    if not rows:
        raise NothingToDrawError(f"no rows of {metric} for {' or '.join(maps)}: nothing to draw")
    names = [name for name in maps if any(row["map"] == name for row in rows)]
    L = max(row["target"] for row in rows)
    grids = {name: np.full((L, L), np.nan) for name in names}
    for row in rows:
        grids[row["map"]][row["layer"], row["target"] - 1] = row["value"]
    side = float(np.clip(0.4 * L, 3.0, 5.5))
    bar = metric_name(metric)
    if not metric.startswith("precision@"):
        bar += " (negative values shown as 0)"
    layout = Layout(panel=(side + 0.4, side + 0.75), narrowest=2.4, ratio=1.05, colour_bar=bar)
    return draw({name: _pair_panel(name, grid) for name, grid in grids.items()}, layout, **drawing)


def _pair_panel(name: str, grid: np.ndarray) -> Panel:
    def fill(panel: Axes) -> AxesImage:
        image = share_map(panel, grid)
        pair_axes(panel)
        panel.set(
            title=readable(name, STREAMS), xlabel="target layer $j$", ylabel="source layer $i$"
        )
        return image

    return Panel(fill, scale="layers")


def share_map(panel: Axes, grid: np.ndarray) -> AxesImage:
    """Draws numbers from 0 to 1 in colour, and in digits where they fit."""
    panel.grid(False)
    panel.spines[:].set_visible(False)
    image = panel.imshow(np.clip(grid, 0, 1), cmap="viridis", vmin=0, vmax=1, aspect="equal")
    panel.tick_params(length=0)
    figure = panel.get_figure(root=True)
    assert figure is not None
    # Room of a cell in points; axes' words and the colour bar take some of the panel.
    place = panel.get_subplotspec()
    across = 1 if place is None else place.get_gridspec().ncols
    share = 0.8 if isinstance(figure, Picture) else 0.5  # axes of others have a colour bar each
    room = share * figure.get_figwidth() / across * 72 / grid.shape[1]
    for (i, j), text in _digits(grid, room).items():
        shade = "black" if grid[i, j] > 0.6 else "white"
        panel.text(j, i, text, ha="center", va="center", color=shade, fontsize=7)
    return image


def _digits(grid: np.ndarray, room: float) -> dict[tuple[int, int], str]:
    """Returns the digits of cells that are `room` points wide: 0.41, or .41 if that is
    all that fits, or nothing.
    """
    texts = {
        (int(i), int(j)): f"{grid[i, j]:.2f}".replace("-", "−") if grid[i, j] > -10 else "< −10"
        for i, j in np.argwhere(np.isfinite(grid))
    }
    for shown in (texts, {place: text.replace("0.", ".", 1) for place, text in texts.items()}):
        if room >= 1.5 + 4.5 * max(map(len, shown.values()), default=0):
            return shown
    return {}


def plot_early_exit(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws precision@1 against mean blocks run, and against FLOPs: dynamic, cheap and
    fixed exits of `mat` and `id`.

    The panels are called `layers` and `flops_ratio`.

    Raises:
      NothingToDrawError: there is nothing to draw.
    """
    rows = [
        row
        for row in results["rows"]
        if row.get("confidence") in _EXITS and row["value"] is not None
    ]
    if not rows:
        raise NothingToDrawError("no early-exit rows: nothing to draw")
    looks = map_looks(rows, names=("mat", "id"))
    layout = Layout(panel=(4.0, 3.3), narrowest=2.4, ratio=0.68)
    return draw({across: _exit_panel(across, rows, looks) for across in _COSTS}, layout, **drawing)


def _exit_panel(across: str, rows: Sequence[Row], looks: Mapping[str, Look]) -> Panel:
    def fill(panel: Axes) -> None:
        panel.axhline(_LEVEL, color="0.6", linewidth=0.8, zorder=1)
        for confidence, (setting, style, _) in _EXITS.items():
            for name, look in looks.items():
                x, hits = _curve(
                    [row for row in rows if row["map"] == name], confidence, setting, across
                )
                line(panel, x, hits, look, linestyle=style)
        panel.set(xlabel=_COSTS[across], ylabel="precision@1", ylim=(0, 1.02))
        panel.annotate(
            "95 %",
            (0, _LEVEL),
            xycoords=("axes fraction", "data"),
            xytext=(4, -2),
            textcoords="offset points",
            color="0.4",
            fontsize=7,
            va="top",
        )

    maps = [key(readable(name), look) for name, look in looks.items()]
    occurring = {row["confidence"] for row in rows}
    styles = [
        Line2D([], [], color="0.3", linestyle=style, label=label)
        for kind, (_, style, label) in _EXITS.items()
        if kind in occurring
    ]
    return Panel(fill, [*maps, *styles], scale="precision@1")


def _curve(
    rows: Sequence[Row], confidence: str, setting: str, across: str
) -> tuple[list[float | int], list[Row]]:
    """Returns values of metric `across`, rising, and the rows of precision@1 at the
    same settings.
    """
    mine = [row for row in rows if row["confidence"] == confidence and setting in row]
    at = {row[setting]: row["value"] for row in mine if row["metric"] == across}
    hits = {row[setting]: row for row in mine if row["metric"] == "precision@1"}
    order = sorted(hits.keys() & at.keys(), key=lambda key: (at[key], key))
    return [at[key] for key in order], [hits[key] for key in order]


def map_looks(rows: Sequence[Row], names: Sequence[str] = ()) -> dict[str, Look]:
    """Returns colour and marker of every map that occurs (of `names`, if given): known
    maps first, in their order.
    """
    occurring = list(dict.fromkeys(row["map"] for row in rows if not names or row["map"] in names))
    unknown = [name for name in occurring if name not in _LOOKS]
    spare = {
        name: (_SPARE_COLOURS[k % len(_SPARE_COLOURS)], _SPARE_MARKERS[k % len(_SPARE_MARKERS)])
        for k, name in enumerate(unknown)
    }
    return {name: look for name, look in _LOOKS.items() if name in occurring} | spare
