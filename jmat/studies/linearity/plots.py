"""Draws the figures of the study from its rows."""

from collections.abc import Mapping, Sequence
from typing import Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from jmat.models.sites import SUBMODULES
from jmat.report.axes import layer_axis, plain_log_axis
from jmat.report.drawing import Drawing, Layout, Look, Panel, draw, key, line, titled
from jmat.report.names import PARTS, model_name, readable, short_paths
from jmat.report.plots import plot_layer_pairs
from jmat.report.rows import Content, Row
from jmat.runtime.errors import NothingToDrawError
from jmat.studies.linearity.rows import ANGLE, ERROR_BINS, GEOMETRY, next_steps, own_rows, step_rows

_SCORES = {"linearity": "with the residual", "linearity_without_residual": "without the residual"}
# The three estimators often agree: lines that lie on each other are of different breadth, the
# broadest below.
_ESTIMATORS: dict[str, tuple[str, Look, float]] = {
    "": ("steps, in sample", ("#999999", ""), 6.0),
    "_adjusted": ("steps, adjusted", ("#E69F00", ""), 3.2),
    "_held_out": ("steps, held out", ("#0072B2", "o"), 1.2),
}
# Both norms are often close to 1.
_PARTS: dict[str, tuple[Look, float]] = {
    "ln_1": (("#56B4E9", "P"), 4.5),
    "attn": (("#009E73", "^"), 1.4),
    "ln_2": (("#D55E00", "v"), 1.2),
    "ffn": (("#CC79A7", "D"), 1.4),
}
_PARTS_PANEL = "sub-modules"


def plot_linearity(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws linearity over the layers: of each step with and without the residual, and
    of the sub-modules.

    Steps have three estimators: in sample, adjusted, held out; sub-modules are held
    out. The panels are called `linearity`, `linearity_without_residual` and
    `sub-modules`.
    """
    steps, parts = (
        step_rows(results["rows"]),
        [row for row in own_rows(results["rows"]) if row["map"] in SUBMODULES],
    )
    parts = [row for row in parts if row["metric"] == "linearity_held_out"]
    shown = [
        row
        for row in steps
        if row["metric"] in {score + kind for score in _SCORES for kind in _ESTIMATORS}
    ]
    values = [row["value"] for row in (*shown, *parts) if row["value"] is not None]
    bottom = max(min(values, default=0), -1)
    limits = (bottom - 0.05 if bottom < 0 else 0, 1.02)

    def step_panel(score: str) -> Panel:
        def fill(ax: Axes) -> None:
            for kind, (_, look, breadth) in _ESTIMATORS.items():
                _by_layer(
                    ax,
                    [row for row in steps if row["metric"] == score + kind],
                    look,
                    linewidth=breadth,
                )
            ax.set(title=f"layer to layer,\n{_SCORES[score]}", ylabel="linearity", ylim=limits)

        keys = [
            key(words, look, linewidth=breadth) for words, look, breadth in _ESTIMATORS.values()
        ]
        return Panel(fill, keys, scale="linearity")

    def fill_parts(ax: Axes) -> None:
        for part, (look, breadth) in _PARTS.items():
            _by_layer(ax, [row for row in parts if row["map"] == part], look, linewidth=breadth)
        ax.set(title="sub-modules,\nheld out", ylabel="linearity", ylim=limits)

    panels = {score: step_panel(score) for score in _SCORES}
    if parts:
        part_keys = [
            key(readable(part, PARTS), look, linewidth=breadth)
            for part, (look, breadth) in _PARTS.items()
        ]
        panels[_PARTS_PANEL] = Panel(fill_parts, part_keys, scale="linearity")
    return draw(
        panels,
        Layout(panel=(2.9, 2.7), narrowest=1.6, ratio=1.05),
        **titled(drawing, model_name(results)),
    )


def plot_geometry(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws over the layers: size of a block's addition against the stream, cosine of
    neighbours, anisotropy.

    The panels are called as the metrics: `contribution_norm`, `cosine`, `anisotropy`.
    """
    rows = [
        *step_rows(results["rows"]),
        *(row for row in own_rows(results["rows"]) if row["map"] == "stream"),
    ]

    def panel(metric: str) -> Panel:
        def fill(ax: Axes) -> None:
            _by_layer(ax, [row for row in rows if row["metric"] == metric], ("#0072B2", "o"))
            ax.set_title(GEOMETRY[metric])
            if metric == "contribution_norm":
                plain_log_axis(ax)
            else:
                ax.set_ylim(min(0, ax.dataLim.y0 - 0.05), 1.02)

        return Panel(fill)

    layout = Layout(panel=(2.4, 2.5), narrowest=1.6, ratio=0.9)
    return draw(
        {metric: panel(metric) for metric in GEOMETRY},
        layout,
        **titled(drawing, model_name(results)),
    )


def plot_errors(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws histograms of the tokens' errors, a column a layer; the axis ends where the
    errors do.

    Raises:
      NothingToDrawError: there is nothing to draw.
    """
    rows = [row for row in step_rows(results["rows"]) if row["metric"] == "token_error_share"]
    edges = 10.0**ERROR_BINS
    if not rows:
        raise NothingToDrawError("no step varies: there are no errors to draw")
    grid = np.zeros((len(ERROR_BINS) - 1, 1 + max(row["layer"] for row in rows)))
    for row in rows:
        grid[np.searchsorted(edges, row["error_from"] * (1 + 1e-9)) - 1, row["layer"]] = row[
            "value"
        ]
    occupied = np.flatnonzero(grid.any(axis=1))
    ends = edges[occupied[0]], edges[occupied[-1] + 1]

    def fill(ax: Axes) -> QuadMesh:
        ax.grid(False)
        ax.set_facecolor("0.93")
        layers = np.arange(grid.shape[1] + 1) - 0.5
        shares = np.where(grid > 0, grid, np.nan)
        image = ax.pcolormesh(layers, edges, shares, cmap="viridis", norm=LogNorm(1e-4, 1))
        ax.set(xlabel="layer", ylim=ends)
        plain_log_axis(ax)
        ax.set_ylabel("squared error of a token ÷\nvariance of the target")
        layer_axis(ax)
        return image

    layout = Layout(
        panel=(4.4, 3.4), narrowest=2.5, ratio=0.7, colour_bar="share of tokens (grey: none)"
    )
    return draw({"errors": Panel(fill)}, layout, **titled(drawing, model_name(results)))


def plot_checkpoints(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws held-out linearity of each step over the checkpoints, in their order;
    darker lines are later layers.

    The panels are called `linearity` and `linearity_without_residual`.

    Raises:
      NothingToDrawError: there is nothing to draw.
    """
    panels = {
        score: (
            f"{score}_held_out",
            f"layer to layer,\n{words}",
            "linearity, held out",
        )
        for score, words in _SCORES.items()
    }
    return _over_checkpoints(results, panels, titled(drawing, model_name(results)))


def plot_jump_strength(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws the mean angle between neighbouring layers over the checkpoints, in their
    order; darker lines are later layers. The panel is called `angle`.

    Raises:
      NothingToDrawError: there is nothing to draw.
    """
    words = r"strength of jumps: angle of $h_l$ and $h_{l+1}$"
    return _over_checkpoints(
        results, {ANGLE: (ANGLE, words, "degrees")}, titled(drawing, model_name(results))
    )


def _over_checkpoints(
    results: Content, panels: Mapping[str, tuple[str, str, str]], drawing: Drawing
) -> Figure:
    """Draws metrics of each step over the checkpoints.

    `panels`: name → metric, title, words at the y axis.
    """
    names = list(
        dict.fromkeys(row.get("checkpoint") for row in results["rows"] if "against" not in row)
    )
    names.sort(key=lambda name: name is None)  # the model itself comes last
    rows = [
        row
        for row in next_steps(results["rows"])
        if "against" not in row and row["value"] is not None
    ]
    rows = [row for row in rows if row["metric"] in {metric for metric, *_ in panels.values()}]
    if not rows:
        raise NothingToDrawError("no step of any checkpoint has a value: nothing to draw")
    L = max(row["target"] for row in rows)

    def panel(metric: str, title: str, words: str) -> Panel:
        def fill(ax: Axes) -> None:
            for layer in range(L):
                mine = {
                    row.get("checkpoint"): row
                    for row in rows
                    if (row["metric"], row["layer"]) == (metric, layer)
                }
                shade = f"{0.8 * (1 - layer / max(L - 1, 1)):.3f}"
                x = [k for k, checkpoint in enumerate(names) if checkpoint in mine]
                line(ax, x, [mine[names[k]] for k in x], (shade, "o"))
            ax.set_xticks(
                range(len(names)),
                short_paths([name or "end" for name in names], least=1),
                rotation=30,
                ha="right",
                rotation_mode="anchor",
            )
            ax.set(title=title, ylabel=words)

        return Panel(fill, [key("first block", ("0.8", "o")), key("last block", ("0.0", "o"))])

    layout = Layout(panel=(3.4, 3.0), narrowest=2.2)
    return draw({name: panel(*given) for name, given in panels.items()}, layout, **drawing)


def plot_difference(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws over the layers: the model's held-out linearity minus the other's."""
    rows = next_steps(results["rows"])
    names = [
        results.get("config", {}).get("model", ""),
        *(row["against"] for row in rows if "against" in row),
    ]
    title = " − ".join(short_paths(list(dict.fromkeys(names)), least=2))
    looks = {"linearity": ("#0072B2", "o"), "linearity_without_residual": ("#D55E00", "s")}

    def fill(ax: Axes) -> None:
        ax.axhline(0, color="0.6", linewidth=0.8)
        for score, look in looks.items():
            _by_layer(
                ax, [row for row in rows if row["metric"] == f"{score}_held_out_difference"], look
            )
        ax.set_ylabel("difference of held-out linearity")

    keys = [key(_SCORES[score], look) for score, look in looks.items()]
    layout = Layout(panel=(4.4, 3.0), narrowest=2.5, ratio=0.7)
    return draw({"difference": Panel(fill, keys)}, layout, **titled(drawing, title))


def plot_pairs(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws a heat map of held-out linearity of all pairs of layers; the panel is
    called `mat`.
    """
    own: Content = {**results, "rows": own_rows(results["rows"])}
    title = f"{model_name(results)}: linearity of all pairs"
    return plot_layer_pairs(own, metric="linearity_held_out", **titled(drawing, title))


def _by_layer(panel: Axes, rows: Sequence[Row], look: Look, **style: str | float | int) -> None:
    mine = sorted((row for row in rows if row["value"] is not None), key=lambda row: row["layer"])
    line(panel, [row["layer"] for row in mine], mine, look, **style)
    panel.set_xlabel("layer")
    layer_axis(panel)
