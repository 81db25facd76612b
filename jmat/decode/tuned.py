"""Defines `TunedDraft`: what `jmat.tune_draft` returns."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jmat.decode.draft import Draft
from jmat.decode.lookup import Lookup

LOOKUP = "lookup"
Row = dict[str, str | int | float]
_SHOWN = 12  # rows of the table in a repr


class Race(NamedTuple):
    """Holds how many times as fast as plain decoding a draft was: the median over turns,
    and the extremes.
    """

    median: float
    least: float
    most: float


@dataclasses.dataclass(frozen=True, eq=False)
class TunedDraft:
    """Holds drafts that were compared, and the best one.

    Attributes:
      draft: to be given to `jmat.generate`; None where none is predicted to be faster
        than plain decoding, or the best one lost the race.
      rows: of every draft, the fastest first: `kind`, `layer`, `words` (0: all) and
        `tokens`; `accepted`, the share of drafted tokens that are part of the text;
        `tokens_a_check`, of the slowest text, for which the others wait; `draft_cost` and
        `check_cost`, the mean over cycles, in plain steps; and `speed_up`, what is
        predicted from these.
      plain: seconds of a plain step.
      race: the best draft's speed-up by the clock; None where no race was asked for, or
        there is no best draft.
    """

    draft: Draft | Lookup | None
    rows: Sequence[Row]
    plain: float
    race: Race | None = None

    @property
    def verdict(self) -> str:
        """Returns a sentence on whether a draft pays."""
        best = self.rows[0]
        factor = f"{best['speed_up']:.2f}"
        clock = ""
        if self.race is not None:
            median, least, most = self.race
            clock = f"; the clock says {median:.2f} ({least:.2f} to {most:.2f})"
        if self.draft is None:
            return (
                f"Drafting does not pay here: the best draft ({_name(best)}) is predicted to be "
                f"{factor} times as fast as plain decoding{clock}."
            )
        return (
            f"Best: {_name(best)}, predicted to be {factor} times as fast as plain decoding{clock}."
        )

    def __repr__(self) -> str:
        """Returns the verdict and a table of the fastest drafts."""
        head = ("draft", "accepted", "tokens/check", "draft cost", "check cost", "speed-up")
        lines = [head] + [
            (
                _name(row),
                f"{row['accepted']:.2f}",
                f"{row['tokens_a_check']:.2f}",
                f"{row['draft_cost']:.2f}",
                f"{row['check_cost']:.2f}",
                f"{row['speed_up']:.2f}",
            )
            for row in self.rows[:_SHOWN]
        ]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        table = [
            "  ".join(
                cell.rjust(width) if column else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        more = len(self.rows) - _SHOWN
        return "\n".join([self.verdict, *table, *([f"… and {more} more"] if more > 0 else [])])


def _name(row: Row) -> str:
    """Returns the name of a draft in tables and sentences."""
    length = f"{row['tokens']} token{'' if row['tokens'] == 1 else 's'}"
    if row["kind"] == LOOKUP:
        return f"{LOOKUP}, {length}"
    words = f", {row['words']} words" if row["words"] else ""
    return f"{row['kind']} from layer {row['layer']}, {length}{words}"
