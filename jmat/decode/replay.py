"""Reads texts once more as they were written with exits, beside the whole model."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy import ndarray

from jmat.decode.exits import Exits
from jmat.decode.leave import Log, new_log, read_token
from jmat.decode.passes import Rules, State, head_at, next_places, read_prompts, usual_piece
from jmat.decode.plan import Looks, Plan, looks_of
from jmat.decode.prompts import padded_rows
from jmat.decode.result import Generated
from jmat.decode.sample import Law
from jmat.forward import run
from jmat.metrics.predictions import compare_distributions, distribution
from jmat.models.cache import new_cache
from jmat.models.family import Transformer
from jmat.runtime.annotations import PyTree


class Replayed(NamedTuple):
    """Holds each new token's law with exits against that of the whole model, which reads
    the text as it was written. The first token of a text is the whole model's: NaN.

    Attributes:
      kl: KL(whole model ‖ exits), in nats.
      agrees: 1 where both have one most likely token.
      log_p: the natural logarithm of the token's probability in the whole model.
    """

    kl: Float[Array | ndarray, "B N"]
    agrees: Float[Array | ndarray, "B N"]
    log_p: Float[Array | ndarray, "B N"]


def replay(model: Transformer, found: Generated, exits: Exits) -> Replayed:
    """Returns how the laws of written tokens differ from the whole model's; NaN behind
    the end of a text.

    Args:
      model: that wrote the texts, without sites.
      found: the texts.
      exits: with which they were written.

    Raises:
      RuntimeError: a token leaves at another layer than when it was written.
    """
    B, config = len(found), model.config
    N = max(len(row) for row in found.tokens)
    sizes = np.array([len(row) for row in found.prompts], np.int32)
    counts = np.array([len(row) for row in found.tokens], np.int32)
    prompts, tokens = padded_rows(found.prompts), padded_rows(found.tokens)
    cache = new_cache(model, B, int((sizes + counts).max()))
    _, cache = read_prompts(model, prompts, sizes, cache, {}, usual_piece(B))
    whole = padded_rows(found.sequences)
    x, _ = run(model, whole, mask=np.arange(whole.shape[1]) < (sizes + counts)[:, None])
    places = np.minimum(sizes[:, None] + np.arange(N) - 1, whole.shape[1] - 1)
    state = State(
        cache=cache,
        tokens=jnp.asarray(tokens),
        scores=None,
        written=jnp.ones(B, jnp.int32),
        going=jnp.asarray(counts > 1),
        seen=None,
    )
    looks, plan = looks_of(exits, config)
    rules = Rules(Law(), {}, np.array([-1], np.int32), np.int32(N), jax.random.key(0))
    leaves, structure = jax.tree.flatten(model)
    log = new_log(model, state, plan)
    read, layers = _replayed(
        leaves, structure, state, log, rules, looks, counts, x, jnp.asarray(places), plan=plan
    )
    there = (np.arange(N) < counts[:, None]) & (np.arange(N) > 0)
    expected = np.zeros((B, N), np.int32)
    for row, each in enumerate([] if found.exits is None else found.exits.layers):
        expected[row, : len(each)] = each
    if found.exits is None or (np.asarray(layers)[there] != expected[there]).any():
        raise RuntimeError("the texts were not written with these exits: give those they were.")
    return Replayed(*(np.where(there, np.asarray(part), np.nan) for part in read))


@functools.partial(jax.jit, static_argnames=("structure", "plan"))
def _replayed(
    leaves: list[Array],
    structure: PyTree,
    state: State,
    log: Log,
    rules: Rules,
    looks: Looks,
    counts: Int[Array | ndarray, " B"],
    x: Float[Array, "B T D"],
    places: Int[Array, "B N"],
    *,
    plan: Plan,
) -> tuple[Replayed, Int[Array, "B N"]]:
    """Returns the values of each token, and at which layer it left."""
    model = jax.tree.unflatten(structure, leaves)
    B, N = places.shape

    def goes_on(carry: tuple[State, Log, Replayed]) -> Bool[Array, ""]:
        return carry[0].going.any()

    def step(carry: tuple[State, Log, Replayed]) -> tuple[State, Log, Replayed]:
        state, log, values = carry
        token = read_token(model, state, log, rules, looks, plan)
        own = jnp.take_along_axis(places, state.written[:, None], axis=1)
        final = jax.vmap(lambda row, at: row[at])(x, own)
        full = distribution(head_at(model, final, rules, own)[:, 0], 2)
        compared = compare_distributions(full, distribution(token.logits, 2), (1,))
        target = jnp.take_along_axis(state.tokens, state.written[:, None], axis=1)[:, 0]
        now = Replayed(compared["kl"], compared["precision@1"], full.log_p_of(target))
        place = next_places(state)
        values = Replayed(
            *(jnp.where(place, new[:, None], kept) for new, kept in zip(now, values, strict=True))
        )
        layers = jnp.where(place, token.layers[:, None], log.layers)
        log = log._replace(layers=layers, gaps=token.gaps)
        written = state.written + state.going.astype(jnp.int32)
        going = state.going & (written < counts)
        return state._replace(cache=token.cache, written=written, going=going), log, values

    none = Replayed(*(jnp.full((B, N), jnp.nan) for _ in range(3)))
    _, log, values = jax.lax.while_loop(goes_on, step, (state, log, none))
    return values, log.layers
