"""A forward pass that truly stops: blocks after the exit are never run. For measuring
what an early exit is worth in time.
"""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import Array, Float, Int
from numpy import ndarray

from jmat.forward import advance, enter
from jmat.metrics.predictions import top_2_gap
from jmat.models.family import Transformer
from jmat.models.sites import Site, gather


@dataclasses.dataclass(frozen=True)
class ExitRule:
    """Says when to check the confidence, and with which words of the head.

    Attributes:
      maps: layer → map to the final stream; the layers at which confidence is checked.
      words: ids of a short list that the check reads, at W/V of the head's cost; None
        for the whole vocabulary.
    """

    maps: Mapping[int, Site]
    words: Int[ndarray, " W"] | None = None


def run_until_sure(
    model: Transformer,
    tokens: Int[ndarray, "B T"],
    lengths: Int[ndarray, " B"],
    positions: Int[ndarray, " B"],
    thresholds: Float[ndarray, " B"],
    rule: ExitRule,
) -> tuple[Int[ndarray, " B"], Int[ndarray, " B"]]:
    """Predicts at one position of each row; a row leaves the batch at the first check
    that is above its threshold.

    The rows that stay are packed together, up to the next power of two, so the number
    of compiled programs stays small.

    Returns:
      The layer at which each row left (L: ran to the end), and the predicted token,
      read with the whole head.
    """
    L, B = model.config.layers, len(tokens)
    layers, predicted = np.full(B, L), np.zeros(B, np.int64)
    rows = np.arange(B)  # which row of the input each row of the stream is
    x, context = enter(model, tokens, mask=np.arange(tokens.shape[1]) < lengths[:, None])
    start = 0
    for layer in sorted(rule.maps):
        x = advance(model, x, context, start, layer)
        start = layer
        stand_in, gap = check(model, rule.maps[layer], x, positions[rows], rule.words)
        leaving = np.asarray(gap) > thresholds[rows]
        if leaving.any():
            top = np.asarray(predict(model, stand_in))
            layers[rows[leaving]], predicted[rows[leaving]] = layer, top[leaving]
            if leaving.all():
                return layers, predicted
            stay = np.flatnonzero(~leaving)
            # Filled up with repeats, which come to the same answers.
            stay = np.resize(stay, 1 << int(len(stay) - 1).bit_length())
            rows = rows[stay]
            x, context = jax.tree.map(
                lambda leaf, stay=stay: leaf[stay] if np.ndim(leaf) else leaf, (x, context)
            )
    x = advance(model, x, context, start, L)
    predicted[rows] = np.asarray(predict(model, gather(x, positions[rows])))
    return layers, predicted


def run_fully(
    model: Transformer,
    tokens: Int[ndarray, "B T"],
    lengths: Int[ndarray, " B"],
    positions: Int[ndarray, " B"],
) -> Int[ndarray, " B"]:
    """Runs the loop without checks, against which an early exit is timed."""
    x, context = enter(model, tokens, mask=np.arange(tokens.shape[1]) < lengths[:, None])
    x = advance(model, x, context, 0, model.config.layers)
    return np.asarray(predict(model, gather(x, positions)))


def check(
    model: Transformer,
    shortcut: Site,
    x: Float[Array, "B T D"],
    positions: Int[ndarray, " B"],
    words: Int[ndarray, " W"] | None = None,
) -> tuple[Float[Array, "B D"], Float[Array, " B"]]:
    """Returns what stands in for h_L at the positions, and the gap between the two
    largest probabilities of `words`.
    """
    return _check(
        model.final_norm, model.head, model.embed.tokens.table[...], shortcut, x, positions, words
    )


def predict(model: Transformer, x: Float[Array, "B D"]) -> Int[Array, " B"]:
    """Returns the top token after the final norm and the whole head."""
    return _predict(model.final_norm, model.head, model.embed.tokens.table[...], x)


@jax.jit
def _check(final_norm, head, table, shortcut, x, positions, words):
    stand_in = shortcut(gather(x, positions))
    return stand_in, top_2_gap(head(final_norm(stand_in), table, words))


@jax.jit
def _predict(final_norm, head, table, x):
    return head(final_norm(x), table).argmax(-1)
