"""Passes of a model that writes: prompts are read in pieces, then one token a step; and
the programs in which steps run on the device.

All steps of a text run in one program, a `jax.lax.while_loop` over the whole model,
which is compiled once for a number of rows and a length of the cache. `write` leaves it
after any number of steps, so that the host can look at the text, and goes on with the
same program. Blocks stand one behind the other in it: to loop over them, their weights
would have to be stacked, which takes the memory of the model once more.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from jmat.decode.sample import Law, draw, processed
from jmat.models.cache import NOWHERE, Cache
from jmat.models.context import Context
from jmat.models.edits import At
from jmat.models.family import Transformer
from jmat.models.sites import Site
from jmat.models.stack import behind, final_norm, run_blocks, run_embed, unembed
from jmat.runtime.annotations import Keywords, PyTree
from jmat.runtime.mesh import usual_batch

_SHORTEST = 8  # tokens of a piece: shorter prompts are padded


class State(NamedTuple):
    """Holds texts that are being written; N is the number of tokens that there is room
    for.

    Attributes:
      cache: has read all tokens but the last one of each row.
      tokens: the new tokens.
      scores: their log-probabilities, or None where nobody asked.
      written: how many each row has.
      going: which rows go on.
      seen: which tokens each text has, or None where there is no penalty for them.
    """

    cache: Cache
    tokens: Int[Array, "B N"]
    scores: Float[Array, "B N"] | None
    written: Int[Array, " B"]
    going: Bool[Array, " B"]
    seen: Bool[Array, "B V"] | None


class Rules(NamedTuple):
    """Holds what decides which token comes next and when a text ends, besides the model.

    Attributes:
      law: of the draw.
      sites: what is changed in the model.
      stops: tokens that end a text; −1 is none.
      most: the number of new tokens of a text.
      key: of random numbers.
    """

    law: Law
    sites: Mapping[str, Site]
    stops: Int[np.ndarray | Array, " n"]
    most: Int[np.ndarray | np.integer | Array, ""]
    key: Key[Array, ""]


# --- passes ---------------------------------------------------------------------------------------


def read(
    model: Transformer,
    inputs: Int[Array | np.ndarray, "B T"] | Float[Array, "B T D"],
    real: Bool[Array | np.ndarray, "B T"],
    cache: Cache,
    sites: Mapping[str, Site],
    *,
    start: int = 0,
    stop: int | None = None,
) -> tuple[Float[Array, "B T D"], Cache]:
    """Returns h_stop of tokens behind those of the cache, by default h_L, and the cache
    with them; padding lies on the right. Above 0, `start` reads h_start in place of
    tokens. Positions of `At` count from the first token of a text.
    """
    stop = model.config.layers if stop is None else stop
    columns = jnp.broadcast_to(jnp.arange(real.shape[1], dtype=jnp.int32), real.shape)
    segments = jnp.asarray(real, jnp.int32)
    context, cache = behind(cache, Context(columns, segments, np.int32(0)), start, stop)
    here = sites_here(sites, context.positions, segments)
    x = jnp.asarray(inputs)
    if start == 0:
        x = run_embed(model, x, context, None, here.get("embed"))
    x, _, longer = run_blocks(model, x, context, cache, here, None, start=start, stop=stop, keep=())
    assert longer is not None
    return x, longer


def read_prompts(
    model: Transformer,
    tokens: Int[np.ndarray, "B T"],
    lengths: Int[np.ndarray, " B"],
    cache: Cache,
    sites: Mapping[str, Site],
    piece: int,
) -> tuple[Float[Array, "B D"], Cache]:
    """Returns h_L at the last token of each prompt, and the cache that has read them.

    Long prompts are read in pieces of `piece` tokens, which bounds the memory that
    attention takes; short ones in one piece of 8, 16, 32, … tokens.
    """
    longest = max(int(lengths.max()), 1)
    if longest <= piece:
        piece = min(piece, max(_SHORTEST, 1 << (longest - 1).bit_length()))
    last = None
    for at in range(0, longest, piece):
        columns = at + np.arange(piece)
        real = columns < lengths[:, None]
        part = np.zeros(real.shape, np.int32)
        part[:, : tokens.shape[1] - at] = tokens[:, at : at + piece]
        x, cache = read(model, part, real, cache, sites)
        last = _at_the_end(x, lengths - 1 - at, last)
    assert last is not None
    return last, cache


def usual_piece(rows: int) -> int:
    """Returns how many tokens of long prompts are read at a time, a power of two."""
    most = max(usual_batch() // rows, 32)
    return 1 << (most.bit_length() - 1)


@jax.jit
def _at_the_end(
    x: Float[Array, "B T D"], column: Int[Array | np.ndarray, " B"], before: Array | None
) -> Float[Array, "B D"]:
    """Returns x at a column of each row; what was there before where the column is in
    another piece.
    """
    inside = jnp.clip(column, 0, x.shape[1] - 1)
    value = jax.vmap(lambda row, at: row[at])(x, inside)
    return value if before is None else jnp.where((column >= 0)[:, None], value, before)


def sites_here(
    sites: Mapping[str, Site],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"] | None = None,
) -> dict[str, Site]:
    """Returns sites whose positions in the texts are columns of these tokens; what is at
    other tokens changes nothing.
    """

    def columns(places: object) -> Int[Array, "*places"]:
        chosen = jnp.asarray(places)
        several = chosen[:, None] if chosen.ndim == 1 else chosen
        hit = positions[:, None, :] == several[:, :, None]
        hit = hit if segments is None else hit & (segments > 0)[:, None, :]
        column = jnp.where(hit.any(-1), jnp.argmax(hit, axis=-1), NOWHERE).astype(jnp.int32)
        return column[:, 0] if chosen.ndim == 1 else column

    return {
        name: At(columns(site.positions), site.site) if isinstance(site, At) else site
        for name, site in sites.items()
    }


# --- programs -------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("structure", "rows"), donate_argnames=("state",))
def first(
    leaves: list[Array],
    structure: PyTree,
    state: State,
    x: Float[Array, "B D"],
    rules: Rules,
    *,
    rows: NamedSharding | None,
) -> State:
    """Returns the state with the first new token of each row, from h_L at the ends of
    the prompts.

    `leaves` and `structure` are the model's, which are taken apart once: to take a model
    apart for every call takes longer than a step of a small one.
    """
    model = jax.tree.unflatten(structure, leaves)
    return placed(with_next(state, _last_logits(model, state, x, rules), rules), rows)


@functools.partial(jax.jit, static_argnames=("structure", "rows"), donate_argnames=("state",))
def write(
    leaves: list[Array],
    structure: PyTree,
    state: State,
    rules: Rules,
    until: Int[np.ndarray | np.integer | Array, ""],
    *,
    rows: NamedSharding | None,
) -> State:
    """Returns the state once the rows that go on have `until` new tokens."""
    model = jax.tree.unflatten(structure, leaves)

    def step(state: State) -> State:
        x, cache = read(model, last_tokens(state), state.going[:, None], state.cache, rules.sites)
        state = state._replace(cache=cache)
        return with_next(state, _last_logits(model, state, x[:, 0], rules), rules)

    return placed(jax.lax.while_loop(lambda state: goes_on(state, until), step, state), rows)


def goes_on(state: State, until: Int[np.ndarray | np.integer | Array, ""]) -> Bool[Array, ""]:
    """Returns whether some row that goes on has fewer new tokens than `until`."""
    return (state.going & (state.written < until)).any()


def next_places(state: State) -> Bool[Array, "B N"]:
    """Returns where the next token of each row that goes on stands among the new ones."""
    return (jnp.arange(state.tokens.shape[1]) == state.written[:, None]) & state.going[:, None]


def last_tokens(state: State) -> Int[Array, "B 1"]:
    """Returns the last token of each text, which the cache has not read."""
    return jnp.take_along_axis(state.tokens, jnp.maximum(state.written - 1, 0)[:, None], axis=1)


def head_at(
    model: Transformer,
    x: Float[Array, "B T D"],
    rules: Rules,
    at: Int[Array, "B T"],
    words: Int[Array | np.ndarray, " W"] | None = None,
) -> Float[Array, "B T W"]:
    """Returns logits of h_L at positions of the texts, of all words or of those given."""
    sites = {name: rules.sites[name] for name in ("final_norm", "logits") if name in rules.sites}
    here = sites_here(sites, at)
    normed = final_norm(model, x, here)
    if words is None:
        return unembed(model, normed, here)
    assert model.head is not None  # or the sites would have "logits", without which none is read
    return model.head(normed, model.embed.tokens.table[...], words)


def _last_logits(
    model: Transformer, state: State, x: Float[Array, "B D"], rules: Rules
) -> Float[Array, "B V"]:
    """Returns logits of h_L at the last token of each text that the cache has read."""
    return head_at(model, x[:, None], rules, state.cache.lengths[-1][:, None] - 1)[:, 0]


def with_next(state: State, logits: Float[Array, "B V"], rules: Rules) -> State:
    """Returns the state with one more token in each row that goes on, from its logits."""
    token = draw(processed(logits, state.seen, rules.law), rules.law, rules.key, state.written)
    place = next_places(state)
    scores = state.scores
    if scores is not None:
        score = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), token[:, None], axis=1)
        scores = jnp.where(place, score, scores)
    seen = state.seen
    if seen is not None:
        seen = seen | (jnp.arange(seen.shape[1]) == token[:, None])
    written = state.written + state.going.astype(jnp.int32)
    stops = (token[:, None] == rules.stops).any(1)
    return State(
        cache=state.cache,
        tokens=jnp.where(place, token[:, None], state.tokens),
        scores=scores,
        written=written,
        going=state.going & ~stops & (written < rules.most),
        seen=seen,
    )


def placed(state: State, rows: NamedSharding | None) -> State:
    """Returns the state where it was, so that its next program is the same: split over
    the devices as `rows`, or anywhere where there is one device.
    """
    if rows is None:
        return state

    over_columns = NamedSharding(rows.mesh, PartitionSpec(None, *rows.spec))
    lengths = jax.lax.with_sharding_constraint(state.cache.lengths, over_columns)
    cache = Cache(split_rows(state.cache.blocks, rows), lengths)
    others: Keywords = {
        name: split_rows(part, rows) for name, part in state._asdict().items() if name != "cache"
    }
    return State(cache=cache, **others)


def split_rows(tree: PyTree, rows: NamedSharding | None) -> PyTree:
    """Returns arrays whose first axis is split over the devices as `rows`."""
    return tree if rows is None else jax.lax.with_sharding_constraint(tree, rows)
