"""Prompt lookup: drafts that are copied from the text itself.

Where the last tokens of a text stood in it before, those that came behind them then are
drafted. It runs no block, so a draft costs nothing; it pays where texts repeat themselves
or their prompts.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from jmat.decode.checking import Drafted
from jmat.decode.draft import MOST_DRAFTED, check_tokens
from jmat.decode.passes import State, last_tokens
from jmat.runtime.checks import whole


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Drafts tokens by copying from the prompt and the text so far.

    The longest run of last tokens, up to `longest` of them, that stood in the text
    before is looked for, and of several places the last one. What came behind it then is
    drafted; where that reaches the end of the text, its beginning follows, as in a text
    that goes round in circles. The whole model checks all drafts in one pass, so that the
    text, or its law, is its own.

    Attributes:
      tokens: how many are drafted before they are checked, 1 .. 64.
      longest: most last tokens that are looked for, 1 .. 64.
      shortest: fewest of them: where not so many stood in the text before, nothing is
        drafted.

    Raises:
      ValueError: numbers out of range.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> written = jmat.generate(
      ...     model,
      ...     "Return a new array of the given shape. Return a new",
      ...     tokenizer=tokenizer,
      ...     max_new_tokens=8,
      ...     draft=jmat.Lookup(tokens=4),
      ... )
    """

    tokens: int = 4
    longest: int = 3
    shortest: int = 1

    def __post_init__(self) -> None:
        for name in ("tokens", "longest", "shortest"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        check_tokens(self.tokens)
        if not 1 <= self.longest <= MOST_DRAFTED:
            raise ValueError(f"longest={self.longest}: expected 1 to {MOST_DRAFTED} last tokens.")
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(
                f"shortest={self.shortest}: expected 1 to longest={self.longest} last tokens."
            )


def copied_tokens(
    state: State, texts: Int[Array, "B S"], *, tokens: int, longest: int, shortest: int
) -> Drafted:
    """Returns the drafts behind the texts.

    Args:
      state: the texts so far.
      texts: all tokens of each, by position; what stands behind the last one is not
        read.
      tokens: how many are drafted.
      longest: most last tokens that are looked for.
      shortest: fewest of them.
    """
    drafts, matched = copies(texts, state.cache.lengths[-1] + 1, tokens=tokens, longest=longest)
    found = state.going & (matched >= shortest)
    return Drafted(
        cache=state.cache,
        inputs=jnp.concatenate([last_tokens(state), drafts], axis=1),
        tokens=drafts,
        lengths=jnp.where(found, tokens, 0),
        logits=None,
    )


def copies(
    texts: Int[Array, "B S"], lengths: Int[Array, " B"], *, tokens: int, longest: int
) -> tuple[Int[Array, "B g"], Int[Array, " B"]]:
    """Returns what came behind the last place at which the end of each text stood before,
    and how many of its last tokens match there.
    """
    S = texts.shape[1]
    places = jnp.arange(S, dtype=jnp.int32)  # of the token behind a match
    ends = lengths[:, None]
    agrees = (places >= 1) & (places < ends)
    matched = jnp.zeros(texts.shape, jnp.int32)
    for back in range(1, longest + 1):
        wanted = jnp.take_along_axis(texts, jnp.maximum(ends - back, 0), axis=1)
        before = jnp.pad(texts, ((0, 0), (back, 0)))[:, :S]
        agrees = agrees & (places >= back) & (before == wanted)
        matched = matched + agrees.astype(jnp.int32)
    # One number says both: the longest match, and of these the last place.
    best = jnp.max(matched * S + places, axis=1)
    length, place = best // S, (best % S)[:, None]
    ahead = jnp.arange(tokens, dtype=jnp.int32)
    at = place + ahead % jnp.maximum(ends - place, 1)
    return jnp.take_along_axis(texts, jnp.minimum(at, S - 1), axis=1), length
