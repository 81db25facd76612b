"""Draws the figure of a study for several runs side by side: two models, or two
settings.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, Unpack, runtime_checkable

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jmat.report.axes import clear_inner_labels, plain_number
from jmat.report.drawing import Drawing, Picture, add_legend, fit_height, legend_keys
from jmat.report.names import model_name, plain
from jmat.report.rows import Content, Row
from jmat.report.style import Width, draw_style, width_in_inches
from jmat.runtime.annotations import Fields

Plot = Callable[..., Figure]


@runtime_checkable
class Run(Protocol):
    """Describes what a run must offer; `jmat.report.results.Results` does."""

    @property
    def config(self) -> Fields:
        """Returns the settings, with `model`."""
        ...

    @property
    def rows(self) -> list[Row]:
        """Returns the figures."""
        ...

    def plot(self, name: str | None = None, **drawing: Unpack[Drawing]) -> Figure:
        """Returns a figure."""
        ...


def compare(
    runs: Sequence[Run | Content],
    plot: Plot | str | None = None,
    *,
    names: Sequence[str] | None = None,
    panels: Sequence[str] | None = None,
    title: str = "",
    width: Width = "page",
) -> Figure:
    """Returns a figure with a column a run and a row a panel; a row has one scale.

        compare([first, second], panels=["precision@1"])
        compare([read_results("runs/a"), read_results("runs/b")], layer_jump.plot)

    Args:
      runs: results of studies, or what `read_results` returns.
      plot: name of the figure, by default the first; for `read_results` the plot
        function.
      names: a heading a run; default: the names of the models.
      panels: which panels of the figure; default: all.
      title: stands above the figure.
      width: "column", "page" or inches; None: as wide as suits a screen.

    Raises:
      ValueError: there is no run, or a name too many or too few; no plot function; no
        such panel.
    """
    if not runs:
        raise ValueError("there is no run to draw; give a list of results.")
    headings = [_heading(run) for run in runs] if names is None else [plain(name) for name in names]
    if len(headings) != len(runs):
        raise ValueError(
            f"names has {len(headings)} headings; expected one for each of {len(runs)} runs."
        )
    drawn = [_plot_of(run, plot) for run in runs]
    if panels is None:
        shown = (panel.get_label() for each in drawn for panel in each(title="").axes)
        panels = list(dict.fromkeys(str(label) for label in shown if label != "<colorbar>"))
    inches = width_in_inches(width)
    wide = 3.0 * len(runs) + 0.4 if inches is None else inches
    high = min(max(0.75 * wide / len(runs), 1.45), 2.5)
    with mpl.rc_context(draw_style(inches)):
        figure = Picture(figsize=(wide, high * len(panels)), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(panels), len(runs), squeeze=False)
        keys: dict[str, Artist] = {}
        rows: list[list[Axes]] = [list(row) for row in grid]
        for row, panel in zip(rows, panels, strict=True):
            for ax, draw_run in zip(row, drawn, strict=True):
                draw_run(ax=ax, panel=panel, title=None)
                keys |= _take_legend(ax)
            _share_scale(row)
            _share_colour_bar(row)
        clear_inner_labels(rows, dict.fromkeys(grid.flat, ""))
        for ax, heading in zip(rows[0], headings, strict=True):
            ax.set_title("\n".join(part for part in (heading, ax.get_title()) if part))
        add_legend(figure, list(keys.values()))
        if title:
            figure.suptitle(title, wrap=True)
        square = any(ax.images for row in rows for ax in row)
        fit_height(figure, len(panels) * (wide / len(runs) if square else high))
    return figure


def _heading(run: Run | Content) -> str:
    return model_name({"config": run.config} if isinstance(run, Run) else run)


def _plot_of(run: Run | Content, plot: Plot | str | None) -> Plot:
    """Returns the function that draws a run."""
    if isinstance(run, Run):
        if callable(plot):
            content: Content = {"config": run.config, "rows": run.rows}
            return lambda **drawing: plot(content, **drawing)
        return lambda **drawing: run.plot(plot, **drawing)
    if not callable(plot):
        raise ValueError(
            "what read_results returns does not know its figure: give the plot function of its "
            "study."
        )
    return lambda **drawing: plot(run, **drawing)


def _take_legend(ax: Axes) -> dict[str, Artist]:
    """Removes the legend of axes, and returns its samples by their words."""
    legend = ax.get_legend()
    if legend is None:
        return {}
    keys = legend_keys(legend)
    for words, sample in keys.items():
        sample.set_label(words)
    legend.remove()
    return keys


def _share_colour_bar(row: Sequence[Axes]) -> None:
    """Puts one colour bar beside heat maps in place of one each."""
    mappables = [each for ax in row for each in (*ax.images, *ax.collections)]
    bars = [each.colorbar for each in mappables if each.colorbar is not None]
    if not bars:
        return
    label = bars[0].ax.get_ylabel()
    for bar in bars:
        bar.remove()
    row[0].figure.colorbar(
        bars[0].mappable, ax=list(row), label=label, format=plain_number(), pad=0.02
    )


def _share_scale(row: Sequence[Axes]) -> None:
    """Gives panels side by side one scale, unless they are heat maps, whose axes are
    layers.
    """
    if any(ax.images for ax in row):
        return
    bottoms, tops = zip(*(ax.get_ylim() for ax in row), strict=True)
    for ax in row:
        ax.set_ylim(min(bottoms), max(tops))
    for ax in row[1:]:
        ax.tick_params(labelleft=False)
        ax.set_ylabel("")
