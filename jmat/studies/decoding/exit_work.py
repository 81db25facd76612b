"""The work of texts whose tokens left early, in blocks and floating-point operations."""

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from jmat.decode.exits import MAP, RECOMPUTE, Exits
from jmat.models.config import ModelConfig
from jmat.models.flops import block_flops, head_flops, map_flops


def blocks_run(layers: Int[ndarray, " n"], fill: str) -> Int[ndarray, " n"]:
    """Returns how many blocks were run over the token that each new token was predicted
    from; with `recompute`, those too that a later token needed.

    Args:
      layers: at which the tokens of one text left.
      fill: what skipped blocks keep.
    """
    if fill != RECOMPUTE:
        return layers
    return np.maximum.accumulate(layers[::-1])[::-1]


def token_flops(
    config: ModelConfig, layers: Int[ndarray, " n"], context: Int[ndarray, " n"], exits: Exits
) -> Float[ndarray, " n"]:
    """Returns the operations that each new token of one text took: blocks, looks, the
    prediction, and what skipped blocks keep.

    Args:
      config: of the model.
      layers: at which the tokens left.
      context: how many tokens each was predicted from.
      exits: with which the text was written.
    """
    L, looked_at = config.layers, np.asarray(exits.looked_at(config))
    words = None if exits.words is None else len(exits.words)
    looks = (looked_at <= layers[:, None]).sum(1)
    left = layers < L
    work = blocks_run(layers, exits.fill) * np.asarray(block_flops(config, 1, context), float)
    work += looks * (map_flops(config) + head_flops(config, words))
    # a look over the vocabulary is the prediction itself
    work += np.where(left & (words is None), 0, head_flops(config))
    if exits.fill != RECOMPUTE:
        kv_width = (config.kv_heads or config.heads) * config.head_width
        work += (L - layers) * 4 * config.width * kv_width
    if exits.fill == MAP:
        work += np.maximum(L - layers - 1, 0) * map_flops(config)
    return work


def full_flops(config: ModelConfig, context: Int[ndarray, " n"]) -> Float[ndarray, " n"]:
    """Returns the operations of tokens that the whole model writes."""
    blocks = config.layers * np.asarray(block_flops(config, 1, context), float)
    return blocks + head_flops(config)
