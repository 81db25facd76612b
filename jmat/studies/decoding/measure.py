"""Writes the same texts by several methods, and takes the time."""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxtyping import Int32
from numpy import ndarray

from jmat.decode.generate import generate
from jmat.decode.result import Generated
from jmat.models.family import Transformer
from jmat.runtime.annotations import Keywords
from jmat.runtime.progress import track
from jmat.runtime.timing import in_turn
from jmat.studies.decoding.methods import Method


class Written(NamedTuple):
    """Holds the texts of one method.

    Attributes:
      texts: as `jmat.generate` returned them.
      seconds: of each timed turn; none where no clock was asked for.
    """

    texts: Generated
    seconds: Sequence[float]


def write_all(
    model: Transformer,
    prompts: Sequence[Int32[ndarray, " _"]],
    methods: Sequence[Method],
    *,
    turns: int,
    options: Keywords,
    progress: str | None = None,
) -> dict[str, Written]:
    """Returns the texts of every method behind the same prompts.

    Programs are compiled in a first turn, which is not timed. Methods are timed in turn,
    so that a machine that is busy slows all of them.

    Args:
      model: a causal one with a head.
      prompts: token ids.
      methods: how texts are written.
      turns: how often each method is timed; 0 times nothing.
      options: arguments of `jmat.generate` that all methods share.
      progress: words of the progress bar; None shows none.
    """
    texts: dict[str, Generated] = {}
    works = {}
    for method in track(methods, progress):
        work = functools.partial(generate, model, prompts, **options, **method.arguments)
        texts[method.name] = work()
        works[method.name] = functools.partial(_tokens, work)
    seconds: Mapping[str, Sequence[float]] = in_turn(works, turns)
    return {name: Written(texts[name], seconds[name]) for name in texts}


def _tokens(work: functools.partial[Generated]) -> tuple[ndarray, ...]:
    """Returns new tokens: arrays on the host, which are there once the text is."""
    return work().tokens
