"""Draws the figures of the study from its rows."""

import functools
from collections.abc import Mapping, Sequence
from typing import Unpack

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jmat.maps.kinds import AFFINE, IDENTITY, MAT
from jmat.report.axes import nats_axis
from jmat.report.drawing import Drawing, Layout, Look, Panel, draw, key, titled
from jmat.report.names import PARTS, metric_name, model_name, plain, readable
from jmat.report.plots import map_looks, plot_by_layer, plot_layer_pairs
from jmat.report.rows import Content, Row
from jmat.runtime.errors import NothingToDrawError
from jmat.studies.map_zoo.rows import LINEARITY, front, of_kinds, rows_of_models

BY_LAYER = ("kl", "precision@1", "r2")
BY_BLOCK = ("r2", *LINEARITY)  # of maps that nothing is predicted from
_ALWAYS = (IDENTITY, MAT, AFFINE)


def plot_layers(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws KL, precision@1 and r2 by layer: of `id`, `mat`, `affine`, and of the kinds
    that no other beats in both bytes and KL. Of maps to several layers, those to the
    last of these are drawn.

    Where there are no predictions, it draws r2 and both linearities, of all kinds. The
    panels are called as the metrics.
    """
    best = front(results["rows"])
    last = max((row["target"] for row in results["rows"] if "site" not in row), default=None)
    rows = [
        row
        for row in results["rows"]
        if (not best or row["map"] in {*_ALWAYS, *best})
        and ("site" in row or row["target"] == last)
    ]
    shown: Content = {**results, "rows": rows}
    return plot_by_layer(
        shown,
        BY_LAYER if best else BY_BLOCK,
        **titled(drawing, f"{model_name(results)}: kinds of maps{_of_part(rows)}"),
    )


def plot_pairs(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws heat maps of r2 of every pair of layers: of `id`, `mat`, `affine`, and of the
    kinds that no other beats in both bytes and KL.

    The panels are called as the kinds.
    """
    present = {row["map"] for row in results["rows"]}
    kinds = [kind for kind in dict.fromkeys((*_ALWAYS, *front(results["rows"]))) if kind in present]
    title = f"{model_name(results)}: $R^2$ of layer $j$ from layer $i$"
    return plot_layer_pairs(
        {**results, "rows": [row for row in results["rows"] if "layer" in row]},
        maps=kinds or sorted(present),
        **titled(drawing, title),
    )


def _of_part(rows: Sequence[Row]) -> str:
    """Returns the words for the part that maps stand in for; none for streams."""
    part = next((row["site"] for row in rows if "site" in row), None)
    return "" if part is None else f" for {readable(part, PARTS)}"


def plot_bytes(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws KL, mean over layers, against the bytes of a kind's maps.

    A line joins the kinds that no other beats in both. A kind that takes no memory is
    a dotted line across. The panel is called `kl`; of several models, each has one that
    is called as it.

    Raises:
      NothingToDrawError: there is nothing to draw.
    """
    by_model = rows_of_models(results["rows"])
    shown = {model: _sized(rows) for model, rows in by_model.items()}
    shown = {model: rows for model, rows in shown.items() if any(held for held, _ in rows)}
    if not shown:
        raise NothingToDrawError("no rows of KL and bytes: nothing to draw")
    looks = map_looks([row for rows in shown.values() for _, row in rows])
    memory = dict.fromkeys(row["map"] for rows in shown.values() for held, row in rows if held)
    points = [key(readable(kind), looks[kind], linestyle="none", markersize=6) for kind in memory]
    lines = [
        key(readable(kind), (looks[kind][0], ""), linestyle=":")
        for kind in looks
        if kind not in memory
    ]
    joined = Line2D([], [], color="0.6", linewidth=1, label="no other is smaller and better")
    keys = [*points, *lines, joined]
    panels = {
        model or "kl": Panel(
            functools.partial(_fill_bytes, rows, front(by_model[model]), looks, model), keys
        )
        for model, rows in shown.items()
    }
    layout = Layout(panel=(5.2, 3.4), narrowest=2.4, ratio=0.68)
    title = "what a map's memory buys"
    if "" in by_model:
        title = f"{model_name(results)}: {title}"
    return draw(panels, layout, **titled(drawing, title))


def _sized(rows: Sequence[Row]) -> list[tuple[float | int, Row]]:
    """Returns the bytes of every kind with its row of KL."""
    known = [row for row in of_kinds(rows) if row["value"] is not None]
    held = {row["map"]: row["value"] for row in known if row["metric"] == "bytes"}
    return [
        (held[row["map"]], row)
        for row in known
        if row["metric"] == "kl" and row["map"] in held and row["value"] > 0
    ]


def _fill_bytes(
    rows: Sequence[tuple[float | int, Row]],
    best: Sequence[str],
    looks: Mapping[str, Look],
    model: str,
    panel: Axes,
) -> None:
    joined = [(held, row) for kind in best for held, row in rows if held and row["map"] == kind]
    panel.plot(
        [held for held, _ in joined],
        [row["value"] for _, row in joined],
        color="0.6",
        linewidth=1,
        zorder=1,
    )
    for held, row in rows:
        colour, marker = looks[row["map"]]
        if not held:
            panel.axhline(row["value"], color=colour, linestyle=":")
            continue
        if "low" in row:
            panel.vlines([held], row["low"], row["high"], color=colour, linewidth=1)
        panel.plot(
            [held], row["value"], color=colour, marker=marker, markersize=6, markeredgewidth=0
        )
    words = f"{metric_name('kl')}, mean over layers"
    panel.set(
        xscale="log",
        xlabel="bytes of all maps",
        ylabel="nats",
        title=f"{plain(model)}: {words}" if model else words,
    )
    nats_axis(panel)
