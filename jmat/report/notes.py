"""Adds notes to rows of results.json: sentences on figures that are missing, or mean less than they seem to.

A row without a value says why; a row with a value says what it does not show, such as an agreement with a model that
predicts the same whatever it reads.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy import ndarray

NO_INTERVAL = "there is no interval: it takes two sentences at least, between which figures vary"
OVERFLOWS = "the figure is infinite, or not a number: the scores overflow, or the weights are damaged"
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
_SAME = 1e-4  # nats; predictions of a model that reads its text differ by thousands of times as much
_FEW = 10  # so few examples can have the same most likely token by chance


def estimate(
    value: float | np.floating | ndarray, low: float | np.floating | ndarray, high: float | np.floating | ndarray
) -> dict[str, Any]:
    """Returns the fields `value`, `low` and `high` of a row.

    A note stands in place of an interval that is not there (NaN), and beside a value that is not finite, which is None.
    """
    if not np.isfinite(value):
        return {"value": None, "note": OVERFLOWS}
    if not (np.isfinite(low) and np.isfinite(high)):
        return {"value": float(value), "note": NO_INTERVAL}
    return {"value": float(value), "low": float(low), "high": float(high)}


def with_note(row: Mapping[str, Any], note: str | None) -> dict[str, Any]:
    """Returns the row with one more note; as it is where there is none."""
    if not note or note in row.get("note", ""):
        return dict(row)
    return {**row, "note": f"{row['note']}{_AND}{note}" if row.get("note") else note}


def noted(rows: Iterable[Mapping[str, Any]], note: str | None) -> list[dict[str, Any]]:
    """Returns the rows, those of agreement with a model's predictions (`AGREEMENT`) with one more note."""
    return [with_note(row, note) if row["metric"].startswith(AGREEMENT) else dict(row) for row in rows]


def format_notes(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns every note of the rows once, in their order, with the number of rows that have no value for it."""
    rows = list(rows)
    noted_rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        for note in row["note"].split(_AND) if row.get("note") else ():
            noted_rows.setdefault(note, []).append(row)
    lines = []
    for note, having_it in noted_rows.items():
        missing = [row for row in having_it if row["value"] is None]
        lines.append(f"{len(missing)} of {len(rows)} rows{_which(missing)} have no value: {note}" if missing else note)
    return lines


def _which(rows: Iterable[Mapping[str, Any]]) -> str:
    """Returns the first maps and layers of some rows, in brackets."""
    names = [f"{row['map']} from layer {row['layer']}" for row in rows if "map" in row and "layer" in row]
    distinct = list(dict.fromkeys(names))
    shown = ", ".join(distinct[:3]) + (", …" if len(distinct) > 3 else "")
    return f" ({shown})" if shown else ""


# --- predictions that do not depend on the text -----------------------------------------------------------------------


@jax.jit
def _likeness(logits: Float[Array, "N V"], first: Float[Array, " V"]) -> tuple[Int[Array, " N"], Float[Array, " N"]]:
    """Returns each example's most likely token, and how far its log-probabilities are from those of `first` (nats)."""
    p, other = (jax.nn.log_softmax(scores.astype(jnp.float32), axis=-1) for scores in (logits, first))
    # A token that both exclude has a logarithm of minus infinity in both.
    apart = jnp.where(p == other, 0, jnp.abs(p - other))
    return logits.argmax(-1).astype(jnp.int32), apart.max(-1)


class Predictions:
    """Collects what a model predicts, to tell whether it depends on the text at all.

    Weights of zero, or a norm's epsilon that overflows, make every stand-in agree with the model perfectly.
    """

    def __init__(self) -> None:
        self._first: Any = None
        self._tops: set[int] = set()
        self._count, self._apart = 0, 0.0

    def add(self, logits: Float[Array | ndarray, "*N V"], real: Any = None) -> None:
        """Adds examples' logits; those where `real` is false are not read. Costs nothing once two have differed.

        Args:
            logits: of the whole model.
            real: which examples count, in the shape of `logits` without its last axis; default: all.
        """
        counts = np.ones(logits.shape[:-1], bool) if real is None else np.asarray(real, bool)
        self._count += int(counts.sum())
        if not counts.any() or (self._apart > _SAME and len(self._tops) > 1):
            return
        # Not before: a reshaped array of logits is a copy of them.
        flat, counts = jnp.asarray(logits).reshape(-1, logits.shape[-1]), counts.reshape(-1)
        if self._first is None:
            self._first = flat[int(counts.argmax())]
        tops, apart = (np.asarray(each)[counts] for each in _likeness(flat, self._first))
        self._tops |= set(np.unique(tops).tolist())
        self._apart = max(self._apart, float(np.nan_to_num(apart, nan=np.inf).max()))

    def note(self) -> str | None:
        """Returns one sentence where all examples have the same prediction, or the same most likely token; else None.

        A single example says nothing, and fewer than ten with one most likely token say nothing either.
        """
        if self._count < 2 or (self._apart > _SAME and (len(self._tops) > 1 or self._count < _FEW)):
            return None
        if self._apart <= _SAME:
            same, cause = "the model predicts the same", "its predictions do not depend on the text"
        else:
            same = f"the model's most likely token is the same ({min(self._tops)})"
            cause = "it does not depend on the text"
        return (
            f"{same} at all {self._count} places: {cause}, or all examples are alike; agreement and accuracy say "
            "nothing here"
        )
