"""Speculation: several tokens are drafted at little cost, and the whole model checks them
in one pass.

What is written is what the whole model would write: greedily the same tokens, but where
two are equally likely up to rounding, and else tokens of the same law
(`jmat.decode.checking`).

A cycle of `jmat.Draft` reads the last token and the drafts behind it through the lower
blocks, one by one, and keeps their streams. The upper blocks go on from these streams, so
nothing is computed twice. A cycle of `jmat.Lookup` copies drafts, and all blocks check
them. Then the ends of the texts that were not accepted are taken back from the cache.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int
from numpy import ndarray

from jmat.decode.checking import Check, Drafted, checked, spliced
from jmat.decode.draft import Draft, DraftCounts, Earlier, words_of
from jmat.decode.drafting import Drafter, draft_tokens
from jmat.decode.lookup import Lookup, copied_tokens
from jmat.decode.passes import Rules, State, goes_on, last_tokens, placed, read
from jmat.maps.carry import Carry
from jmat.models.cache import Cache
from jmat.models.family import Transformer
from jmat.models.sites import Site
from jmat.runtime.annotations import PyTree


class Drafting(NamedTuple):
    """Holds what one cycle leaves to the next, besides the texts.

    Attributes:
      counts: what became of drafts so far.
      earlier: streams of the token before the last one of each text; None where no carry
        drafts.
      texts: all tokens by position; None where none is copied.
    """

    counts: DraftCounts
    earlier: Earlier | None = None
    texts: Int[Array, "B S"] | None = None


def begin(
    draft: Draft | Lookup,
    model: Transformer,
    x: Float[Array, "B D"],
    tokens: Int[ndarray, "B T"],
    lengths: Int[ndarray, " B"],
    cache: Cache,
    sites: Mapping[str, Site],
) -> tuple[Drafting, Cache]:
    """Returns what the first cycle needs, and the cache.

    Args:
      draft: what drafts.
      model: with checked inputs.
      x: h_L at the last token of each prompt.
      tokens: the prompts, padded on the right.
      lengths: of them.
      cache: has read them.
      sites: what is changed in the model.
    """
    rows = len(lengths)
    counts = DraftCounts(*(jnp.zeros(rows, jnp.int32) for _ in range(3)))
    if isinstance(draft, Lookup):
        texts = np.zeros((rows, cache.room), np.int32)
        texts[:, : tokens.shape[1]] = tokens
        return Drafting(counts, texts=jnp.asarray(texts)), cache
    if not isinstance(draft.map, Carry):
        return Drafting(counts), cache
    # The prompts' last tokens go through the lower blocks once more, for their streams.
    real = lengths > 0
    last = tokens[np.arange(rows), np.maximum(lengths - 1, 0)][:, None]
    shorter = cache.with_lengths(np.maximum(lengths - 1, 0)[None])
    stream, cache = read(model, last, real[:, None], shorter, sites, stop=draft.layer)
    return Drafting(counts, Earlier(x[:, None], stream)), cache.with_lengths(lengths[None])


class DraftPlan(NamedTuple):
    """Says what a program of drafts is compiled for.

    Attributes:
      tokens: of a draft.
      layer: below which blocks draft; 0: none does, and tokens are copied.
      longest: most last tokens that are looked for.
      shortest: fewest of them.
    """

    tokens: int
    layer: int = 0
    longest: int = 0
    shortest: int = 0


def plan_of(draft: Draft | Lookup) -> DraftPlan:
    """Returns what the program of a draft is compiled for."""
    if isinstance(draft, Lookup):
        return DraftPlan(draft.tokens, longest=draft.longest, shortest=draft.shortest)
    return DraftPlan(draft.tokens, draft.layer)


def drafter_of(draft: Draft | Lookup) -> Drafter | None:
    """Returns the values by which a draft is made; None where tokens are copied."""
    if isinstance(draft, Lookup):
        return None
    return Drafter(draft.map, np.asarray(draft.least, np.float32), words_of(draft))


@functools.partial(
    jax.jit,
    static_argnames=("structure", "plan", "rows"),
    donate_argnames=("state", "drafting"),
)
def write_drafted(
    leaves: list[Array],
    structure: PyTree,
    state: State,
    drafting: Drafting,
    rules: Rules,
    drafter: Drafter | None,
    until: Int[np.ndarray | np.integer | Array, ""],
    *,
    plan: DraftPlan,
    rows: NamedSharding | None,
) -> tuple[State, Drafting]:
    """Returns the state once all rows that go on have `until` new tokens at least, and
    what the next cycle needs.
    """
    model = jax.tree.unflatten(structure, leaves)

    def cycle(carry: tuple[State, Drafting]) -> tuple[State, Drafting]:
        state, drafting = carry
        if drafter is None:
            assert drafting.texts is not None
            read_already = state.cache.lengths[-1]
            one = jnp.ones_like(read_already)
            texts = spliced(drafting.texts, last_tokens(state), read_already, one)
            drafting = drafting._replace(texts=texts)
            drafted = copied_tokens(
                state, texts, tokens=plan.tokens, longest=plan.longest, shortest=plan.shortest
            )
        else:
            drafted = draft_tokens(
                model,
                state,
                rules,
                drafter,
                drafting.earlier,
                layer=plan.layer,
                tokens=plan.tokens,
            )
        if drafter is None:
            longer, check = _checked_copies(model, state, drafted, rules)
        else:
            longer, check = checked(model, state, drafted, rules, layer=plan.layer)
        return longer, _next(state, drafting, drafted, check)

    state, drafting = jax.lax.while_loop(
        lambda carry: goes_on(carry[0], until), cycle, (state, drafting)
    )
    return placed(state, rows), _split(drafting, rows)


def _checked_copies(
    model: Transformer, state: State, drafted: Drafted, rules: Rules
) -> tuple[State, Check]:
    """Returns what `checked` does, by a plain step where no row has a draft: that costs
    less.
    """

    def plain(drafted: Drafted) -> tuple[State, Check]:
        alone = drafted._replace(inputs=drafted.inputs[:, :1], tokens=drafted.tokens[:, :0])
        longer, check = checked(model, state, alone, rules, layer=0)
        most = drafted.tokens.shape[1]
        return longer, check._replace(
            final=jnp.pad(check.final, ((0, 0), (0, most), (0, 0))),
            new=jnp.pad(check.new, ((0, 0), (0, most))),
        )

    def whole(drafted: Drafted) -> tuple[State, Check]:
        return checked(model, state, drafted, rules, layer=0)

    return jax.lax.cond((drafted.lengths > 0).any(), whole, plain, drafted)


def _next(state: State, drafting: Drafting, drafted: Drafted, check: Check) -> Drafting:
    """Returns what the next cycle needs, from the texts before a check and the check."""
    going, taken = state.going, check.taken
    counts = DraftCounts(
        drafting.counts.cycles + going.astype(jnp.int32),
        drafting.counts.drafted + jnp.where(going, drafted.lengths, 0),
        drafting.counts.accepted + check.accepted,
    )
    texts, earlier = drafting.texts, drafting.earlier
    if texts is not None:
        texts = spliced(texts, check.new, state.cache.lengths[-1] + 1, taken)
    if earlier is not None:
        # The last new token has not been read: the one before it stands in column taken − 1.
        at = jnp.maximum(taken - 1, 0)[:, None, None]
        final, stream = (
            jnp.where(going[:, None, None], jnp.take_along_axis(new, at, axis=1), old)
            for new, old in zip((check.final, drafted.inputs), earlier, strict=True)
        )
        earlier = Earlier(final, stream)
    return Drafting(counts, earlier, texts)


def _split(drafting: Drafting, rows: NamedSharding | None) -> Drafting:
    """Returns what the next cycle needs, split over the devices as the texts are."""
    if rows is None:
        return drafting
    return jax.lax.with_sharding_constraint(
        drafting, NamedSharding(rows.mesh, PartitionSpec(*rows.spec))
    )
