"""Drafts: the next tokens as an early layer foresees them, for the whole model to check."""

import dataclasses
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int
from numpy import ndarray

from jmat.models.config import ModelConfig
from jmat.models.edits import NeedsContext, apply_site, check_site, is_edit
from jmat.models.family import Transformer
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
      map: from h_layer to h_L, such as `jmat.fit_map(model, texts, layer, L).map`.
      tokens: how many are drafted before they are checked, 1 .. 64.
      least: a draft also ends where its most likely token has a smaller probability than
        this, 0 .. 1, at temperature 1.

    Raises:
      ValueError: numbers out of range, or a map that is no callable pytree.

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
    map: Site
    tokens: int = 4
    least: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", whole("layer", self.layer))
        object.__setattr__(self, "tokens", whole("tokens", self.tokens))
        if not 1 <= self.tokens <= MOST_DRAFTED:
            raise ValueError(f"tokens={self.tokens}: expected 1 to {MOST_DRAFTED} drafted tokens.")
        number = isinstance(self.least, int | float) and not isinstance(self.least, bool)
        if not (number and 0 <= self.least <= 1):
            raise ValueError(f"least={self.least!r}: expected a probability from 0 to 1.")
        if is_edit(self.map):
            raise ValueError(
                f"a draft's map leads from its layer to the last one; got the edit "
                f"{type(self.map).__name__}."
            )
        check_site("map", self.map)


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


def apply_map(stand_in: Site, x: Float[Array, "B 1 D"]) -> Float[Array, "B 1 D"]:
    """Returns what a draft's map makes of a stream, in the stream's dtype. Raises
    ValueError where it is another shape.
    """
    return apply_site("map", stand_in, lambda: x, x, x.shape, x.dtype, None)


def check_draft(draft: Draft, model: Transformer) -> None:
    """Raises ValueError for a draft that is not of this model."""
    if not isinstance(draft, Draft):
        raise ValueError(f"draft is of type {type(draft).__name__}; expected jmat.Draft.")
    config: ModelConfig = model.config
    if config.layers == 1:
        raise ValueError("a model of one block has no other blocks to check its drafts.")
    if not 1 <= draft.layer < config.layers:
        raise ValueError(
            f"a draft from layer {draft.layer}: expected 1 to {config.layers - 1}, since some "
            "blocks draft and the others check."
        )
    if isinstance(draft.map, NeedsContext):
        raise ValueError("a draft's map sees one token at a time; this one needs the others.")
    dtype = model_dtype(model)
    try:
        jax.eval_shape(apply_map, draft.map, jax.ShapeDtypeStruct((2, 1, config.width), dtype))
    except ValueError as error:
        raise ValueError(f"the draft's {error}") from error
