"""Writes figures to files: PNG, PDF or SVG."""

import io
import pathlib

import matplotlib as mpl
from matplotlib.figure import Figure

from jmat.report.style import WIDTHS, draw_style
from jmat.runtime.files import save_atomically

FORMATS = ("png", "pdf", "svg")


def save_figure(figure: Figure, path: str | pathlib.Path) -> None:
    """Writes a figure as PNG, PDF or SVG, by the name's ending, whole or not at all.

    Raises:
      ValueError: another ending.
      OSError: the file cannot be written.
    """
    path = pathlib.Path(path)
    kind = path.suffix.removeprefix(".")
    check_format(kind)

    def write(temporary: pathlib.Path) -> None:
        _write(figure, temporary, kind)

    save_atomically(path, write)


def check_format(kind: str) -> None:
    """Raises ValueError for a file format that figures are not written in."""
    if kind not in FORMATS:
        raise ValueError(
            f"figure_format={kind!r} is not a format of figures; expected one of "
            f"{', '.join(FORMATS)}."
        )


def picture_bytes(figure: Figure) -> bytes:
    """Returns a figure as PNG."""
    file = io.BytesIO()
    _write(figure, file, "png")
    return file.getvalue()


def _write(figure: Figure, file: pathlib.Path | io.BytesIO, kind: str) -> None:
    narrow = figure.get_figwidth() <= WIDTHS["page"]  # a paper's: printed, and not shown
    undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    # ticks are made when it is written
    with mpl.rc_context(draw_style(figure.get_figwidth() if narrow else None)):
        figure.savefig(file, dpi=300 if narrow else 200, format=kind, metadata=undated.get(kind))
