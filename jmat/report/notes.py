"""Adds notes to rows of results.json: sentences on figures that are missing, or mean
less than they seem to.

A row without a value says why; a row with a value says what it does not show, such as
an agreement with a model that predicts the same whatever it reads.
"""

from collections.abc import Iterable

import numpy as np
from numpy import ndarray

from jmat.report.rows import Row

NO_INTERVAL = "there is no interval: it takes two sentences at least, between which figures vary"
OVERFLOWS = (
    "the figure is infinite, or not a number: the scores overflow, or the weights are damaged"
)
DOES_NOT_VARY = "the target does not vary"

# Metrics that compare predictions, by how their names begin.
AGREEMENT = (
    "precision@",
    "recall@",
    "surprisal",
    "kl",
    "layers_saved",
    "disagreement",
    "accuracy",
    "same_top_1",
    "perplexity",
)

_AND = "; also: "  # between two notes of one row


def estimate(
    value: float | np.floating | ndarray,
    low: float | np.floating | ndarray,
    high: float | np.floating | ndarray,
) -> Row:
    """Returns the fields `value`, `low` and `high` of a row.

    A note stands in place of an interval that is not there (NaN), and beside a value
    that is not finite, which is None.
    """
    if not np.isfinite(value):
        return {"value": None, "note": OVERFLOWS}
    if not (np.isfinite(low) and np.isfinite(high)):
        return {"value": float(value), "note": NO_INTERVAL}
    return {"value": float(value), "low": float(low), "high": float(high)}


def with_note(row: Row, note: str | None) -> Row:
    """Returns the row with one more note; as it is where there is none."""
    if not note or note in row.get("note", ""):
        return dict(row)
    return {**row, "note": f"{row['note']}{_AND}{note}" if row.get("note") else note}


def noted(rows: Iterable[Row], note: str | None) -> list[Row]:
    """Returns the rows, those of agreement with a model's predictions (`AGREEMENT`)
    with one more note.
    """
    return [
        with_note(row, note) if row["metric"].startswith(AGREEMENT) else dict(row) for row in rows
    ]


def format_notes(rows: Iterable[Row]) -> list[str]:
    """Returns every note of the rows once, in their order, with the number of rows that
    have no value for it.
    """
    rows = list(rows)
    noted_rows: dict[str, list[Row]] = {}
    for row in rows:
        for note in row["note"].split(_AND) if row.get("note") else ():
            noted_rows.setdefault(note, []).append(row)
    lines = []
    for note, having_it in noted_rows.items():
        missing = [row for row in having_it if row["value"] is None]
        lines.append(
            f"{len(missing)} of {len(rows)} rows{_which(missing)} have no value: {note}"
            if missing
            else note
        )
    return lines


def _which(rows: Iterable[Row]) -> str:
    """Returns the first maps and layers of some rows, in brackets."""
    names = [
        f"{row['map']} from layer {row['layer']}" for row in rows if "map" in row and "layer" in row
    ]
    distinct = list(dict.fromkeys(names))
    shown = ", ".join(distinct[:3]) + (", …" if len(distinct) > 3 else "")
    return f" ({shown})" if shown else ""


# --- predictions that do not depend on the text ---------------------------------------------------
