"""Prompts: texts cut to a few tokens, in batches of a few lengths, and the positions of
each that count.

Batches of all lengths come mixed, in an order that the seed draws: so the first ones
are a sample of all texts, and a pass may end early.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int, Int32
from numpy import ndarray

from jmat.data.examples import Split

_SHORTEST_ROW = 32


class PromptBatch(NamedTuple):
    """Holds one prompt a row.

    Attributes:
      tokens: ids [B, T]; padding holds 0.
      segments: [B, T]; 1 where a token is real, else 0.
      positions: [B, T]; index of each token in its prompt, from 0.
      counted: [B, T]; 1 at the positions that count, else 0.
      examples: [B, 1]; number of each prompt, from 0; −1 in an empty row.
    """

    tokens: Int32[ndarray, "B T"]
    segments: Int32[ndarray, "B T"]
    positions: Int32[ndarray, "B T"]
    counted: Float32[ndarray, "B T"]
    examples: Int32[ndarray, "B 1"]

    @property
    def inputs(self) -> tuple[ndarray, ndarray, ndarray, ndarray]:
        """Returns what goes to the devices: tokens, segments, positions and counted."""
        return self.tokens, self.segments, self.positions, self.counted


def prompt_batches(
    split: Split,
    *,
    max_tokens: int,
    skip_first: int,
    rows: int,
    fewest: int = 2,
    seed: int = 0,
) -> list[PromptBatch]:
    """Returns batches of the texts of a split that are long enough.

    Rows are 32, 64, 128, … tokens long, and at most `max_tokens`.

    Args:
      split: the texts; its examples do not matter.
      max_tokens: tokens at which a text is cut.
      skip_first: first positions of a text that do not count. Its last one never does.
      rows: B.
      fewest: prompts that are needed.
      seed: draws the order.

    Raises:
      ValueError: fewer than `fewest` texts have a position that counts.
    """
    sizes = np.minimum(split.lengths, max_tokens)
    needed = skip_first + 2
    if max_tokens < needed or (found := int((sizes >= needed).sum())) < fewest:
        what = (
            f"prompts are cut to {max_tokens} tokens"
            if max_tokens < needed
            else f"{found} of {len(sizes)} texts have {needed} tokens or more; at least {fewest} "
            "such texts are needed"
        )
        raise ValueError(
            f"{what}: of each, the first {skip_first} tokens and the last one are left out. Give "
            "longer texts, or a smaller skip_first."
        )
    order = np.random.default_rng(seed).permutation(np.flatnonzero(sizes >= needed))
    lengths = _row_lengths(sizes[order], max_tokens)
    planned: list[tuple[float, int, Int[ndarray, " b"]]] = []
    for T in np.unique(lengths).tolist():
        members = order[lengths == T]
        count = -(-len(members) // rows)
        # the share of the bucket that is done when half of this batch is: buckets come mixed
        planned += [
            ((k + 0.5) / count, T, members[k * rows : (k + 1) * rows]) for k in range(count)
        ]
    planned.sort(key=lambda each: each[:2])
    return [_filled(split, sizes, members, T, rows, skip_first) for _, T, members in planned]


def _row_lengths(sizes: Int[ndarray, " n"], max_tokens: int) -> Int[ndarray, " n"]:
    """Returns the row length of each prompt: the next power of two, 32 at least, and
    `max_tokens` at most.
    """
    octave = np.ceil(np.log2(np.maximum(sizes, _SHORTEST_ROW))).astype(np.int64)
    return np.minimum(1 << octave, max_tokens)


def _filled(
    split: Split,
    sizes: Int[ndarray, " S"],
    members: Sequence[int] | Int[ndarray, " b"],
    T: int,
    rows: int,
    skip_first: int,
) -> PromptBatch:
    tokens, real = np.zeros((rows, T), np.int32), np.zeros((rows, T), bool)
    counted, examples = np.zeros((rows, T), np.float32), np.full((rows, 1), -1, np.int32)
    starts = split.starts
    for row, number in enumerate(members):
        size, start = int(sizes[number]), int(starts[number])
        tokens[row, :size] = split.tokens[start : start + size]
        real[row, :size] = True
        counted[row, skip_first : size - 1] = 1
        examples[row] = number
    positions = np.where(real, np.arange(T), 0).astype(np.int32)
    return PromptBatch(tokens, real.astype(np.int32), positions, counted, examples)
