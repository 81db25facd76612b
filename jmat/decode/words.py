"""The words that a draft with a short list reads the head of."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from jmat.data.batches import Batch
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Split
from jmat.data.reading import every_token
from jmat.runtime.checks import check_whole


def frequent_words(
    inputs: Sequence[str] | Split | Batch, count: int, *, tokenizer: Tokenizer | None = None
) -> Int[ndarray, " W"]:
    """Returns the ids of the tokens that come most often in texts, in the order of ids.

    Args:
      inputs: texts, a batch or a `Split`, of which every token counts.
      count: how many; fewer come back where the texts have no more.
      tokenizer: reads texts.

    Raises:
      ValueError: a count below 1; texts without a tokenizer.

    Examples:
      >>> import jmat
      >>> from jmat.decode.words import frequent_words
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> words = frequent_words(["a list of a list"], 2, tokenizer=tokenizer)
      >>> [tokenizer.decode(word).strip() for word in words]
      ['a', 'list']
    """
    check_whole("count", count, 1)
    times = np.bincount(every_token(inputs, tokenizer).tokens)
    order = np.argsort(-times, kind="stable")[:count]
    return np.sort(order[times[order] > 0])
