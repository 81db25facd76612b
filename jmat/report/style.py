"""Says how figures look: type, colours and widths."""

import numbers
from typing import Any

WIDTHS = {"column": 3.25, "page": 6.75}  # inches, as in most two-column papers
_NARROWEST, _WIDEST = 2.0, 40.0


Style = dict[Any, Any]  # matplotlib lists every key, and has no name for the type of all


_STYLE: Style = {
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
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "pdf.fonttype": 42,  # TrueType, which publishers ask for
    "svg.hashsalt": "jmat",  # a figure that is drawn again is the same file
}


Width = str | float | int | None  # "column", "page", inches, or as wide as suits a screen


def width_in_inches(width: Width) -> float | None:
    """Returns a width in inches; None for that of a screen. Raises ValueError for one
    that is none.
    """
    if width is None:
        return None
    inches = (
        WIDTHS.get(width)
        if isinstance(width, str)
        else float(width)
        if isinstance(width, numbers.Real)
        else None
    )
    if inches is None or not _NARROWEST <= inches <= _WIDEST:
        raise ValueError(
            f"width={width!r} is not a width of a figure; expected column, page, or inches from "
            f"{_NARROWEST:g} to {_WIDEST:g}."
        )
    return inches


def draw_style(inches: float | None) -> Style:
    """Returns matplotlib's settings: type of 9 points on a screen, and of 8 and 7.5 in
    a paper.
    """
    text, small = (9.0, 9.0) if inches is None else (8.0, 7.5)
    sizes = {
        "font.size": text,
        "axes.labelsize": text,
        "axes.titlesize": text + 0.5,
        "legend.fontsize": text,
    }
    return _STYLE | sizes | {"xtick.labelsize": small, "ytick.labelsize": small}
