"""Draws the figure of the study from its rows."""

from collections.abc import Mapping, Sequence
from typing import Unpack

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jmat.report.axes import layer_axis
from jmat.report.drawing import Drawing, Layout, Look, Panel, draw, key, line, titled
from jmat.report.names import model_name, readable
from jmat.report.plots import map_looks
from jmat.report.rows import Content, Row
from jmat.runtime.errors import NothingToDrawError
from jmat.studies.decoding.methods import CARRY, EXIT, LOOKUP, PLAIN
from jmat.studies.decoding.rows import PER_CHECK, SAME, SPEED

_DRAFTS = {CARRY: "carry", LOOKUP: "copied from the text"}


def plot(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws tokens a second against the share of plain tokens, and the tokens that one
    check of a draft brings by the layer that drafts.

    The panels are called `tokens_a_second`, which is left out where nothing was timed,
    and `tokens_a_check`. Bars of the clock are extremes over turns.

    Raises:
      NothingToDrawError: there is nothing to draw.
    """
    rows = [row for row in results["rows"] if row["value"] is not None]
    looks = map_looks([{"map": _family(row)} for row in rows if row["method"] != PLAIN])
    panels = {}
    if speeds := [row for row in rows if row["metric"] == SPEED]:
        same = {row["method"]: row["value"] for row in rows if row["metric"] == SAME}
        panels[SPEED] = _speeds(speeds, {PLAIN: 1.0} | same, looks)
    if checks := [row for row in rows if row["metric"] == PER_CHECK and "layer" in row]:
        panels[PER_CHECK] = _checks(checks, looks)
    if not panels:
        raise NothingToDrawError("no drafts, and nothing that was timed: nothing to draw")
    title = f"{model_name(results)}: ways to write"
    return draw(panels, Layout(panel=(3.4, 3.0), narrowest=2.4), **titled(drawing, title))


def _family(row: Row) -> str:
    """Returns which methods look alike: drafts of one kind and length, exits of one kind
    and fill.
    """
    if row["way"] == EXIT:
        return f"{readable(row['map'])}, exit, {row['fill']}"
    return f"{_DRAFTS.get(row['map'], readable(row['map']))}, {row['tokens']} a draft"


def _speeds(rows: Sequence[Row], same: Mapping[str, float], looks: Mapping[str, Look]) -> Panel:
    def fill(panel: Axes) -> None:
        for row in rows:
            x, y = same[row["method"]], row["value"]
            if row["method"] == PLAIN:
                panel.axhline(y, color="0.4", linestyle=":", linewidth=1)
                continue
            colour, marker = looks[_family(row)]
            panel.vlines(x, row["low"], row["high"], color=colour, linewidth=0.8)
            panel.plot(x, y, color=colour, marker=marker, markersize=5, markeredgewidth=0)
        panel.set(xlabel="share of plain tokens", title="tokens a second")
        panel.set_ylim(bottom=0)
        panel.set_xlim(min([0.9, *(value - 0.05 for value in same.values())]), 1.01)

    keys = [key(name, look, linestyle="none", markersize=5) for name, look in looks.items()]
    return Panel(fill, [*keys, key("plain", ("0.4", ""), linestyle=":")])


def _checks(rows: Sequence[Row], looks: Mapping[str, Look]) -> Panel:
    def fill(panel: Axes) -> None:
        for name, look in looks.items():
            mine = [row for row in rows if _family(row) == name and "layer" in row]
            mine.sort(key=lambda row: row["layer"])
            if not mine:
                continue
            line(panel, [row["layer"] for row in mine], mine, look)
        panel.set(xlabel="layer that drafts", title="tokens a check")
        layer_axis(panel)

    drawn = {_family(row) for row in rows}
    return Panel(fill, [key(name, look) for name, look in looks.items() if name in drawn])
