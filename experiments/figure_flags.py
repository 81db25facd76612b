"""Defines the flags of experiments that draw figures."""

import pathlib
from collections.abc import Iterable

from absl import flags

from jmat.report.saving import FORMATS
from jmat.report.style import Width, width_in_inches

NAMES = ("figure_format", "figure_width")  # of flags that change no number


class _WidthParser(flags.ArgumentParser[Width]):
    """Parses the width of a figure: `column`, `page`, or inches."""

    syntactic_help = "column, page or inches"

    def parse(self, argument: str) -> Width:
        """Returns the width. Raises ValueError for one that figures cannot have."""
        try:
            width: Width = float(argument)
        except ValueError:
            width = argument
        width_in_inches(width)
        return width


flags.DEFINE_enum(
    "figure_format", "png", FORMATS, "Format of the figures' files; pdf and svg have no dots."
)
flags.DEFINE(
    _WidthParser(),
    "figure_width",
    None,
    "Width of the figures: column (3.25 inches) or page (6.75) of a paper, with type of 7 points "
    "or more, or inches; default: as wide as suits a screen.",
)


def figure_file(name: str) -> str:
    """Returns the name of a file, with the ending of --figure_format where it is a
    figure's.
    """
    path = pathlib.PurePath(name)
    return str(path.with_suffix(f".{flags.FLAGS.figure_format}")) if path.suffix == ".png" else name


def figure_files(names: Iterable[str]) -> list[str]:
    """Returns names of files that a run writes, those of figures with the ending of
    --figure_format.
    """
    return [figure_file(name) for name in names]
