"""Draws the figures of the study from its rows."""

from collections.abc import Sequence
from typing import Unpack

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jmat.maps.kinds import AFFINE, IDENTITY, MAT
from jmat.report.axes import perplexity_axis
from jmat.report.drawing import Drawing, Layout, Panel, draw, key, titled
from jmat.report.names import metric_name, model_name, readable
from jmat.report.plots import map_looks, plot_by_layer
from jmat.report.rows import Content, Row
from jmat.runtime.errors import NothingToDrawError
from jmat.studies.map_zoo.rows import front

BY_LAYER = ("kl", "precision@1", "r2")
_ALWAYS = (IDENTITY, MAT, AFFINE)


def plot_layers(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws KL, precision@1 and r2 by layer: of `id`, `mat`, `affine`, and of the kinds
    that no other beats in both bytes and KL.

    The panels are called as the metrics.
    """
    kinds = {*_ALWAYS, *front(results["rows"])}
    shown: Content = {**results, "rows": [row for row in results["rows"] if row["map"] in kinds]}
    return plot_by_layer(
        shown, BY_LAYER, **titled(drawing, f"{model_name(results)}: kinds of maps")
    )


def plot_bytes(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws KL, mean over layers, against the bytes of a kind's maps.

    A line joins the kinds that no other beats in both. A kind that takes no memory is
    a dotted line across. The panel is called `kl`.

    Raises:
      NothingToDrawError: there is nothing to draw.
    """
    rows = [row for row in results["rows"] if "layer" not in row and row["value"] is not None]
    held = {row["map"]: row["value"] for row in rows if row["metric"] == "bytes"}
    kl = {
        row["map"]: row
        for row in rows
        if row["metric"] == "kl" and row["map"] in held and row["value"] > 0
    }
    sized = [row for kind, row in kl.items() if held[kind]]
    if not sized:
        raise NothingToDrawError("no rows of KL and bytes: nothing to draw")
    looks = map_looks([*kl.values()])
    best = [row for kind in front(rows) for row in sized if row["map"] == kind]

    def across(chosen: Sequence[Row]) -> list[float | int]:
        return [held[row["map"]] for row in chosen]

    def fill(panel: Axes) -> None:
        panel.plot(across(best), [row["value"] for row in best], color="0.6", linewidth=1, zorder=1)
        for row in sized:
            colour, marker = looks[row["map"]]
            if "low" in row:
                panel.vlines(across([row]), row["low"], row["high"], color=colour, linewidth=1)
            panel.plot(
                across([row]),
                row["value"],
                color=colour,
                marker=marker,
                markersize=6,
                markeredgewidth=0,
            )
        for kind in kl.keys() - {row["map"] for row in sized}:
            panel.axhline(kl[kind]["value"], color=looks[kind][0], linestyle=":")
        panel.set(
            xscale="log",
            xlabel="bytes of all maps",
            ylabel="nats",
            title=f"{metric_name('kl')}, mean over layers",
        )
        perplexity_axis(panel)

    points = [
        key(readable(row["map"]), looks[row["map"]], linestyle="none", markersize=6)
        for row in sized
    ]
    lines = [
        key(readable(kind), (looks[kind][0], ""), linestyle=":") for kind in kl if not held[kind]
    ]
    joined = Line2D([], [], color="0.6", linewidth=1, label="no other is smaller and better")
    layout = Layout(panel=(5.2, 3.4), narrowest=2.4, ratio=0.68)
    title = f"{model_name(results)}: what a map's memory buys"
    return draw({"kl": Panel(fill, [*points, *lines, joined])}, layout, **titled(drawing, title))
