"""Rows of results.json and the table of a benchmark."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jmat.runtime.annotations import Fields, JsonObject

Row = JsonObject


@dataclasses.dataclass(frozen=True)
class Goal:
    """A bound on a ratio: at least this, or at most."""

    value: float | int
    at_most: bool = False

    def met(self, ratio: float | int) -> bool:
        """Returns whether a value reaches the goal."""
        return ratio <= self.value if self.at_most else ratio >= self.value

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.value:g}"


def ratio_row(
    part: str,
    metric: str,
    value: float | int,
    ours: str,
    other: str,
    goal: Goal | None = None,
    **more: Any,
) -> Row:
    """A ratio with what it is of: `ours` and `other` say both sides in words."""
    row = {
        "map": part,
        "metric": metric,
        "value": float(value),
        "jmat": ours,
        "other": other,
        **more,
    }
    return row if goal is None else row | {"goal": str(goal), "met": goal.met(value)}


def missing_row(part: str, metric: str, goal: Goal, note: str) -> Row:
    """A ratio that could not be measured, and why."""
    return {"map": part, "metric": metric, "value": None, "goal": str(goal), "note": note}


def paired_row(
    part: str,
    taken: Mapping[str, Sequence[float | int]],
    other: str,
    goal: Goal,
    *,
    scale: float | int = 1,
    metric: str = "ratio",
    words: str = "",
) -> Row:
    """Best time of the other over best time of jmat; `low` and `high` are the extremes
    over the turns.

    Args:
        part: of the benchmark.
        taken: seconds by contender, from `jmat.runtime.timing.in_turn`; `jmat` and
          `other` are read.
        other: what jmat is held against.
        goal: of the ratio.
        scale: by which the other's time is extrapolated.
        metric: name of the ratio.
        words: how the other's time was come by.
    """
    ours, theirs = taken["jmat"], [scale * value for value in taken[other]]
    each = [b / a for a, b in zip(ours, theirs, strict=True)]
    said = f"{other} {duration(min(theirs))}{words}"
    spread = {"low": min(each), "high": max(each), "n": len(each)}
    return ratio_row(
        part, metric, min(theirs) / min(ours), duration(min(ours)), said, goal, **spread
    )


def seconds_rows(part: str, taken: Mapping[str, Sequence[float | int]], **more: Any) -> list[Row]:
    """The best time of each contender."""
    return [
        {
            "map": part,
            "metric": "seconds",
            "of": name,
            "value": min(values),
            "n": len(values),
            **more,
        }
        for name, values in taken.items()
    ]


def duration(value: float | int) -> str:
    """Seconds, readable."""
    return f"{value:.3g} s" if value >= 0.1 else f"{1000 * value:.3g} ms"


def format_ratios(rows: Sequence[Fields]) -> str:
    """part | jmat | other | ratio | goal | met. A goal that is not reached says MISSED."""
    lines = [("part", "jmat", "other", "ratio", "goal", "met")]
    for row in rows:
        if "goal" not in row and "other" not in row:
            continue
        value = "-" if row["value"] is None else f"{row['value']:.3g}"
        met = {True: "yes", False: "MISSED", None: ""}[row.get("met")]
        name = row["map"] if row["metric"] == "ratio" else f"{row['map']} {row['metric']}"
        lines.append(
            (
                name,
                row.get("jmat", "-"),
                row.get("other", row.get("note", "")),
                value,
                row.get("goal", ""),
                met,
            )
        )
    widths = [max(len(line[k]) for line in lines) for k in range(6)]
    return "\n".join(
        " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def format_errors(rows: Sequence[Fields]) -> str:
    """Returns tables of relative errors in predictions, one for each noise: a line a
    method, a column a problem (a condition number, or the number and size of outlier
    coordinates).
    """
    problem = {id(row): _problem(row) for row in rows}
    problems = list(dict.fromkeys(problem.values()))
    methods, noises = (list(dict.fromkeys(row[key] for row in rows)) for key in ("method", "noise"))
    cells = {(row["method"], problem[id(row)], row["noise"]): row["value"] for row in rows}
    lines = []
    for noise in noises:
        head = f"error in predictions, noise {noise:.0%}".ljust(38)
        lines.append(head + "".join(name.rjust(10) for name in problems))
        for method in methods:
            values = [cells[method, name, noise] for name in problems]
            errors = ("-" if value is None else f"{value:.1e}" for value in values)
            lines.append(f"  {method}".ljust(38) + "".join(error.rjust(10) for error in errors))
    return "\n".join(lines)


def _problem(row: Fields) -> str:
    return (
        f"{row['condition']:.0e}" if "condition" in row else f"{row['outliers']} x {row['times']}"
    )
