"""Costs of drafts and checks by the clock, in steps of plain decoding; and the speed-up
that follows from them.

A cycle drafts γ tokens and checks them. With c the cost of a drafted token and v that of
the check, both in plain steps, and τ the tokens that a cycle brings, drafts are
`S = τ / (γ c + v)` times as fast as plain decoding (Leviathan et al. 2023, arXiv
2211.17192). Where each draft is accepted with probability α, `τ = (1 − α^(γ+1)) / (1 − α)`.

Each program runs several steps in a loop on the device, as `jmat.generate` does, at texts
of one length. All programs are timed in turn, and the fastest turn of each counts: what
else a machine does makes some turns slower, and none faster.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jmat.decode.checking import Drafted, checked
from jmat.decode.draft import Earlier, apply_map
from jmat.decode.passes import Rules, State, head_at, last_tokens, read
from jmat.decode.sample import Law
from jmat.maps.carry import Carry
from jmat.models.cache import new_cache
from jmat.models.family import Transformer
from jmat.models.sites import Site
from jmat.models.stack import model_dtype
from jmat.runtime.annotations import PyTree
from jmat.runtime.timing import Work, in_turn, seconds

_MOST_STEPS, _SECONDS = 32, 0.1  # of one timed call


class DraftStep(NamedTuple):
    """Names what drafts one token: the layer, the map, and the words that it drafts."""

    layer: int
    map: Site | Carry
    words: Int[np.ndarray, " W"] | None


def tokens_a_cycle(accepted: float, tokens: int) -> float:
    """Returns τ, the tokens that a cycle brings, where each draft is accepted with the
    same probability.

    Args:
      accepted: that probability, 0 .. 1.
      tokens: γ, of a draft.
    """
    return float(sum(accepted**number for number in range(tokens + 1)))


def speed_up(per_cycle: float, tokens: int, draft: float, check: float) -> float:
    """Returns S, how many times as fast as plain decoding drafts are.

    Args:
      per_cycle: τ, tokens that a cycle brings.
      tokens: γ, of a draft.
      draft: c, the cost of a drafted token in plain steps.
      check: v, the cost of a check in plain steps.
    """
    return per_cycle / (tokens * draft + check)


class Costs(NamedTuple):
    """Holds measured times.

    Attributes:
      plain: seconds of a step of plain decoding.
      drafts: seconds of a drafted token, by the names that were given.
      checks: seconds of a check, by the layer that drafted (0: none) and the tokens of a
        draft; where blocks draft, they read the last draft in it, too.
    """

    plain: float
    drafts: Mapping[str, float]
    checks: Mapping[tuple[int, int], float]


def measure_costs(
    model: Transformer,
    drafts: Mapping[str, DraftStep],
    checks: Iterable[tuple[int, int]],
    *,
    rows: int,
    length: int,
    room: int,
    turns: int = 5,
) -> Costs:
    """Returns the times of plain steps, drafted tokens and checks: the least of each over
    turns.

    Args:
      model: a causal one with a head.
      drafts: what drafts one token, by name.
      checks: (layer that drafted, tokens of a draft).
      rows: number of texts that are written at once.
      length: tokens that the cache has read.
      room: tokens that it has room for.
      turns: how often each is timed.
    """
    leaves, structure = jax.tree.flatten(model)
    pairs = list(dict.fromkeys(checks))

    state = State(
        cache=new_cache(model, rows, room).with_lengths(np.full((1, rows), length, np.int32)),
        tokens=jnp.ones((rows, 1), jnp.int32),
        scores=None,
        written=jnp.ones(rows, jnp.int32),
        going=jnp.ones(rows, bool),
        seen=None,
    )
    given = leaves, structure, state
    some = jnp.int32(2)
    jax.block_until_ready(_plain_steps(*given, steps=some))  # compiles
    taken = seconds(lambda: _plain_steps(*given, steps=some)) / 2
    count = max(1, min(_MOST_STEPS, round(_SECONDS / taken)))
    steps = jnp.int32(count)
    works: dict[str, Work] = {"plain": functools.partial(_plain_steps, *given, steps=steps)}
    for name, each in drafts.items():
        words = None if each.words is None else np.asarray(each.words, np.int32)
        step = functools.partial(
            _draft_steps, *given, each.map, words, steps=steps, layer=each.layer
        )
        works[f"draft {name}"] = step
    for layer, tokens in pairs:
        check = functools.partial(_checks, *given, steps=steps, layer=layer, tokens=tokens)
        works[f"check {layer} {tokens}"] = check
    for work in works.values():
        jax.block_until_ready(work())  # compiles
    fastest = {name: min(each) / count for name, each in in_turn(works, turns).items()}
    return Costs(
        fastest["plain"],
        {name: fastest[f"draft {name}"] for name in drafts},
        {pair: fastest[f"check {pair[0]} {pair[1]}"] for pair in pairs},
    )


def _rules() -> Rules:
    return Rules(Law(), {}, np.full(1, -1, np.int32), np.int32(2**30), jax.random.key(0))


def _again(state: State, lengths: Int[Array, "L B"], token: Int[Array, " B"]) -> State:
    """Returns the state as it was, but for the last token: so each step depends on the
    one before, as in a text.
    """
    return state._replace(
        cache=state.cache.with_lengths(lengths), tokens=state.tokens.at[:, 0].set(token)
    )


@functools.partial(jax.jit, static_argnames=("structure",))
def _plain_steps(
    leaves: list[Array], structure: PyTree, state: State, *, steps: Int[Array, ""]
) -> Int[Array, "B N"]:
    """Returns tokens after steps of plain greedy decoding."""
    model, rules, lengths = jax.tree.unflatten(structure, leaves), _rules(), state.cache.lengths

    def step(_: Int[Array, ""], state: State) -> State:
        x, cache = read(model, last_tokens(state), state.going[:, None], state.cache, {})
        token = jnp.argmax(head_at(model, x, rules, lengths[-1][:, None])[:, 0], axis=-1)
        return _again(state._replace(cache=cache), lengths, token.astype(jnp.int32))

    return jax.lax.fori_loop(0, steps, step, state).tokens


@functools.partial(jax.jit, static_argnames=("structure", "layer"))
def _draft_steps(
    leaves: list[Array],
    structure: PyTree,
    state: State,
    stand_in: Site | Carry,
    words: Int[np.ndarray | Array, " W"] | None,
    *,
    steps: Int[Array, ""],
    layer: int,
) -> Int[Array, "B N"]:
    """Returns tokens after steps in which one token is drafted."""
    model, rules, lengths = jax.tree.unflatten(structure, leaves), _rules(), state.cache.lengths
    zeros = jnp.zeros((len(state.going), 1, model.config.width), model_dtype(model))

    def step(_: Int[Array, ""], carried: tuple[State, Earlier]) -> tuple[State, Earlier]:
        state, earlier = carried
        x, cache = read(
            model, last_tokens(state), state.going[:, None], state.cache, {}, stop=layer
        )
        final = apply_map(stand_in, x, earlier)
        scores = head_at(model, final, rules, lengths[-1][:, None], words)[:, 0]
        token = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        token = token if words is None else jnp.asarray(words)[token]
        return _again(state._replace(cache=cache), lengths, token), Earlier(final, x)

    state, _ = jax.lax.fori_loop(0, steps, step, (state, Earlier(zeros, zeros)))
    return state.tokens


@functools.partial(jax.jit, static_argnames=("structure", "layer", "tokens"))
def _checks(
    leaves: list[Array],
    structure: PyTree,
    state: State,
    *,
    steps: Int[Array, ""],
    layer: int,
    tokens: int,
) -> Int[Array, "B N"]:
    """Returns tokens after checks of so many drafted tokens each."""
    model, rules, lengths = jax.tree.unflatten(structure, leaves), _rules(), state.cache.lengths
    B, D = len(state.going), model.config.width

    def step(_: Int[Array, ""], carried: tuple[State, Array]) -> tuple[State, Array]:
        state, inputs = carried
        cache = state.cache
        if layer:
            going = state.going[:, None]
            x, cache = read(model, last_tokens(state), going, cache, {}, stop=layer)
            inputs = jax.lax.dynamic_update_slice_in_dim(inputs, x, tokens, axis=1)
        drafts = jnp.zeros((B, tokens), jnp.int32)
        drafted = Drafted(cache, inputs, drafts, jnp.full(B, tokens, jnp.int32), None)
        longer, check = checked(model, state, drafted, rules, layer=layer)
        token = check.new[:, 0]
        shape = (B, *[1] * (inputs.ndim - 1))
        inputs = jnp.where(token.reshape(shape) < 0, jnp.zeros_like(inputs), inputs)  # is never so
        again = _again(state._replace(cache=longer.cache), lengths, token)
        return again, inputs

    shape = (B, tokens + 1, D) if layer else (B, tokens + 1)
    inputs: Float[Array, "B g1 D"] | Int[Array, "B g1"]
    inputs = jnp.ones(shape, model_dtype(model) if layer else jnp.int32)
    state, _ = jax.lax.fori_loop(0, steps, step, (state, inputs))
    return state.tokens
