"""Splits exits into numbers, which may change, and a plan, which decides the program that
lets tokens leave.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from jmat.decode.exits import Exits
from jmat.metrics.confidence import PATIENCE
from jmat.models.config import ModelConfig
from jmat.models.sites import Site


class Looks(NamedTuple):
    """Holds the numbers of `Exits`: others compile nothing new.

    Attributes:
      maps: of each layer that is looked at.
      fills: from a layer l that is looked at to what block k makes keys and values
        from, by (l, k).
      threshold: that confidence must exceed; λ where it falls along the text.
      length: mean length of a text; None where the threshold stays.
      words: that confidence is read over; None: all.
    """

    maps: Mapping[int, Site]
    fills: Mapping[tuple[int, int], Site]
    threshold: Float[np.ndarray | Array, ""]
    length: Float[np.ndarray | Array, ""] | None
    words: Int[np.ndarray | Array, " W"] | None


class Plan(NamedTuple):
    """Holds what decides the program: the layers that are looked at, the confidence, and
    how skipped blocks are filled.
    """

    looked_at: tuple[int, ...]
    confidence: str
    fill: str


def looks_of(exits: Exits, config: ModelConfig) -> tuple[Looks, Plan]:
    """Returns the numbers and the plan of checked exits."""
    looked_at = exits.looked_at(config)
    threshold = 0.0 if exits.threshold is None else float(exits.threshold)
    if exits.confidence == PATIENCE:
        threshold -= 0.5  # so many are enough
    looks = Looks(
        maps={layer: exits.maps[layer] for layer in looked_at},
        fills={pair: exits.fills[pair] for pair in exits.skipped(config)},
        threshold=np.asarray(threshold, np.float32),
        length=None if exits.length is None else np.asarray(exits.length, np.float32),
        words=None if exits.words is None else np.asarray(exits.words, np.int32),
    )
    return looks, Plan(looked_at, exits.confidence, exits.fill)
