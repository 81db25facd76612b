"""Fills the cache of skipped blocks with keys and values of the tokens that left before
them.

| | what block k keeps of a token that left at layer l |
|---|---|
| recompute | its own keys and values: blocks l .. k run when a later token needs them |
| copy | those that it computes from h_l in place of h_k (CALM, arXiv 2207.07061) |
| map | those that it computes from what a map makes of h_l, which stands in for h_k |
| direct | what a map makes of h_l: keys, before rotary positions, and values |

Block l itself reads h_l, so it has its own keys and values always.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jmat.decode.checking import put
from jmat.decode.draft import apply_map
from jmat.decode.exits import DIRECT, MAP
from jmat.decode.passes import Rules, read
from jmat.decode.plan import Looks, Plan
from jmat.maps.types import Constant
from jmat.models.cache import NOWHERE, Cache
from jmat.models.config import ModelConfig
from jmat.models.edits import apply_site
from jmat.models.family import Transformer
from jmat.models.sites import Site

_TOGETHER = 8  # tokens of a row that are made good in one pass, where rows are few
_IN_ALL = 32  # tokens of all rows in such a pass: most of them are padding where rows are many

Carried = TypeVar("Carried")


class Gaps(NamedTuple):
    """Holds the tokens that some blocks have not read yet.

    Block k has read the tokens in columns 0 .. `cache.lengths[k]` − 1 of a row. The next
    ones, which left before it, stand in their columns with the stream that enters the
    first block that has not read them.
    """

    streams: Float[Array, "B S D"]


def run_if(wanted: Bool[Array, ""], step: Callable[[Carried], Carried], carry: Carried) -> Carried:
    """Returns `step(carry)` where that is wanted, and the carry as it is where not.

    It is a loop of one turn or none, which changes the cache in place: `jax.lax.cond`
    has it copied in its branches.
    """

    def turn(given: tuple[Bool[Array, ""], Carried]) -> tuple[Bool[Array, ""], Carried]:
        return jnp.zeros((), bool), step(given[1])

    return jax.lax.while_loop(lambda given: given[0], turn, (wanted, carry))[1]


def catch_up(
    model: Transformer,
    gaps: Gaps,
    going: Bool[Array, " B"],
    at: Int[Array, " B"],
    cache: Cache,
    rules: Rules,
    *,
    start: int,
    stop: int,
) -> tuple[Float[Array, "B 1 D"], Cache, Gaps, Int[Array, ""]]:
    """Runs blocks `start` .. `stop − 1` over the token in column `at` of the rows that
    go on, and over those before it that these blocks have not read.

    Returns h_stop of the token, the cache, the gaps, and how often the blocks were run.
    """

    def left(cache: Cache) -> Int[Array, " B"]:
        """Returns how many tokens of each row are still to be read."""
        return jnp.where(going, at + 1 - cache.lengths[start], 0)

    def piece(
        carry: tuple[Cache, Gaps, Int[Array, ""]], size: int
    ) -> tuple[Cache, Gaps, Int[Array, ""]]:
        cache, gaps, runs = carry
        offsets = jnp.arange(size, dtype=jnp.int32)
        real = offsets < left(cache)[:, None]
        columns = jnp.where(real, cache.lengths[start][:, None] + offsets, NOWHERE)
        x, cache = read(
            model,
            _taken(gaps.streams, columns),
            real,
            cache,
            rules.sites,
            start=start,
            stop=stop,
        )
        return cache, Gaps(put(gaps.streams, x, columns)), runs + 1

    size = max(2, min(_TOGETHER, _IN_ALL // len(going)))
    carry = (cache, gaps, jnp.zeros((), jnp.int32))
    carry = jax.lax.while_loop(
        lambda carry: left(carry[0]).max() > 1, lambda carry: piece(carry, size), carry
    )
    # One token takes less time than several, of which all but one are padding.
    cache, gaps, runs = run_if(left(carry[0]).max() > 0, lambda carry: piece(carry, 1), carry)
    return _taken(gaps.streams, at[:, None]), cache, gaps, runs


def fill_in(
    model: Transformer,
    x: Float[Array, "B 1 D"],
    leaves: Bool[Array, " B"],
    cache: Cache,
    rules: Rules,
    looks: Looks,
    plan: Plan,
    layer: int,
) -> Cache:
    """Returns the cache with something in the blocks from `layer` on, in the rows whose
    token leaves with the stream x.

    Each block reads its input. What it makes of that is not used, so the compiler leaves
    out all but keys and values.
    """
    for k in range(layer, model.config.layers):
        given, sites = x, rules.sites
        if k > layer and plan.fill == MAP:
            given = apply_map(looks.fills[layer, k], x)
        elif k > layer and plan.fill == DIRECT:
            pair = keys_and_values(looks.fills[layer, k], x, model.config)
            names = (f"block.{k}.attn.k", f"block.{k}.attn.v")
            sites = {**sites, **dict(zip(names, map(Constant, pair), strict=True))}
        _, cache = read(model, given, leaves[:, None], cache, sites, start=k, stop=k + 1)
    return cache


@jax.vmap
def _taken(row: Float[Array, "S D"], columns: Int[Array, " g"]) -> Float[Array, "g D"]:
    """Returns the streams in some columns of a row; zeros past its end."""
    return row.at[columns].get(mode="fill", fill_value=0)


def keys_and_values(
    site: Site, x: Float[Array, "B 1 D"], config: ModelConfig
) -> tuple[Float[Array, "B 1 G K"], Float[Array, "B 1 G K"]]:
    """Returns the keys and the values of a block that a map gives. Raises ValueError
    where it leads to another width.
    """
    G, K = config.kv_heads or config.heads, config.head_width
    shape = (*x.shape[:2], 2 * G * K)
    both = apply_site("map", site, lambda: x, x, shape, x.dtype, None)
    both = both.reshape(*x.shape[:2], 2, G, K)
    return both[:, :, 0], both[:, :, 1]
