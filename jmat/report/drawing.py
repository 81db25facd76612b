"""Draws panels into a figure of the width that a paper or a screen has, and saves it.

A figure is a dict of `Panel`s, by name. `draw` lays them out: in one row for a screen,
and in as many rows as it takes where a paper's column is narrow, so that the type is
never below 7 points.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D

from jmat.report.axes import clear_inner_labels, plain_number
from jmat.report.rows import Row
from jmat.report.saving import picture_bytes
from jmat.report.style import WIDTHS, Width, draw_style, width_in_inches

BAND = "band: 95 % interval"
_LEGEND_LINE, _TITLE_LINE = 0.18, 0.2  # inches

Look = tuple[str, str]  # colour and marker


class Drawing(TypedDict, total=False):
    """Holds what every plot function takes by keyword.

    Attributes:
      title: stands above the figure; "" for none, as papers have it; None: the
        function's own.
      width: "column" (3.25 inches), "page" (6.75) or inches; None: as wide as suits a
        screen.
      ax: axes of a figure of yours to draw into; one panel fits, see `panel`.
      panel: name of the only panel to draw, such as "precision@1"; None: all of them.
    """

    title: str | None
    width: Width
    ax: Axes | None
    panel: str | None


def titled(drawing: Drawing, title: str) -> Drawing:
    """Returns the arguments of a plot function with its own title, where none is given
    and the figure is its own.
    """
    if drawing.get("title") is not None or drawing.get("ax") is not None:
        return drawing
    return {**drawing, "title": title}


@dataclasses.dataclass(frozen=True)
class Panel:
    """Holds what one panel of a figure shows.

    Attributes:
      fill: draws into axes; returns what a colour bar explains, if there is such a
        thing.
      keys: samples of lines for the legend.
      scale: panels side by side that name the same scale share the numbers of the left
        one.
    """

    fill: Callable[[Axes], ScalarMappable | None]
    keys: Sequence[Line2D] = ()
    scale: str = ""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Holds how the panels of a figure are laid out.

    Attributes:
      panel: width and height of a panel on a screen, in inches.
      narrowest: width in inches below which panels go to the next row.
      ratio: height of a panel against its width, where a width is asked for.
      columns: most panels in a row; None: as many as fit.
      colour_bar: words beside the colour bar; "" where there is none.
    """

    panel: tuple[float, float] = (2.3, 2.5)
    narrowest: float = 1.5
    ratio: float = 0.8
    columns: int | None = None
    colour_bar: str = ""


class Picture(Figure):
    """Shows itself in notebooks, whether or not they have loaded pyplot."""

    def _repr_png_(self) -> bytes:
        return picture_bytes(self)


def draw(
    panels: Mapping[str, Panel],
    layout: Layout = Layout(),
    *,
    title: str | None = None,
    width: Width = None,
    ax: Axes | None = None,
    panel: str | None = None,
) -> Figure:
    """Returns a figure with panels, a legend below them, and a title above; changes no
    state of matplotlib.

    Args:
      panels: name → panel.
      layout: how they are laid out.
      title, width, ax, panel: see `Drawing`.

    Raises:
      ValueError: there is no panel of that name; a width that is none; a width or
        several panels for axes.
    """
    if panel is not None:
        if panel not in panels:
            raise ValueError(f"the figure has no panel {panel!r}; choose from {', '.join(panels)}.")
        panels = {panel: panels[panel]}
    if ax is not None:
        return _draw_into(ax, panels, layout, title, width)
    inches = width_in_inches(width)
    with mpl.rc_context(draw_style(inches)):
        return _draw_new(panels, layout, title, inches)


def _draw_into(
    ax: Axes, panels: Mapping[str, Panel], layout: Layout, title: str | None, width: Width
) -> Figure:
    """Draws the only panel into axes; returns their figure."""
    if width is not None:
        raise ValueError(
            f"width={width!r} sizes a new figure, and ax= is in a figure already: leave one of "
            "them out."
        )
    if len(panels) != 1:
        raise ValueError(
            f"the figure has the panels {', '.join(panels)}, and ax= holds one: choose it with "
            f"panel=, such as panel={next(iter(panels))!r}."
        )
    ((name, panel),) = panels.items()
    figure, before = ax.get_figure(root=True), len(ax.collections)
    assert figure is not None
    with mpl.rc_context(draw_style(WIDTHS["page"])):
        mappable = panel.fill(ax)
        ax.set_label(name)
        if title:
            ax.set_title(title)
        if mappable is not None and layout.colour_bar:
            figure.colorbar(mappable, ax=ax, label=layout.colour_bar, format=plain_number())
        if keys := [*panel.keys, *_band_key(ax.collections[before:])]:
            ax.legend(handles=keys)
    return figure


def _draw_new(
    panels: Mapping[str, Panel], layout: Layout, title: str | None, inches: float | None
) -> Figure:
    columns = min(len(panels), layout.columns or len(panels))
    if inches is not None:
        columns = min(columns, max(1, int(inches / layout.narrowest + 1e-9)))
        columns = -(-len(panels) // -(-len(panels) // columns))  # rows of even length
    rows = -(-len(panels) // columns)
    wide = layout.panel[0] * columns + 0.4 if inches is None else inches
    high = (
        layout.panel[1]
        if inches is None
        else float(np.clip(layout.ratio * wide / columns, 1.45, 3.6))
    )
    figure = Picture(figsize=(wide, rows * high), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False)
    places = list(zip(grid.flat, panels.items(), strict=False))
    mappables = []
    for ax, (name, panel) in places:
        mappables.append(panel.fill(ax))
        ax.set_label(name)
    for ax in grid.flat[len(panels) :]:
        ax.remove()
    scales = {ax: panel.scale for ax, (_, panel) in places}
    clear_inner_labels([[ax for ax in row if ax in scales] for row in grid], scales)
    if layout.colour_bar and mappables[-1] is not None:
        is_below = columns == 1 and rows > 1
        panels_only = [ax for ax, _ in places]
        figure.colorbar(
            mappables[-1],
            ax=panels_only,
            label=layout.colour_bar,
            shrink=0.85,
            format=plain_number(),
            location="bottom" if is_below else None,
            pad=0.01 if is_below else 0.02,
        )
    keys = {str(key.get_label()): key for _, (_, panel) in places for key in panel.keys}
    add_legend(
        figure, [*keys.values(), *_band_key([each for ax, _ in places for each in ax.collections])]
    )
    if title:
        figure.suptitle(title, fontsize=mpl.rcParams["axes.titlesize"] + 1, wrap=True)
    fit_height(figure, rows * high)
    return figure


def add_legend(figure: Figure, keys: Sequence[Artist]) -> None:
    """Puts one legend for all panels below them, in as many lines as it takes."""
    if not keys:
        return
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    for columns in range(len(keys), 0, -1):
        if columns < len(keys):
            columns = -(-len(keys) // -(-len(keys) // columns))
        legend = figure.legend(
            handles=list(keys),
            loc="outside lower center",
            ncols=columns,
            handlelength=2.2,
            columnspacing=1.4,
        )
        if columns == 1 or legend.get_window_extent(renderer).width < figure.bbox.width:
            return
        legend.remove()


def fit_height(figure: Figure, panels: float) -> None:
    """Makes a figure as high as its panels, in inches, its legends and its title
    together.
    """
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    dots = sum(legend.get_window_extent(renderer).height for legend in figure.legends)
    title = figure._suptitle  # type: ignore[attr-defined]
    dots += 0 if title is None else title.get_window_extent(renderer).height
    figure.set_size_inches(figure.get_figwidth(), panels + dots / figure.dpi + 0.1)


def line(
    panel: Axes, x: Sequence[float | int], rows: Sequence[Row], look: Look, **style: Any
) -> None:
    """Draws a line through the rows' values, in a band from `low` to `high` where they
    have them.
    """
    colour, marker = look
    style = {"linestyle": "-", "markeredgewidth": 0, **style}
    panel.plot(x, [row["value"] for row in rows], color=colour, marker=marker, **style)
    bounds = [(row.get("low"), row.get("high")) for row in rows]
    if rows and all(low is not None and high is not None for low, high in bounds):
        low, high = zip(*bounds, strict=True)
        panel.fill_between(x, low, high, color=colour, alpha=0.25, linewidth=0, gid="band")


def key(name: str, look: Look, **style: Any) -> Line2D:
    """Returns a sample of a line, for the legend."""
    return Line2D(
        [], [], color=look[0], marker=look[1], label=name, **{"markeredgewidth": 0, **style}
    )


def _band_key(collections: Sequence[Artist]) -> list[Line2D]:
    """Returns a sample of a band, where there is one."""
    if not any(
        isinstance(each, PolyCollection) and each.get_gid() == "band" for each in collections
    ):
        return []
    return [Line2D([], [], color="0.5", alpha=0.35, linewidth=6, solid_capstyle="butt", label=BAND)]


def legend_keys(legend: Legend) -> dict[str, Artist]:
    """Returns the samples of a legend by their words."""
    samples = zip(legend.get_texts(), legend.legend_handles, strict=True)
    return {text.get_text(): sample for text, sample in samples if sample is not None}
