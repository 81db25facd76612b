"""Examples → batches of few shapes, since each shape compiles a program: one sentence a
row, or several.

Everything is numpy, on the host. Letters: B rows of a batch, T length, P examples a
row, S sentences.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np
from jaxtyping import Array, Int, Int32
from numpy import ndarray

from jmat.data.examples import Split
from jmat.data.packing import best_fit, lay_out
from jmat.runtime.shapes import rung

# The shortest row that sentences share. What attention costs grows with the row, what padding costs
# shrinks.
_SHORTEST_ROW = 64


class Where(TypedDict):
    """Holds the arguments of `jmat.run` that say where each token stands: [B, T] each."""

    segments: Int32[Array | ndarray, "B T"]
    positions: Int32[Array | ndarray, "B T"]


class Batch(NamedTuple):
    """Holds rows of tokens as a model reads them: one text a row, or several that are
    blind to one another.

    Attributes:
      tokens: ids [B, T]; padding holds any valid id.
      segments: [B, T]; which text of its row a token belongs to, from 1; 0 is padding.
      positions: [B, T]; index of each token in its text, from 0.
      read_at: [B, P]; columns of the row at which examples are read; 0 where there is
        none. P may be 0.
      examples: [B, P]; number of each example, from 0; −1 where there is none.
    """

    tokens: Int32[Array | ndarray, "B T"]
    segments: Int32[Array | ndarray, "B T"]
    positions: Int32[Array | ndarray, "B T"]
    read_at: Int32[Array | ndarray, "B P"]
    examples: Int32[Array | ndarray, "B P"]

    @property
    def where(self) -> Where:
        """Returns the arguments of `jmat.run` that say where each token stands:
        `segments` and `positions`.
        """
        return {"segments": self.segments, "positions": self.positions}

    @property
    def lengths(self) -> Int[Array | ndarray, " B"]:
        """Returns the number of real tokens in each row."""
        return (self.segments > 0).sum(1)


def padded_batches(
    split: Split,
    *,
    cut_after_position: bool,
    max_length: int | None = None,
    tokens_per_batch: int = 4096,
    multiple: int = 8,
    row_multiple: int = 1,
    pad_id: int = 0,
) -> list[Batch]:
    """Returns batches with one sentence a row that hold every example once; the longest
    sentences come first.

    T is the longest sentence's length rounded up to 1, 2, … 8, 10, 12, 14, 16, 20, 24,
    … times `multiple`, and B is `tokens_per_batch / T`. Only the last batch can be
    short, and is filled with empty rows.

    Args:
      split: sentences without an example are left out.
      cut_after_position: leave out what follows a sentence's last example; a causal
        model does not see it.
      max_length: the model's positions; T never exceeds it.
      tokens_per_batch: B·T at most, as long as one row (or `row_multiple` rows) fits.
      multiple: T is a multiple of this, unless `max_length` is less.
      row_multiple: B is a multiple of this: the number of devices over which the rows
        are sharded.
      pad_id: any valid token id; padding is masked.

    Raises:
      ValueError: a sentence is longer than `max_length`.
    """
    sizes = _sizes(split, cut_after_position, max_length)
    plan = _plan(sizes, max_length, tokens_per_batch, multiple, row_multiple)
    # of one sentence: all batches have room for as many
    most = int(np.bincount(split.rows, minlength=1).max())
    return [_fill(split, [*chosen[:, None]], sizes, T, B, pad_id, most) for chosen, B, T in plan]


def packed(
    split: Split,
    *,
    cut_after_position: bool,
    max_length: int | None = None,
    tokens_per_batch: int = 4096,
    row_multiple: int = 1,
    pad_id: int = 0,
) -> list[Batch]:
    """Returns batches with several sentences a row that hold every example once, with
    little padding.

    Sentences share rows of 64 tokens; longer ones begin rows of 128, 256, …. Batches of
    one row length have one shape. Takes the arguments of `padded_batches`, and raises
    what it raises.
    """
    sizes = _sizes(split, cut_after_position, max_length)
    left = np.argsort(-sizes, kind="stable")[: np.count_nonzero(sizes)]
    counts = np.bincount(split.rows, minlength=split.num_sentences)
    batches: list[Batch] = []
    while len(left):
        T = max(1 << int(sizes[left[0]] - 1).bit_length(), _SHORTEST_ROW)
        # Long sentences begin rows of this length, shorter ones fill them up or wait for shorter
        # rows.
        opens = T // 2 + 1 if T > _SHORTEST_ROW else 1
        T = min(T, -(-int(sizes[left].sum()) // 8) * 8)
        # Rows of very many tiny sentences would make room for as many examples in all rows. That is
        # no loss only where one sentence alone has more.
        most = max(T // 4, 1) if counts[left].max() <= T // 4 else T
        rows = best_fit(
            sizes[left].tolist(), T, counts=counts[left].tolist(), most=most, opens=opens
        )
        B, R = _rows_a_batch(len(rows), T, tokens_per_batch, row_multiple)
        whole = _fill(split, [left[row] for row in rows], sizes, T, R, pad_id)
        batches += [Batch(*(field[k : k + B] for field in whole)) for k in range(0, R, B)]
        left = np.delete(left, np.concatenate(rows))
    return batches


def _fill(
    split: Split,
    rows: Sequence[Int[ndarray, " _"]],
    sizes: Int[ndarray, " S"],
    T: int,
    R: int,
    pad_id: int,
    most_examples: int = 1,
) -> Batch:
    """Returns R rows of T places, filled with the sentences given for each, cut to
    their sizes.

    All rows have room for `most_examples` at least.
    """
    places = lay_out(rows, sizes, T, count=R)
    tokens = np.full(R * T, pad_id, np.int32)
    of_sentences = np.repeat(split.starts[places.members], sizes[places.members])
    tokens[places.of_token] = split.tokens[
        of_sentences + places.positions.reshape(-1)[places.of_token]
    ]

    examples = _example_table(split)[places.members]
    which, slot = np.nonzero(examples >= 0)
    example, at = examples[which, slot], places.row[which]
    column = np.arange(len(at)) - np.searchsorted(at, at)
    P = max(int(column.max()) + 1, most_examples)
    read_at, numbers = (np.full((R, P), fill, np.int32) for fill in (0, -1))
    read_at[at, column] = places.start[which] + split.positions[example]
    numbers[at, column] = example
    return Batch(tokens.reshape(R, T), places.segments, places.positions, read_at, numbers)


def _rows_a_batch(
    rows: int, length: int, tokens_per_batch: int, row_multiple: int
) -> tuple[int, int]:
    """Returns B, and the rows of all batches together: as even as multiples of 8 allow,
    so that the last one is nearly full.
    """
    most = max(tokens_per_batch // length // row_multiple, 1) * row_multiple
    count = -(-rows // most)
    step = row_multiple * max(8 // row_multiple, 1) if rows > 8 else row_multiple
    B = min(-(-rows // (count * step)) * step, most)
    return B, count * B


def padding_waste(split: Split, **options: Any) -> float:
    """Returns the share of padding in `padded_batches(split, **options)`: work for
    nothing, between 0 and 1.
    """
    batches = padded_batches(split, **options)
    return float(
        1
        - sum(batch.lengths.sum() for batch in batches)
        / sum(batch.tokens.size for batch in batches)
    )


def _sizes(split: Split, cut_after_position: bool, max_length: int | None) -> Int[ndarray, " S"]:
    """Returns how many tokens of each sentence are run: 0 where no example needs any."""
    if max_length is not None and (split.lengths > max_length).any():
        where = int(split.lengths.argmax())
        raise ValueError(
            f"sentence {where} has {split.lengths[where]} tokens, and the model reads {max_length} "
            f"at most: cut texts with jmat.encode(tokenizer, texts, max_length={max_length}), and "
            f"give the batch in their place; examples are prepared with max_length={max_length}."
        )
    ends = np.zeros(split.num_sentences, np.int64)
    np.maximum.at(ends, split.rows, split.positions + 1)
    return ends if cut_after_position else np.where(ends > 0, split.lengths, 0)


def _plan(
    sizes: Int[ndarray, " S"],
    max_length: int | None,
    tokens_per_batch: int,
    multiple: int,
    row_multiple: int,
) -> list[tuple[Int[ndarray, " b"], int, int]]:
    """Returns the sentences of each batch, and its B and T: longest first, so every
    batch but the last one is full.
    """
    order = np.argsort(-sizes, kind="stable")[: np.count_nonzero(sizes)]
    plan: list[tuple[Int[ndarray, " b"], int, int]] = []
    B = T = start = 0
    while (left := len(order) - start) > 0:
        if left > B:  # else: the rest fits into the last shape, which costs no more than a new one
            T = min(rung(int(sizes[order[start]]), multiple), max_length or 1 << 31)
            B = max(tokens_per_batch // T // row_multiple, 1) * row_multiple
            if not plan:  # few sentences: no more rows than they need
                B = min(B, -(-left // row_multiple) * row_multiple)
        plan.append((order[start : start + B], B, T))
        start += B
    return plan


def _example_table(split: Split) -> Int32[ndarray, "S P"]:
    """Returns the examples in each sentence, in their order; −1 where a sentence has
    fewer than the most.
    """
    by_row = np.argsort(split.rows, kind="stable")
    rows = split.rows[by_row]
    counts = np.bincount(rows, minlength=split.num_sentences)
    slots = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
    table = np.full((split.num_sentences, counts.max(initial=0)), -1, np.int32)
    table[rows, slots] = by_row
    return table
