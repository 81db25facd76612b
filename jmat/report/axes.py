"""Sets the axes of figures: every layer that fits has a tick, perplexities are
logarithmic, shares end at 1.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import (
    Formatter,
    FuncFormatter,
    Locator,
    LogFormatter,
    MaxNLocator,
    NullFormatter,
)

# Metrics that are shares of examples, or 1 at best: their axis is [0, 1].
_SHARES = ("precision@", "recall@", "accuracy", "linearity")
_UNITS = {"surprisal": "nats", "kl": "nats", "cross_entropy": "nats"}


class LayerLocator(Locator):
    """Puts a tick at every whole number where there is room, else at every second,
    third, …; always at the last.
    """

    def __init__(self) -> None:
        self._size = FontProperties(size=mpl.rcParams["xtick.labelsize"]).get_size_in_points()

    def __call__(self) -> list[float]:
        return self.tick_values(*self.axis.get_view_interval())  # type: ignore[union-attr]

    def tick_values(self, vmin: float, vmax: float) -> list[float]:
        """Returns the places of the ticks, from the first to the last whole number that
        is drawn.
        """
        axis = self.axis
        assert isinstance(axis, XAxis | YAxis)
        panel, across = axis.axes, axis.axis_name == "x"
        low, high = sorted(panel.dataLim.intervalx if across else panel.dataLim.intervaly)
        if not math.isfinite(high - low):
            return []
        first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
        letters = len(axis.get_major_formatter()(last, 0))
        wanted = self._size * (0.62 * letters + 0.4 if across else 1.25)
        figure = panel.get_figure(root=True)
        assert figure is not None
        length = panel.bbox.width if across else panel.bbox.height
        room = length * 72 / figure.dpi / max(abs(vmax - vmin), 1e-9)  # points between layers
        step = next(
            (s for s in (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 16, 20, 25) if s * room >= wanted),
            last + 1,
        )
        places = [
            float(place) for place in range(first, last, step) if (last - place) * room >= wanted
        ]
        return [*places, float(last)]


def layer_axis(panel: Axes, *, x_offset: int = 0) -> None:
    """Puts the ticks of the x axis at layers; `x_offset` is added to their numbers."""
    panel.xaxis.set_major_locator(LayerLocator())
    panel.xaxis.set_major_formatter(_number(x_offset))


def pair_axes(panel: Axes) -> None:
    """Puts the ticks of both axes of a heat map at layers: rows from 0, columns from 1
    on.
    """
    layer_axis(panel, x_offset=1)
    panel.yaxis.set_major_locator(LayerLocator())
    panel.yaxis.set_major_formatter(_number(0))


def _number(offset: int) -> Formatter:
    return FuncFormatter(lambda place, _: f"{place + offset:.0f}")


def perplexity_axis(panel: Axes) -> None:
    """Makes the y axis logarithmic, with plain numbers such as 50 in place of 5 × 10¹."""
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(LogFormatter())
    panel.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))


class PlainLogFormatter(LogFormatter):
    """Writes 0.6 in place of 6e-01, at the places that a logarithmic axis has room for."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def nats_axis(panel: Axes) -> None:
    """Makes the y axis logarithmic, with plain numbers below 1, too."""
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(PlainLogFormatter())
    panel.yaxis.set_minor_formatter(PlainLogFormatter(labelOnlyBase=False))


def plain_log_axis(panel: Axes) -> None:
    """Makes the y axis logarithmic, with 0.01 in place of a power of ten, whose
    exponent is small type.
    """
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(plain_number())
    panel.yaxis.set_minor_formatter(NullFormatter())


def plain_number() -> Formatter:
    """Returns a formatter that writes 0.01 in place of a power of ten."""
    return FuncFormatter(lambda value, _: f"{value:g}")


def is_share(metric: str) -> bool:
    """Returns whether a metric is 1 at best, so that its axis ends there."""
    return metric.startswith(_SHARES)


def share_axis(panel: Axes) -> None:
    """Sets the y axis for shares, which lie in [0, 1], with three ticks at least."""
    panel.set_ylim(max(min(0, panel.dataLim.y0), -1), 1.02)
    panel.yaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], min_n_ticks=3))


def metric_axis(panel: Axes, metric: str) -> None:
    """Sets the y axis to what suits a metric: shares lie in [0, 1], others begin at 0
    where that is near.
    """
    if is_share(metric):
        share_axis(panel)
    elif metric == "perplexity":
        perplexity_axis(panel)
    elif 0 <= panel.dataLim.y0 < 0.5 * panel.dataLim.y1:
        panel.set_ylim(bottom=0)
    if metric in _UNITS:
        panel.set_ylabel(_UNITS[metric])


def clear_inner_labels(grid: Sequence[Sequence[Axes]], scales: Mapping[Axes, str]) -> None:
    """Removes what the panel below or to the left says already: words below, and
    numbers of the same scale.
    """
    for row in grid:
        for left, panel in itertools.pairwise(row):
            if scales[left] and scales[left] == scales[panel]:
                panel.tick_params(labelleft=False)
                panel.set_ylabel("")
    for row, below in itertools.pairwise(grid):
        for panel, lower in zip(row, below, strict=False):
            if panel.get_xlabel() == lower.get_xlabel():
                panel.set_xlabel("")
