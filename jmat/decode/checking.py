"""Checks drafts: one pass of the blocks that did not draft says which of the drafted tokens
the whole model accepts.

A drafted token x, of probability q(x) in the draft and p(x) in the model, is accepted with
probability min(1, p(x) / q(x)). Where it is not, a token is drawn from (p − q)₊,
normalised, in its place (Leviathan et al. 2023, arXiv 2211.17192). Greedily, it is accepted
where it is the model's most likely token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from jmat.decode.passes import Rules, State, head_at, read
from jmat.decode.sample import draw, processed
from jmat.models.cache import Cache
from jmat.models.family import Transformer

# What random numbers are for: each use has a stream of its own, with a number that no row has.
DRAFT, _ACCEPT, _INSTEAD = 2**31 + 1, 2**31 + 2, 2**31 + 3


class Drafted(NamedTuple):
    """Holds the drafts of a cycle.

    Attributes:
      cache: the blocks that drafted have read the last token of each text and its drafts.
      inputs: what the other blocks read: the streams of these tokens, or where no block
        drafted, the tokens.
      tokens: the drafts.
      lengths: how many each row has.
      logits: from which they were drawn, of all words or of those in `words`; None where
        there was one choice: the most likely token, or a copy.
      words: ids that the logits are of; None: all.
    """

    cache: Cache
    inputs: Float[Array, "B g1 D"] | Int[Array, "B g1"]
    tokens: Int[Array, "B g"]
    lengths: Int[Array, " B"]
    logits: Float[Array, "B g W"] | None
    words: Int[Array | np.ndarray, " W"] | None = None


class Check(NamedTuple):
    """Holds what a check found, beside the longer texts.

    Attributes:
      final: h_L of the last token of each text and its drafts.
      new: the new tokens.
      taken: how many of them each row takes.
      accepted: how many of these are drafts.
    """

    final: Float[Array, "B g1 D"]
    new: Int[Array, "B g1"]
    taken: Int[Array, " B"]
    accepted: Int[Array, " B"]


def checked(
    model: Transformer, state: State, drafted: Drafted, rules: Rules, *, layer: int
) -> tuple[State, Check]:
    """Returns the state with the drafts that the whole model accepts, and its own token
    behind them. Blocks below `layer` have drafted.
    """
    going, before = state.going, state.cache.lengths[-1]
    columns = jnp.arange(drafted.inputs.shape[1], dtype=jnp.int32)
    real = going[:, None] & (columns <= drafted.lengths[:, None])
    x, cache = read(model, drafted.inputs, real, drafted.cache, rules.sites, start=layer)
    scores = head_at(model, x, rules, before[:, None] + columns)
    accepted, new = _accepted(scores, drafted, rules, state.written)

    count = jnp.minimum(accepted + 1, rules.most - state.written)
    stops = (new[:, :, None] == rules.stops).any(-1) & (columns < count[:, None])
    stopped = stops.any(1)
    count = jnp.minimum(count, _first(stops) + 1)
    count = jnp.where(going, count, 0)
    kept = state.scores
    if kept is not None:
        log_p = jnp.take_along_axis(jax.nn.log_softmax(scores, axis=-1), new[:, :, None], axis=2)
        kept = spliced(kept, log_p[:, :, 0], state.written, count)
    written = state.written + count
    longer = state._replace(
        cache=cache.with_lengths((before + count)[None]),
        tokens=spliced(state.tokens, new, state.written, count),
        scores=kept,
        written=written,
        going=going & ~stopped & (written < rules.most),
    )
    return longer, Check(x, new, count, jnp.minimum(accepted, count))


@jax.vmap
def put(row: Array, new: Array, places: Int[Array, " g1"]) -> Array:
    """Returns a row with new values in places; those past its end are dropped."""
    return row.at[places].set(new, mode="drop")


def spliced(
    kept: Shaped[Array, "B N"],
    new: Shaped[Array, "B g1"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> Shaped[Array, "B N"]:
    """Returns rows with the first `count` of their new values from `start` on.

    Values are looked up where they go: XLA writes into an array one by one on CPUs.
    """
    ahead = jnp.arange(kept.shape[1], dtype=jnp.int32) - start[:, None]
    values = jnp.take_along_axis(new, jnp.clip(ahead, 0, new.shape[1] - 1), axis=1)
    return jnp.where((ahead >= 0) & (ahead < count[:, None]), values, kept)


def _first(holds: Bool[Array, "B g"]) -> Int[Array, " B"]:
    """Returns the first column in which each row holds; their number where none does."""
    columns = jnp.arange(holds.shape[1], dtype=jnp.int32)
    return jnp.min(jnp.where(holds, columns, holds.shape[1]), axis=1, initial=holds.shape[1])


def _accepted(
    scores: Float[Array, "B g1 V"], drafted: Drafted, rules: Rules, written: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Int[Array, "B g1"]]:
    """Returns how many drafts of each row are accepted, and its new tokens: these drafts
    and one token of the model.
    """
    most = drafted.tokens.shape[1]
    columns = jnp.arange(most + 1, dtype=jnp.int32)
    there = columns[:-1] < drafted.lengths[:, None]
    law = rules.law
    if law.temperature is None:
        own = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        agrees = there & (drafted.tokens == own[:, :-1])
        return _first(~agrees), own
    V = scores.shape[-1]
    p = jax.nn.softmax(processed(scores.reshape(-1, V), None, law), axis=-1).reshape(scores.shape)
    q = jnp.where(there[:, :, None], _draft_law(drafted, V), 0)
    u = _uniform(jax.random.fold_in(rules.key, _ACCEPT), written[:, None] + columns[:-1])
    of_p, of_q = (
        jnp.take_along_axis(each, drafted.tokens[:, :, None], axis=2)[:, :, 0]
        for each in (p[:, :-1], q)
    )
    agrees = there & (u * of_q < of_p)
    accepted = _first(~agrees)
    # where nothing was drafted, q is 0, and the token is drawn from p itself
    rest = jnp.maximum(p - jnp.pad(q, ((0, 0), (0, 1), (0, 0))), 0)
    rest = jnp.take_along_axis(rest, accepted[:, None, None], axis=1)[:, 0]
    instead = draw(jnp.log(rest), law, jax.random.fold_in(rules.key, _INSTEAD), written + accepted)
    drafts = jnp.pad(drafted.tokens, ((0, 0), (0, 1)))
    return accepted, jnp.where(columns < accepted[:, None], drafts, instead[:, None])


def _draft_law(drafted: Drafted, V: int) -> Float[Array, "B g V"]:
    """Returns the probability of each word at each draft."""
    if drafted.logits is None:  # a copy is certain
        return (drafted.tokens[:, :, None] == jnp.arange(V, dtype=jnp.int32)).astype(jnp.float32)
    q = jax.nn.softmax(drafted.logits, axis=-1)
    if drafted.words is None:
        return q
    words = drafted.words
    return jax.vmap(lambda row: jnp.zeros((len(row), V)).at[:, words].set(row))(q)


def _uniform(key: Array, steps: Int[Array, "B g"]) -> Float[Array, "B g"]:
    """Returns a number from 0 to 1 for each row and step."""

    def one(row: Int[Array, ""], step: Int[Array, ""]) -> Float[Array, ""]:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, row), step))

    rows = jnp.broadcast_to(jnp.arange(len(steps), dtype=jnp.int32)[:, None], steps.shape)
    return jax.vmap(jax.vmap(one))(rows, steps)
