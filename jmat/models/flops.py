"""Work in floating-point operations (a multiply-add is two), for one example at the
position that is read.
"""

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from jmat.models.config import ModelConfig

Numbers = float | int | np.number | ndarray  # one, or one an example


def block_flops(config: ModelConfig, tokens: Numbers, context: Numbers) -> Numbers:
    """Returns the operations of one block over `tokens` positions that look at
    `context` positions each: projections, attention, feed-forward.
    """
    D, inner = config.width, config.heads * config.head_width
    kv = (config.kv_heads or config.heads) * config.head_width
    projections = 2 * D * (2 * inner + 2 * kv)
    feed_forward = 2 * D * config.ffn_width * (3 if config.gated_ffn else 2)
    attention = 4 * inner * context
    return tokens * (projections + feed_forward + attention)


def head_flops(config: ModelConfig, words: int | None = None) -> float:
    """Returns the operations of one evaluation of the head at one position, over the
    whole vocabulary or a short list of words.

    Masked models transform the stream first (D × D); OPT-350m projects it down to its
    narrower token table.
    """
    D, E = config.width, config.embed_width or config.width
    transform = 0 if config.causal else 2 * D**2
    projection = 2 * D * E if E != D else 0
    return float(transform + projection + 2 * E * (config.vocab_size if words is None else words))


def map_flops(config: ModelConfig) -> float:
    """Returns the operations of one D × D map at one position."""
    return float(2 * config.width**2)


def exit_flops(
    config: ModelConfig,
    exits: Int[ndarray, "S N"],
    tokens: Int[ndarray, " N"],
    *,
    check_every: int = 1,
    words: int | None = None,
    mapped: bool = True,
) -> Float[ndarray, "S N"]:
    """Returns the work of an example that leaves at a layer: its blocks over all its
    tokens, as nothing of them was computed before, and a map and a head evaluation for
    every check.

    Checks are made before running block l + 1 for l = 1 .. L − 1. A check over the
    whole vocabulary already is the prediction; with a short list of `words`, the whole
    head is evaluated once more at the exit. An exit at a layer without a check needs a
    map and the head, the end only the head.

    Args:
      config: of the model.
      exits: layer at which each example leaves, a row a setting.
      tokens: of each example, up to the one that is read.
      check_every: check only at layers that are multiples of this.
      words: that a check reads; None for the whole vocabulary.
      mapped: whether a matrix maps the stream before the head; `id` needs none.
    """
    mean_context = (tokens + 1) / 2 if config.causal else tokens
    blocks = exits * block_flops(config, tokens, mean_context)
    return blocks + _reading_flops(config, exits, check_every, words, mapped)


def token_exit_flops(
    config: ModelConfig,
    exits: Int[ndarray, "S N"],
    tokens: Int[ndarray, " N"],
    *,
    check_every: int = 1,
    words: int | None = None,
    mapped: bool = True,
) -> Float[ndarray, "S N"]:
    """Returns the work of one generated token that leaves at a layer: its blocks over
    itself alone, and the checks as in `exit_flops`, whose arguments it takes.

    The keys and values of earlier tokens are there. Filling in those that the token
    leaves out, for later tokens that run more blocks, is not counted.
    """
    blocks = exits * block_flops(config, 1, tokens)
    return blocks + _reading_flops(config, exits, check_every, words, mapped)


def _reading_flops(
    config: ModelConfig,
    exits: Int[ndarray, "S N"],
    check_every: int,
    words: int | None,
    mapped: bool,
) -> Float[ndarray, "S N"]:
    """Returns the work of the checks on the way and of the prediction itself."""
    jump = map_flops(config) if mapped else 0.0
    last = exits == config.layers
    checks = np.minimum(exits, config.layers - 1) // check_every
    checked = (exits > 0) & (exits % check_every == 0) & ~last
    each = jump + head_flops(config, words)
    head_at_end = np.where(checked & (words is None), 0, head_flops(config))
    return checks * each + head_at_end + np.where(checked | last, 0, jump)
