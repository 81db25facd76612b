"""Says what a block sees besides the stream, and how stand-ins for its parts are called."""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jmat.models.cache import Memory


class Context(NamedTuple):
    """Holds the inputs of a block besides the stream."""

    positions: Int[Array, "B T"]  # index of each token in its own text, from 0
    # which text a token belongs to; 0 is padding; None: one text a row, no padding
    segments: Int[Array, "B T"] | None
    layer: Int[
        Array | np.ndarray | np.integer, ""
    ]  # 0-based index of the block; traced, so that all blocks share one compiled program
    memory: Memory | None = None  # of the tokens before, while a block with a cache is traced


class NeedsContext:
    """Marks a stand-in that is called as `site(x, context)`, all others being called as
    `site(x)`.
    """

    def __call__(self, x: Float[Array, "B T D"], context: Context) -> Float[Array, "B T D"]:
        """Returns what stands in for the part's output."""
        raise NotImplementedError


class IgnoresInput:
    """Marks a stand-in that does not look at its input: `site.fill(shape)` is called
    instead of `site(x)`.

    `shape` is that of the site's values. So one stand-in serves sites of all shapes,
    `embed` too.
    """

    def fill(self, shape: tuple[int, ...]) -> jax.Array:
        """Returns the values of a site of this shape."""
        raise NotImplementedError


class IgnoresPadding:
    """Marks a stand-in whose values at real tokens are the same however far a row is
    padded on the right.

    `jmat.run` pads rows of tokens to a few lengths only with such stand-ins; with
    others, every length is a program.
    """
