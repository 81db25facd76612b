"""Drafts of the model's own first blocks: they read each token, and a map and the head say
which one comes next.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jmat.decode.checking import DRAFT, Drafted
from jmat.decode.draft import Earlier, apply_map
from jmat.decode.passes import Rules, State, head_at, last_tokens, read
from jmat.decode.sample import draw, processed
from jmat.maps.carry import Carry
from jmat.models.family import Transformer
from jmat.models.sites import Site
from jmat.models.stack import model_dtype


class Drafter(NamedTuple):
    """Holds what drafts, besides the model's own blocks.

    Attributes:
      map: from h_layer to h_L.
      least: a draft also ends where its most likely token has a smaller probability.
      words: ids that are drafted; None: all.
    """

    map: Site | Carry
    least: Float[np.ndarray | Array, ""]
    words: Int[np.ndarray | Array, " W"] | None


class _Progress(NamedTuple):
    """Holds drafts while they are made.

    Attributes:
      drafted: so far.
      earlier: streams of the token before the one that is read next, for a carry.
      going: which rows still draft.
      step: number of tokens that were drafted so far, of the row with the most.
    """

    drafted: Drafted
    earlier: Earlier | None
    going: Bool[Array, " B"]
    step: Int[Array, ""]


def draft_tokens(
    model: Transformer,
    state: State,
    rules: Rules,
    drafter: Drafter,
    earlier: Earlier | None,
    *,
    layer: int,
    tokens: int,
) -> Drafted:
    """Returns the drafts behind the texts, and their streams."""
    B, D = len(state.going), model.config.width
    W = model.config.vocab_size if drafter.words is None else len(drafter.words)
    last = last_tokens(state)

    def read_one(progress: _Progress) -> _Progress:
        """Reads each row's last token through the lower blocks."""
        drafted, step = progress.drafted, progress.step
        before = jnp.maximum(step - 1, 0)
        token = jnp.where(step == 0, last[:, 0], drafted.tokens[:, before])
        going = progress.going[:, None]
        x, cache = read(model, token[:, None], going, drafted.cache, rules.sites, stop=layer)
        streams = jnp.where(going[:, :, None], x, 0)
        streams = _with_column(drafted.inputs, streams, step)
        return progress._replace(drafted=drafted._replace(cache=cache, inputs=streams))

    def draft_one(progress: _Progress) -> _Progress:
        progress = read_one(progress)
        drafted, step = progress.drafted, progress.step
        x = jax.lax.dynamic_slice_in_dim(drafted.inputs, step, 1, axis=1)
        final = apply_map(drafter.map, x, progress.earlier)
        at = state.cache.lengths[-1][:, None] + step
        scores = head_at(model, final, rules, at, drafter.words)[:, 0]
        drawn_from = processed(scores, None, rules.law)
        key = jax.random.fold_in(rules.key, DRAFT)
        token = draw(drawn_from, rules.law, key, state.written + step)
        if drafter.words is not None:
            token = jnp.asarray(drafter.words)[token]
        # The drawn token may not decide: what is drafted would then depend on it, and so the law.
        likely = jnp.max(jax.nn.softmax(scores, axis=-1), axis=-1) >= drafter.least
        going = progress.going & likely
        logits = drafted.logits
        return _Progress(
            drafted=drafted._replace(
                tokens=_with_column(drafted.tokens, token[:, None], step),
                lengths=drafted.lengths + going.astype(jnp.int32),
                logits=None if logits is None else _with_column(logits, drawn_from[:, None], step),
            ),
            earlier=None if progress.earlier is None else Earlier(final, x),
            going=going,
            step=step + 1,
        )

    progress = _Progress(
        drafted=Drafted(
            cache=state.cache,
            inputs=jnp.zeros((B, tokens + 1, D), model_dtype(model)),
            tokens=jnp.zeros((B, tokens), jnp.int32),
            lengths=jnp.zeros(B, jnp.int32),
            logits=None if rules.law.temperature is None else jnp.zeros((B, tokens, W)),
        ),
        earlier=earlier,
        going=state.going,
        step=jnp.zeros((), jnp.int32),
    )
    progress = jax.lax.while_loop(
        lambda progress: (progress.step < tokens) & progress.going.any(), draft_one, progress
    )
    # The last draft is read, too: where it is accepted, one more token comes behind it.
    progress = jax.lax.cond(progress.going.any(), read_one, lambda progress: progress, progress)
    return progress.drafted._replace(words=drafter.words)


def _with_column(values: Array, column: Array, at: Int[Array, ""]) -> Array:
    """Returns values [B, g, …] with another column [B, 1, …] at an index."""
    return jax.lax.dynamic_update_slice_in_dim(values, column, at, axis=1)
