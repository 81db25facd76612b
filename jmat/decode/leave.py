"""Writes text whose tokens leave the model early, row by row.

A step reads one token of each row. Blocks stand one behind the other in the program,
with a look at each layer where tokens can leave. The blocks between two looks run only
where the token of some row goes on, so what all rows left out takes no time.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from jmat.decode.checking import put
from jmat.decode.draft import apply_map
from jmat.decode.exits import FIXED, RECOMPUTE
from jmat.decode.fills import Gaps, catch_up, fill_in, run_if
from jmat.decode.passes import (
    Rules,
    State,
    goes_on,
    head_at,
    last_tokens,
    next_places,
    placed,
    read,
    split_rows,
    with_next,
)
from jmat.decode.plan import Looks, Plan
from jmat.metrics.confidence import PATIENCE, certainty, falling_threshold
from jmat.metrics.predictions import confidences_of, distribution
from jmat.models.cache import NOWHERE, Cache
from jmat.models.family import Transformer
from jmat.models.stack import model_dtype
from jmat.runtime.annotations import PyTree

_NONE = -1  # no token


class Log(NamedTuple):
    """Holds how the tokens of each row left.

    Attributes:
      layers: at which layer each new token's prediction was made.
      confidences: at each layer looked at; NaN where the token had left.
      gaps: tokens that some blocks have not read.
      programs: how many blocks were run.
    """

    layers: Int[Array, "B N"]
    confidences: Float[Array, "B N m"]
    gaps: Gaps | None
    programs: Int[Array, ""]


class Token(NamedTuple):
    """Holds the token that a step reads in each row, on its way through the blocks.

    Attributes:
      cache: of the blocks that have read it.
      gaps: as `Log` has them.
      x: its stream.
      going: which rows' tokens go on.
      logits: of those that left.
      layers: at which these left; L for others.
      confidences: at each layer looked at.
      top: the most likely token at the last layer looked at.
      agree: how many looks in a row agreed on it with the one before.
      programs: how many blocks were run.
    """

    cache: Cache
    gaps: Gaps | None
    x: Float[Array, "B 1 D"]
    going: Bool[Array, " B"]
    logits: Float[Array, "B V"]
    layers: Int[Array, " B"]
    confidences: Float[Array, "B m"]
    top: Int[Array, " B"]
    agree: Int[Array, " B"]
    programs: Int[Array, ""]


def new_log(model: Transformer, state: State, plan: Plan) -> Log:
    """Returns the log of texts whose first new token was written by the whole model."""
    B, N = state.tokens.shape
    gaps = None
    if plan.fill == RECOMPUTE:
        gaps = Gaps(jnp.zeros((B, state.cache.room, model.config.width), model_dtype(model)))
    return Log(
        layers=jnp.full((B, N), model.config.layers, jnp.int32),
        confidences=jnp.full((B, N, len(plan.looked_at)), jnp.nan),
        gaps=gaps,
        programs=jnp.zeros((), jnp.int32),
    )


@functools.partial(
    jax.jit, static_argnames=("structure", "plan", "rows"), donate_argnames=("state", "log")
)
def write_leaving(
    leaves: list[Array],
    structure: PyTree,
    state: State,
    log: Log,
    rules: Rules,
    looks: Looks,
    until: Int[np.ndarray | np.integer | Array, ""],
    *,
    plan: Plan,
    rows: NamedSharding | None,
) -> tuple[State, Log]:
    """Returns the state once the rows that go on have `until` new tokens, and the log."""
    model = jax.tree.unflatten(structure, leaves)

    def step(carry: tuple[State, Log]) -> tuple[State, Log]:
        state, log = carry
        token = read_token(model, state, log, rules, looks, plan)
        place = next_places(state)
        log = Log(
            layers=jnp.where(place, token.layers[:, None], log.layers),
            confidences=jnp.where(place[:, :, None], token.confidences[:, None], log.confidences),
            gaps=token.gaps,
            programs=token.programs,
        )
        return with_next(state._replace(cache=token.cache), token.logits, rules), log

    state, log = jax.lax.while_loop(lambda carry: goes_on(carry[0], until), step, (state, log))
    layers, confidences, gaps = split_rows((log.layers, log.confidences, log.gaps), rows)
    return placed(state, rows), Log(layers, confidences, gaps, log.programs)


def read_token(
    model: Transformer, state: State, log: Log, rules: Rules, looks: Looks, plan: Plan
) -> Token:
    """Returns the last token of each row, read until it leaves."""
    B, m, L = len(state.going), len(plan.looked_at), model.config.layers
    at = state.cache.lengths[0]  # the column of the token
    first = plan.looked_at[0]
    x, cache = read(
        model, last_tokens(state), state.going[:, None], state.cache, rules.sites, stop=first
    )
    token = Token(
        cache=cache,
        gaps=log.gaps,
        x=x,
        going=state.going,
        logits=jnp.zeros((B, model.config.vocab_size)),
        layers=jnp.full(B, L, jnp.int32),
        confidences=jnp.full((B, m), jnp.nan),
        top=jnp.full(B, _NONE, jnp.int32),
        agree=jnp.zeros(B, jnp.int32),
        programs=log.programs + first,
    )

    def look(token: Token, i: int) -> Token:
        return _look(model, token, at, rules, looks, plan, i)

    def go_on(token: Token, i: int) -> Token:
        """Runs the blocks up to the next look, or to the end."""
        start = plan.looked_at[i]
        stop = plan.looked_at[i + 1] if i + 1 < m else L
        if token.gaps is not None:
            x, cache, gaps, runs = catch_up(
                model, token.gaps, token.going, at, token.cache, rules, start=start, stop=stop
            )
            programs = token.programs + runs * (stop - start)
            token = token._replace(x=x, cache=cache, gaps=gaps, programs=programs)
        else:
            x, cache = read(
                model,
                token.x,
                token.going[:, None],
                token.cache,
                rules.sites,
                start=start,
                stop=stop,
            )
            token = token._replace(x=x, cache=cache, programs=token.programs + (stop - start))
        if stop < L:
            return look(token, i + 1)
        scores = head_at(model, token.x, rules, at[:, None])[:, 0]
        return token._replace(logits=jnp.where(token.going[:, None], scores, token.logits))

    token = look(token, 0)
    for i in range(m):
        token = run_if(token.going.any(), functools.partial(go_on, i=i), token)
    return token


def _look(
    model: Transformer,
    token: Token,
    at: Int[Array, " B"],
    rules: Rules,
    looks: Looks,
    plan: Plan,
    i: int,
) -> Token:
    """Returns the token of each row after the look at a layer: those that are sure
    enough have left.
    """
    layer = plan.looked_at[i]
    stand_in = apply_map(looks.maps[layer], token.x)
    words = None if looks.words is None else jnp.asarray(looks.words)
    scores = head_at(model, stand_in, rules, at[:, None], words)[:, 0]
    confidence, top, agree = _confidence(scores, token, plan, first=i == 0)
    threshold = jnp.asarray(looks.threshold)
    if looks.length is not None:
        position = at.astype(jnp.float32)
        threshold = falling_threshold(threshold, position, jnp.asarray(looks.length))
    leaves = token.going & ((confidence > threshold) | (plan.confidence == FIXED))

    def whole(_: object) -> Float[Array, "B V"]:
        return head_at(model, stand_in, rules, at[:, None])[:, 0]

    if words is not None:
        scores = jax.lax.cond(leaves.any(), whole, lambda _: token.logits, None)
    seen = token.going[:, None] & (jnp.arange(len(plan.looked_at)) == i)
    gaps, cache = token.gaps, token.cache
    if gaps is not None:
        gaps = Gaps(put(gaps.streams, token.x, jnp.where(token.going, at, NOWHERE)[:, None]))
    else:
        cache = run_if(
            leaves.any(),
            lambda cache: fill_in(model, token.x, leaves, cache, rules, looks, plan, layer),
            cache,
        )
    return token._replace(
        cache=cache,
        gaps=gaps,
        going=token.going & ~leaves,
        logits=jnp.where(leaves[:, None], scores, token.logits),
        layers=jnp.where(leaves, layer, token.layers),
        confidences=jnp.where(seen, confidence[:, None], token.confidences),
        top=top,
        agree=agree,
    )


def _confidence(
    scores: Float[Array, "B W"], token: Token, plan: Plan, *, first: bool
) -> tuple[Float[Array, " B"], Int[Array, " B"], Int[Array, " B"]]:
    """Returns how sure a prediction is, its most likely token, and how many looks in a
    row agreed on that with the one before.
    """
    if plan.confidence == FIXED:
        return jnp.zeros(len(scores)), token.top, token.agree
    read: dict[str, Array] = confidences_of(distribution(scores, 2))
    top, agree = read["top_1"], token.agree
    if not first:
        agree = jnp.where(top == token.top, agree + 1, 0)
    if plan.confidence == PATIENCE:
        return agree.astype(jnp.float32), top, agree
    if plan.confidence == "entropy":
        return certainty(read["entropy"], scores.shape[-1]), top, agree
    return read[plan.confidence], top, agree
