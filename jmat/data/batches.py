"""Examples → batches of few shapes, since each shape compiles a program: padded, or packed several sentences a row.

Everything is numpy, on the host. Letters: B rows of a batch, T length, P examples a row, S sentences.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int, Int32
from numpy import ndarray

from jmat.data.examples import Split
from jmat.data.packing import best_fit

# The shortest row that sentences share. What attention costs grows with the row, what padding costs shrinks.
_SHORTEST_ROW = 64


class Batch(NamedTuple):
    """Rows of tokens as a model reads them: one text a row, or several that are blind to one another.

    Attributes:
      tokens: ids [B, T]; padding holds any valid id.
      segments: [B, T]; which text of its row a token belongs to, from 1; 0 is padding.
      positions: [B, T]; index of each token in its text, from 0.
      read_at: [B, P]; columns of the row at which examples are read; 0 where there is none. P may be 0.
      examples: [B, P]; index of each example in the split that it comes from; −1 where there is none.
    """

    tokens: Int32[Array | ndarray, "B T"]
    segments: Int32[Array | ndarray, "B T"]
    positions: Int32[Array | ndarray, "B T"]
    read_at: Int32[Array | ndarray, "B P"]
    examples: Int32[Array | ndarray, "B P"]


@dataclasses.dataclass(frozen=True, eq=False)
class Padded:
    """Sentences padded on the right to one length, and the examples that stand in them.

    Attributes:
      tokens: ids, `pad_id` after the end.
      lengths: of each row, at least 1; an empty row has one pad token and no example.
      positions: of the examples; 0 where there is none.
      examples: their index in the split; −1 where there is none.
    """

    tokens: Int32[ndarray, "B T"]
    lengths: Int32[ndarray, " B"]
    positions: Int32[ndarray, "B P"]
    examples: Int32[ndarray, "B P"]


def batches(
    split: Split,
    *,
    cut_after_position: bool,
    max_length: int | None = None,
    tokens_per_batch: int = 4096,
    multiple: int = 8,
    row_multiple: int = 1,
    pad_id: int = 0,
) -> Iterator[Padded]:
    """Every example once, in batches of few shapes; the longest sentences come first.

    T is the longest sentence's length rounded up to 1, 2, … 8, 10, 12, 14, 16, 20, 24, … times `multiple`, and B is
    `tokens_per_batch / T`. Only the last batch can be short, and is filled with empty rows.

    Args:
      split: sentences without an example are left out.
      cut_after_position: leave out what follows a sentence's last example; a causal model does not see it.
      max_length: the model's positions; T never exceeds it.
      tokens_per_batch: B·T at most, as long as one row (or `row_multiple` rows) fits.
      multiple: T is a multiple of this, unless `max_length` is less.
      row_multiple: B is a multiple of this: the number of devices over which the rows are sharded.
      pad_id: any valid token id; padding is masked.

    Raises:
      ValueError: a sentence is longer than `max_length`.
    """
    sizes = _sizes(split, cut_after_position, max_length)
    plan = _plan(sizes, max_length, tokens_per_batch, multiple, row_multiple)
    examples, starts = _example_table(split), split.starts

    def fill(chosen: Int[ndarray, " b"], B: int, T: int) -> Padded:
        lengths = np.ones(B, np.int32)
        lengths[: len(chosen)] = sizes[chosen]
        real = np.arange(T) < sizes[chosen, None]
        tokens = np.full((B, T), pad_id, np.int32)
        tokens[: len(chosen)][real] = split.tokens[(starts[chosen, None] + np.arange(T))[real]]
        here = np.full((B, examples.shape[1]), -1, np.int32)
        here[: len(chosen)] = examples[chosen]
        positions = np.where(here >= 0, split.positions[here], 0)
        return Padded(tokens=tokens, lengths=lengths, positions=positions, examples=here)

    return (fill(*step) for step in plan)


def packed(
    split: Split,
    *,
    cut_after_position: bool,
    max_length: int | None = None,
    tokens_per_batch: int = 4096,
    row_multiple: int = 1,
    pad_id: int = 0,
) -> list[Batch]:
    """Every example once; sentences share rows of 64 tokens, longer ones begin rows of 128, 256, …: little padding.

    Takes what `batches` takes, and raises what it raises. Batches of one row length have one shape.
    """
    sizes = _sizes(split, cut_after_position, max_length)
    left = np.argsort(-sizes, kind="stable")[: np.count_nonzero(sizes)]
    counts = np.bincount(split.rows, minlength=split.num_sentences)
    found: list[Batch] = []
    while len(left):
        T = max(1 << int(sizes[left[0]] - 1).bit_length(), _SHORTEST_ROW)
        # Long sentences begin rows of this length, shorter ones fill them up or wait for shorter rows.
        opens = T // 2 + 1 if T > _SHORTEST_ROW else 1
        T = min(T, -(-int(sizes[left].sum()) // 8) * 8)
        # Rows of very many tiny sentences would make room for as many examples in all rows.
        rows = best_fit(sizes[left].tolist(), T, counts=counts[left].tolist(), most=max(T // 4, 1), opens=opens)
        found += _packed_rows(split, [left[row] for row in rows], sizes, T, tokens_per_batch, row_multiple, pad_id)
        left = np.delete(left, np.concatenate(rows))
    return found


def _packed_rows(
    split: Split,
    rows: list[ndarray],
    sizes: Int[ndarray, " S"],
    T: int,
    tokens_per_batch: int,
    row_multiple: int,
    pad_id: int,
) -> list[Batch]:
    """Rows of the sentences given, cut to their sizes, as batches of one shape."""
    B, R = _rows_a_batch(len(rows), T, tokens_per_batch, row_multiple)

    # Of each sentence, in the order in which they lie: its row, its number in it, and where it starts.
    members = np.concatenate(rows)
    in_row = np.array([len(row) for row in rows])
    row = np.repeat(np.arange(len(rows)), in_row)
    number = np.arange(len(members)) - np.repeat(np.cumsum(in_row) - in_row, in_row)
    n = sizes[members]
    before = np.cumsum(n) - n
    start = before - np.repeat(before[number == 0], in_row)

    position = np.arange(n.sum()) - np.repeat(before, n)
    place = np.repeat(row * T + start, n) + position
    tokens, segments, positions = (np.full(R * T, fill, np.int32) for fill in (pad_id, 0, 0))
    tokens[place] = split.tokens[np.repeat(split.starts[members], n) + position]
    segments[place] = np.repeat(number + 1, n)
    positions[place] = position

    examples = _example_table(split)[members]
    which, slot = np.nonzero(examples >= 0)
    example, at = examples[which, slot], row[which]
    column = np.arange(len(at)) - np.searchsorted(at, at)
    read_at, index = (np.full((R, int(column.max()) + 1), fill, np.int32) for fill in (0, -1))
    read_at[at, column] = start[which] + split.positions[example]
    index[at, column] = example
    fields = [tokens.reshape(R, T), segments.reshape(R, T), positions.reshape(R, T), read_at, index]
    return [Batch(*(field[k : k + B] for field in fields)) for k in range(0, R, B)]


def _rows_a_batch(rows: int, length: int, tokens_per_batch: int, row_multiple: int) -> tuple[int, int]:
    """B, and the rows of all batches together: as even as multiples of 8 allow, so that the last one is nearly full."""
    most = max(tokens_per_batch // length // row_multiple, 1) * row_multiple
    count = -(-rows // most)
    step = row_multiple * max(8 // row_multiple, 1) if rows > 8 else row_multiple
    B = min(-(-rows // (count * step)) * step, most)
    return B, count * B


def padding_waste(split: Split, **options: Any) -> float:
    """The share of padded tokens in `batches(split, **options)`: work for nothing, between 0 and 1."""
    given = [
        (batch.tokens.size, batch.lengths[(batch.examples >= 0).any(1)].sum()) for batch in batches(split, **options)
    ]
    total, real = np.sum(given, axis=0)
    return float(1 - real / total)


def _sizes(split: Split, cut_after_position: bool, max_length: int | None) -> Int[ndarray, " S"]:
    """Returns how many tokens of each sentence are run: 0 where no example needs any."""
    if max_length is not None and (split.lengths > max_length).any():
        where = int(split.lengths.argmax())
        raise ValueError(
            f"sentence {where} has {split.lengths[where]} tokens, the model only {max_length} positions:"
            " prepare the examples anew with that maximum length."
        )
    ends = np.zeros(split.num_sentences, np.int64)
    np.maximum.at(ends, split.rows, split.positions + 1)
    return ends if cut_after_position else np.where(ends > 0, split.lengths, 0)


def _plan(
    sizes: Int[ndarray, " S"], max_length: int | None, tokens_per_batch: int, multiple: int, row_multiple: int
) -> list[tuple[Int[ndarray, " b"], int, int]]:
    """Returns the sentences of each batch, and its B and T: longest first, so every batch but the last one is full."""
    order = np.argsort(-sizes, kind="stable")[: np.count_nonzero(sizes)]
    plan: list[tuple[Int[ndarray, " b"], int, int]] = []
    B = T = start = 0
    while (left := len(order) - start) > 0:
        if left > B:  # else: the rest fits into the last shape, which costs no more than a new one
            T = min(_rung(int(sizes[order[start]]), multiple), max_length or 1 << 31)
            B = max(tokens_per_batch // T // row_multiple, 1) * row_multiple
            if not plan:  # few sentences: no more rows than they need
                B = min(B, -(-left // row_multiple) * row_multiple)
        plan.append((order[start : start + B], B, T))
        start += B
    return plan


def _rung(length: int, multiple: int) -> int:
    """The least of 1, 2, … 8, 10, 12, 14, 16, 20, 24, … times `multiple` (four an octave) that holds the length."""
    parts = -(-length // multiple)
    step = 1 << max((parts - 1).bit_length() - 3, 0)
    return multiple * -(-parts // step) * step


def _example_table(split: Split) -> Int32[ndarray, "S P"]:
    """The examples in each sentence, in their order; −1 where a sentence has fewer than the most."""
    by_row = np.argsort(split.rows, kind="stable")
    rows = split.rows[by_row]
    counts = np.bincount(rows, minlength=split.num_sentences)
    slots = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
    table = np.full((split.num_sentences, counts.max(initial=0)), -1, np.int32)
    table[rows, slots] = by_row
    return table


def examples_of(batches: Sequence[Padded] | Sequence[Batch]) -> Int[ndarray, " n"]:
    """The examples that stand in the batches, in the order in which they are read."""
    return np.concatenate([np.empty(0, np.int32), *(batch.examples[batch.examples >= 0] for batch in batches)])


def padding_mask(batch: Padded) -> Bool[ndarray, "B T"]:
    """True where a token is real."""
    return np.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
