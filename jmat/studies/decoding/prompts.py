"""Prompts: the first tokens of sentences that no map was fitted on."""

import numpy as np
from jaxtyping import Int32
from numpy import ndarray

from jmat.data.examples import Split


def first_tokens(split: Split, count: int, length: int) -> list[Int32[ndarray, " T"]]:
    """Returns the first `length` tokens of the first `count` sentences that have more.

    Two sentences that begin alike give one prompt.

    Raises:
      ValueError: there are fewer of them.
    """
    prompts: dict[bytes, Int32[ndarray, " T"]] = {}
    for start, tokens in zip(split.starts, split.lengths, strict=True):
        if tokens <= length:
            continue
        prompt = np.asarray(split.tokens[start : start + length], np.int32)
        prompts.setdefault(prompt.tobytes(), prompt)
        if len(prompts) == count:
            return list(prompts.values())
    raise ValueError(
        f"{len(prompts)} of {split.num_sentences} sentences to evaluate on begin with {length} "
        f"tokens of their own and go on, and num_prompts={count}: ask for fewer prompts, shorter "
        "ones, or more text."
    )
