"""Self-speculation: a few blocks draft tokens, and the others check them in one pass.

What is written is what the whole model would write: greedily the same tokens, but where
two are equally likely up to rounding, and else tokens of the same law. For the latter a
drafted token x, of probability q(x) in the draft and p(x) in the model, is accepted
with probability min(1, p(x) / q(x)). Where it is not, a token is drawn from (p − q)₊,
normalised, in its place (Leviathan et al. 2023, arXiv 2211.17192).

A cycle reads the last token and the drafts behind it through the lower blocks, one by
one, and keeps their streams. The upper blocks go on from these streams, so nothing is
computed twice. Then the ends of the texts that were not accepted are taken back from
the cache.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from jmat.decode.draft import DraftCounts, apply_map
from jmat.decode.passes import Rules, State, head_at, last_tokens, placed, read
from jmat.decode.sample import draw, processed
from jmat.models.cache import NOWHERE, Cache
from jmat.models.family import Transformer
from jmat.models.sites import Site
from jmat.models.stack import model_dtype
from jmat.runtime.annotations import PyTree

# What random numbers are for: each use has a stream of its own, with a number that no row has.
_DRAFT, _ACCEPT, _INSTEAD = 2**31 + 1, 2**31 + 2, 2**31 + 3


class _Drafted(NamedTuple):
    """Holds the drafts of a cycle.

    Attributes:
      cache: its lower blocks have read the last token of each text and its drafts.
      streams: h_layer of these tokens.
      tokens: the drafts.
      lengths: how many each row has.
      logits: from which they were drawn; None where the most likely ones are taken.
      going: which rows still draft.
      step: number of tokens that were drafted so far, of the row with the most.
    """

    cache: Cache
    streams: Float[Array, "B g1 D"]
    tokens: Int[Array, "B g"]
    lengths: Int[Array, " B"]
    logits: Float[Array, "B g V"] | None
    going: Bool[Array, " B"]
    step: Int[Array, ""]


@functools.partial(
    jax.jit,
    static_argnames=("structure", "layer", "tokens", "rows"),
    donate_argnames=("state", "counts"),
)
def write_drafted(
    leaves: list[Array],
    structure: PyTree,
    state: State,
    counts: DraftCounts,
    rules: Rules,
    stand_in: Site,
    least: Float[np.ndarray | Array, ""],
    until: Int[np.ndarray | np.integer | Array, ""],
    *,
    layer: int,
    tokens: int,
    rows: NamedSharding | None,
) -> tuple[State, DraftCounts]:
    """Returns the state once all rows that go on have `until` new tokens at least, and
    the counts of drafts.
    """
    model = jax.tree.unflatten(structure, leaves)

    def goes_on(carry: tuple[State, DraftCounts]) -> Bool[Array, ""]:
        state, _ = carry
        return (state.going & (state.written < until)).any()

    def cycle(carry: tuple[State, DraftCounts]) -> tuple[State, DraftCounts]:
        state, counts = carry
        drafted = _draft(model, state, rules, stand_in, least, layer=layer, tokens=tokens)
        return _checked(model, state, counts, drafted, rules, layer=layer)

    state, counts = jax.lax.while_loop(goes_on, cycle, (state, counts))
    return placed(state, rows), counts


def _draft(
    model: Transformer,
    state: State,
    rules: Rules,
    stand_in: Site,
    least: Float[np.ndarray | Array, ""],
    *,
    layer: int,
    tokens: int,
) -> _Drafted:
    """Returns the drafts behind the texts, and their streams."""
    B, V, D = len(state.going), model.config.vocab_size, model.config.width
    last = last_tokens(state)

    def read_one(drafted: _Drafted) -> _Drafted:
        """Reads each row's last token through the lower blocks."""
        before = jnp.maximum(drafted.step - 1, 0)
        token = jnp.where(drafted.step == 0, last[:, 0], drafted.tokens[:, before])
        x, cache = read(
            model, token[:, None], drafted.going[:, None], drafted.cache, rules.sites, stop=layer
        )
        streams = jnp.where(drafted.going[:, None, None], x, 0)
        streams = jax.lax.dynamic_update_slice_in_dim(
            drafted.streams, streams, drafted.step, axis=1
        )
        return drafted._replace(cache=cache, streams=streams)

    def step(drafted: _Drafted) -> _Drafted:
        drafted = read_one(drafted)
        x = jax.lax.dynamic_slice_in_dim(drafted.streams, drafted.step, 1, axis=1)
        at = state.cache.lengths[-1][:, None] + drafted.step
        scores = head_at(model, apply_map(stand_in, x), rules, at)[:, 0]
        drawn_from = processed(scores, None, rules.law)
        key = jax.random.fold_in(rules.key, _DRAFT)
        token = draw(drawn_from, rules.law, key, state.written + drafted.step)
        # The drawn token may not decide: what is drafted would then depend on it, and so the law.
        likely = jnp.max(jax.nn.softmax(scores, axis=-1), axis=-1) >= least
        logits = drafted.logits
        if logits is not None:
            logits = jax.lax.dynamic_update_slice_in_dim(
                logits, drawn_from[:, None], drafted.step, axis=1
            )
        going = drafted.going & likely
        return drafted._replace(
            tokens=jax.lax.dynamic_update_slice_in_dim(
                drafted.tokens, token[:, None], drafted.step, axis=1
            ),
            lengths=drafted.lengths + going.astype(jnp.int32),
            logits=logits,
            going=going,
            step=drafted.step + 1,
        )

    drafted = _Drafted(
        cache=state.cache,
        streams=jnp.zeros((B, tokens + 1, D), model_dtype(model)),
        tokens=jnp.zeros((B, tokens), jnp.int32),
        lengths=jnp.zeros(B, jnp.int32),
        logits=None if rules.law.temperature is None else jnp.zeros((B, tokens, V)),
        going=state.going,
        step=jnp.zeros((), jnp.int32),
    )
    drafted = jax.lax.while_loop(
        lambda drafted: (drafted.step < tokens) & drafted.going.any(), step, drafted
    )
    # The last draft is read, too: where it is accepted, one more token comes behind it.
    return jax.lax.cond(drafted.going.any(), read_one, lambda drafted: drafted, drafted)


def _checked(
    model: Transformer,
    state: State,
    counts: DraftCounts,
    drafted: _Drafted,
    rules: Rules,
    *,
    layer: int,
) -> tuple[State, DraftCounts]:
    """Returns the state with the drafts that the whole model accepts, and its own token
    behind them.
    """
    going, before = state.going, state.cache.lengths[-1]
    columns = jnp.arange(drafted.streams.shape[1], dtype=jnp.int32)
    real = going[:, None] & (columns <= drafted.lengths[:, None])
    x, cache = read(model, drafted.streams, real, drafted.cache, rules.sites, start=layer)
    scores = head_at(model, x, rules, before[:, None] + columns)
    accepted, new = _accepted(scores, drafted, rules, state.written)

    count = jnp.minimum(accepted + 1, rules.most - state.written)
    stops = (new[:, :, None] == rules.stops).any(-1) & (columns < count[:, None])
    stopped = stops.any(1)
    count = jnp.where(stopped, jnp.argmax(stops, axis=1).astype(jnp.int32) + 1, count)
    count = jnp.where(going, count, 0)
    places = jnp.where(columns < count[:, None], state.written[:, None] + columns, NOWHERE)
    kept = state.scores
    if kept is not None:
        log_p = jnp.take_along_axis(jax.nn.log_softmax(scores, axis=-1), new[:, :, None], axis=2)
        kept = _put(kept, log_p[:, :, 0], places)
    written = state.written + count
    counts = DraftCounts(
        counts.cycles + going.astype(jnp.int32),
        counts.drafted + jnp.where(going, drafted.lengths, 0),
        counts.accepted + jnp.minimum(accepted, count),
    )
    return state._replace(
        cache=cache.with_lengths((before + count)[None]),
        tokens=_put(state.tokens, new, places),
        scores=kept,
        written=written,
        going=going & ~stopped & (written < rules.most),
    ), counts


@jax.vmap
def _put(row: Array, new: Array, places: Int[Array, " g1"]) -> Array:
    """Returns a row with new values in places; those past its end are dropped."""
    return row.at[places].set(new, mode="drop")


def _accepted(
    scores: Float[Array, "B g1 V"], drafted: _Drafted, rules: Rules, written: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Int[Array, "B g1"]]:
    """Returns how many drafts of each row are accepted, and its new tokens: these drafts
    and one token of the model.
    """
    most = drafted.tokens.shape[1]
    columns = jnp.arange(most + 1, dtype=jnp.int32)
    there = columns[:-1] < drafted.lengths[:, None]
    if drafted.logits is None:
        own = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        agrees = there & (drafted.tokens == own[:, :-1])
        return jnp.cumprod(agrees.astype(jnp.int32), axis=1).sum(1), own
    law = rules.law
    V = scores.shape[-1]
    p = jax.nn.softmax(processed(scores.reshape(-1, V), None, law), axis=-1).reshape(scores.shape)
    q = jnp.where(there[:, :, None], jax.nn.softmax(drafted.logits, axis=-1), 0)
    u = _uniform(jax.random.fold_in(rules.key, _ACCEPT), written[:, None] + columns[:-1])
    of_p, of_q = (
        jnp.take_along_axis(each, drafted.tokens[:, :, None], axis=2)[:, :, 0]
        for each in (p[:, :-1], q)
    )
    agrees = there & (u * of_q < of_p)
    accepted = jnp.cumprod(agrees.astype(jnp.int32), axis=1).sum(1)
    # where nothing was drafted, q is 0, and the token is drawn from p itself
    rest = jnp.maximum(p - jnp.pad(q, ((0, 0), (0, 1), (0, 0))), 0)
    rest = jnp.take_along_axis(rest, accepted[:, None, None], axis=1)[:, 0]
    instead = draw(jnp.log(rest), law, jax.random.fold_in(rules.key, _INSTEAD), written + accepted)
    drafts = jnp.pad(drafted.tokens, ((0, 0), (0, 1)))
    return accepted, jnp.where(columns < accepted[:, None], drafts, instead[:, None])


def _uniform(key: Array, steps: Int[Array, "B g"]) -> Float[Array, "B g"]:
    """Returns a number from 0 to 1 for each row and step."""

    def one(row: Int[Array, ""], step: Int[Array, ""]) -> Float[Array, ""]:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, row), step))

    rows = jnp.broadcast_to(jnp.arange(len(steps), dtype=jnp.int32)[:, None], steps.shape)
    return jax.vmap(jax.vmap(one))(rows, steps)
