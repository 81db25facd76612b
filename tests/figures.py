"""What a figure shows, read from its artists: whose line a legend's entry names, its
values, and its band.
"""

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from jmat.report.drawing import BAND, legend_keys


def legend(figure):
    """Label → the sample of a line that stands beside it; the band's is left out."""
    (found,) = figure.legends
    return {name: sample for name, sample in legend_keys(found).items() if name != BAND}


def names_bands(figure):
    """Returns whether a figure's legend says what its bands are."""
    return any(BAND in legend_keys(found) for found in figure.legends)


def look(line):
    return to_hex(line.get_color()), line.get_marker()


def curve(panel, sample, linestyle=None):
    """x and y of the only line in a panel that looks like a legend's sample."""
    (line,) = [
        line
        for line in panel.lines
        if look(line) == look(sample)
        and linestyle in (None, line.get_linestyle())
        and len(line.get_xdata())
    ]
    return list(line.get_xdata()), list(line.get_ydata())


def band(panel, sample):
    """x → (low, high) of the only band in the colour of a legend's sample; empty where
    there is none.
    """
    bands = [
        found
        for found in panel.collections
        if isinstance(found, PolyCollection)
        and to_hex(found.get_facecolor()[0][:3]) == to_hex(sample.get_color())
    ]
    if not bands:
        return {}
    (found,) = bands
    corners = found.get_paths()[0].vertices
    return {
        x: (corners[corners[:, 0] == x, 1].min(), corners[corners[:, 0] == x, 1].max())
        for x in np.unique(corners[:, 0])
    }


def digits(panel):
    """(row, column) → what a heat map says there."""
    return {tuple(map(int, text.get_position()[::-1])): text.get_text() for text in panel.texts}


def ticks(axis):
    return [label.get_text() for label in axis.get_ticklabels()]
