"""Drafts: the next tokens as an early layer foresees them, for the whole model to check."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Int32
from numpy import ndarray

from jmat.maps.carry import Carry
from jmat.models.config import ModelConfig
from jmat.models.context import NeedsContext
from jmat.models.edits import apply_site, is_edit
from jmat.models.family import Transformer
from jmat.models.inputs import check_ids
from jmat.models.site_checks import check_site
from jmat.models.sites import Site
from jmat.models.stack import model_dtype
from jmat.runtime.checks import whole

MOST_DRAFTED = 64  # tokens of a draft: more are never accepted in a row


@dataclasses.dataclass(frozen=True, eq=False)
class Draft:
    """Drafts tokens from an early layer of the model itself, by a map and the head.

    Blocks 0 .. `layer` − 1 draft several tokens, one after another. The other blocks
    then check all of them in one pass, from the streams that are there already. So the
    text, or its law, is that of the whole model.

    Attributes:
      layer: the stream that drafts, 1 .. L − 1.
      map: from h_layer to h_L, such as `jmat.fit_map(model, texts, layer, L).map`; or a
        carry (`jmat.fit_carry(model, texts, layer).map`), which also sees h_L of the token
        before: the exact one for the first draft, and then its own.
      tokens: how many are drafted before they are checked, 1 .. 64.
      least: a draft also ends where its most likely token has a smaller probability than
        this, 0 .. 1, at temperature 1.
      words: ids of the words that are drafted, such as the most frequent ones
        (`jmat.decode.words.frequent_words`): the head of a draft then costs so much less;
        None: all words.

    Raises:
      ValueError: numbers out of range, a map that is no callable pytree, or words that are
        no token ids.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"Entry {i} holds a list of {i % 7} values." for i in range(40)]
      >>> fit = jmat.fit_map(model, texts, source=6, target=8, tokenizer=tokenizer)
      >>> draft = jmat.Draft(6, fit.map, tokens=3)
      >>> written = jmat.generate(
      ...     model, "Return a new", tokenizer=tokenizer, max_new_tokens=8, draft=draft
      ... )
      >>> len(written.tokens[0])
      8
    """

    layer: int
    map: Site | Carry
    tokens: int = 4
    least: float = 0.0
    words: Sequence[int] | Int[ndarray, " W"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", whole("layer", self.layer))
        object.__setattr__(self, "tokens", whole("tokens", self.tokens))
        check_tokens(self.tokens)
        number = isinstance(self.least, int | float) and not isinstance(self.least, bool)
        if not (number and 0 <= self.least <= 1):
            raise ValueError(f"least={self.least!r}: expected a probability from 0 to 1.")
        if is_edit(self.map):
            raise ValueError(
                f"a draft's map leads from its layer to the last one; got the edit "
                f"{type(self.map).__name__}."
            )
        check_site("map", self.map)
        if self.words is not None:
            object.__setattr__(self, "words", checked_words(self.words))


def checked_words(words: object) -> Int32[ndarray, " W"]:
    """Returns token ids, each once and in order. Raises ValueError for what is none."""
    try:
        ids = np.asarray(words)
    except ValueError:  # lists of several lengths
        ids = np.zeros((1, 1))
    if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"words is of type {type(words).__name__}, {ids.dtype} {list(ids.shape)}: expected a "
            "list of token ids, at least one."
        )
    return np.unique(ids).astype(np.int32)


def check_tokens(tokens: int) -> None:
    """Raises ValueError for a number of drafted tokens out of range."""
    if not 1 <= tokens <= MOST_DRAFTED:
        raise ValueError(f"tokens={tokens}: expected 1 to {MOST_DRAFTED} drafted tokens.")


def words_of(draft: Draft) -> Int32[ndarray, " W"] | None:
    """Returns the words that are drafted; None: all."""
    return None if draft.words is None else np.asarray(draft.words, np.int32)


class DraftCounts(NamedTuple):
    """Holds what became of the drafts of each row.

    Attributes:
      cycles: passes of the whole model's upper blocks: each checks one draft.
      drafted: tokens that were drafted.
      accepted: those of them that are part of the text.
    """

    cycles: Int[Array | ndarray, " B"]
    drafted: Int[Array | ndarray, " B"]
    accepted: Int[Array | ndarray, " B"]


class Earlier(NamedTuple):
    """Holds streams of the token before the one that is read, for a carry.

    Attributes:
      final: h_L, or what the carry takes it to be.
      stream: h_layer.
    """

    final: Float[Array, "B 1 D"]
    stream: Float[Array, "B 1 D"]


def apply_map(
    stand_in: Site | Carry, x: Float[Array, "B 1 D"], earlier: Earlier | None = None
) -> Float[Array, "B 1 D"]:
    """Returns what a draft's map makes of a stream, in the stream's dtype. Raises
    ValueError where it is another shape.
    """
    if isinstance(stand_in, Carry):
        assert earlier is not None
        return stand_in(x, earlier.final, earlier.stream)
    return apply_site("map", stand_in, lambda: x, x, x.shape, x.dtype, None)


def check_draft(draft: Draft, model: Transformer, sites: Mapping[str, Site]) -> None:
    """Raises ValueError for a draft that is not of this model, or does not go with what is
    changed in it.
    """
    if not isinstance(draft, Draft):
        raise ValueError(
            f"draft is of type {type(draft).__name__}; expected jmat.Draft or jmat.Lookup."
        )
    config: ModelConfig = model.config
    if config.layers == 1:
        raise ValueError("a model of one block has no other blocks to check its drafts.")
    if not 1 <= draft.layer < config.layers:
        raise ValueError(
            f"a draft from layer {draft.layer}: expected 1 to {config.layers - 1}, since some "
            "blocks draft and the others check."
        )
    if draft.words is not None:
        check_ids("words: token id", np.asarray(draft.words), config.vocab_size)
        if "logits" in sites:
            raise ValueError(
                "a draft of some words reads a part of the head, which the site 'logits' "
                "changes: leave out words= or the site."
            )
    if isinstance(draft.map, Carry):
        _check_carry(draft.map, config.width)
    else:
        check_token_map("draft's map", draft.map, model)


def check_token_map(
    name: str, site: Site, model: Transformer, call: Callable[..., object] = apply_map
) -> None:
    """Raises ValueError for a map that does not take a stream of this model token by
    token, or does not lead where it should.

    Args:
      name: how errors call the map.
      site: the map.
      model: whose stream it reads.
      call: applies the map; raises ValueError for another width.
    """
    if isinstance(site, NeedsContext):
        raise ValueError(f"the {name} sees one token at a time; this one needs the others.")
    stream = jax.ShapeDtypeStruct((2, 1, model.config.width), model_dtype(model))
    try:
        jax.eval_shape(call, site, stream)
    except ValueError as error:
        raise ValueError(f"the {name} does not fit the model: {error}") from error


def _check_carry(carry: Carry, width: int) -> None:
    """Raises ValueError for a carry of another width."""
    parts = {"W": carry.W, "U": carry.U, "V": carry.V, "bias": carry.bias}
    for name, part in parts.items():
        expected = (width,) if name == "bias" else (width, width)
        if part is not None and part.shape != expected:
            raise ValueError(
                f"{name} of the draft's carry is {list(part.shape)}; expected {list(expected)}, as "
                f"the streams of this model are {width} wide."
            )
