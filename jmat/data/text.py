"""Whole sentences and the tokens to predict in them, for perplexity and for
distillation.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32
from numpy import ndarray

from jmat.data.batches import Batch
from jmat.data.examples import Split, mask_positions, target_tokens


class Text(NamedTuple):
    """Holds whole sentences with one row each, and what is predicted in them."""

    split: Split  # one example a sentence: its last token, or the masked one
    # masked models: the token behind the mask; causal ones predict every next token
    targets: Int[ndarray, " S"] | None


def whole_sentences(
    split: Split, mask_token: int | None = None, *, most: int | None = None
) -> Text:
    """Returns the sentences as a causal model predicts them, every token but the first;
    masked ones at the examples' positions.

    Args:
      split: sentences and positions; a causal model's positions are not looked at.
      mask_token: for masked models, the id that hides the token to predict.
      most: take only so many, the first.

    Raises:
      ValueError: no sentence has a second token.
    """
    if mask_token is not None:
        targets, split = target_tokens(split, masked=True)[:most], mask_positions(split, mask_token)
        chosen = np.arange(split.num_sentences)[:most]
    else:
        targets = None
        chosen = np.flatnonzero(split.lengths > 1)[:most]
    if len(chosen) == 0:
        raise ValueError(
            f"none of {split.num_sentences} sentences has a second token: there is nothing to "
            "predict."
        )
    lengths = split.lengths[chosen]
    positions = lengths - 1 if mask_token is None else split.positions[chosen]
    return Text(Split(split.tokens[split.places(chosen)], lengths, positions), targets)


def following_tokens(batch: Batch) -> Int32[ndarray, "B T"]:
    """Returns the token that comes after each one in its sentence; −1 after the last
    one, and in padding.
    """
    after, segments = (
        np.roll(field, -1, axis=1) for field in map(np.asarray, (batch.tokens, batch.segments))
    )
    known = np.asarray((batch.segments > 0) & (segments == batch.segments))
    known[:, -1] = False
    return np.where(known, after, np.int32(-1))
