"""Turns texts into what a model reads: a padded `Batch`, or a `Split` in which every
token is read.
"""

from collections.abc import Sequence
from typing import TypeGuard

import numpy as np
from jaxtyping import Int32
from numpy import ndarray

from jmat.data.batches import Batch
from jmat.data.encoding import Tokenizer, special_id, special_tokens
from jmat.data.encoding import encode as token_ids
from jmat.data.examples import Split
from jmat.runtime.checks import check_whole

_NO_LIMIT = 1 << 20  # tokens


def encode(
    tokenizer: Tokenizer | None, texts: Sequence[str], *, max_length: int | None = None
) -> Batch:
    """Turns texts into a batch: one text a row, padded on the right to the longest.

    Special tokens stand where the tokenizer puts them: around a text for a masked
    model, and in front of it for a causal one (`jmat.data.encoding`).

    Args:
      tokenizer: as `jmat.load` returns it.
      texts: the texts.
      max_length: tokens at which a text is cut; by default none is, and `jmat.run`
        refuses a text that is longer than the model's positions.

    Raises:
      ValueError: a text has no tokens, or there are no texts.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> batch = jmat.encode(tokenizer, ["Return a new array", "The default is None"])
      >>> jmat.run(model, batch)[0].shape
      (2, 4, 192)
    """
    rows = _token_rows(tokenizer, texts, max_length)
    lengths = np.array([len(row) for row in rows])
    real = np.arange(lengths.max()) < lengths[:, None]
    tokens = np.zeros(real.shape, np.int32)
    tokens[real] = np.concatenate(rows)
    positions = np.where(real, np.arange(real.shape[1]), 0).astype(np.int32)
    nothing = np.zeros((len(rows), 0), np.int32)
    return Batch(tokens, real.astype(np.int32), positions, read_at=nothing, examples=nothing)


def every_token(inputs: Sequence[str] | Split | Batch, tokenizer: Tokenizer | None = None) -> Split:
    """Returns the sentences in which each token is an example; a `Split` is returned as
    it is.

    Args:
      inputs: texts; a batch, whose texts come row by row; or a split.
      tokenizer: reads texts.

    Raises:
      ValueError: texts without a tokenizer; as `encode`.
    """
    if isinstance(inputs, Split):
        return inputs
    if isinstance(inputs, Batch):
        fields = [np.asarray(field) for field in (inputs.tokens, inputs.segments)]
        rows = [
            row[segments == k]
            for row, segments in zip(*fields, strict=True)
            for k in np.unique(segments)
            if k
        ]
    else:
        rows = _token_rows(tokenizer, inputs, None)
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.concatenate(rows).astype(np.int32)
    whole = Split(tokens=tokens, lengths=lengths, positions=np.zeros(len(rows), np.int32))
    return whole.with_examples(np.ones(len(tokens), bool))


def is_texts(inputs: object) -> TypeGuard[Sequence[str]]:
    """Returns whether inputs of a model are texts, or one of several is."""
    if isinstance(inputs, list | tuple) and not isinstance(inputs, Batch):
        return any(isinstance(each, str) for each in inputs)
    return isinstance(inputs, str)


def check_texts(texts: object, tokenizer: Tokenizer | None) -> Tokenizer:
    """Returns the tokenizer. Raises ValueError for what is no list of texts, and for
    texts without a tokenizer.
    """
    if tokenizer is None:
        raise ValueError(
            "texts need a tokenizer to be read: give tokenizer=, as jmat.load returns it."
        )
    if not isinstance(tokenizer, Tokenizer):
        raise ValueError(
            f"the tokenizer is of type {type(tokenizer).__name__}; expected the one that jmat.load "
            "returns beside the model."
        )
    if isinstance(texts, str) or not isinstance(texts, Sequence | np.ndarray):
        got = "one text" if isinstance(texts, str) else f"an object of type {type(texts).__name__}"
        raise ValueError(f"expected a list of texts; got {got}.")
    others = sorted({type(text).__name__ for text in texts if not isinstance(text, str)})
    if others or not len(texts):
        got = f"a list that holds an object of type {others[0]}" if others else "no texts"
        raise ValueError(f"expected a list of texts; got {got}.")
    return tokenizer


def _token_rows(
    tokenizer: Tokenizer | None, texts: Sequence[str], max_length: int | None
) -> list[Int32[ndarray, " _"]]:
    """Returns the tokens of each text. Raises ValueError for texts that have none, and
    as `check_texts`.
    """
    tokenizer = check_texts(texts, tokenizer)
    if max_length is not None:
        check_whole("max_length", max_length, 1)
    masked = special_id(tokenizer, "mask") is not None
    special = special_tokens(tokenizer, masked=masked)
    rows = token_ids(texts, tokenizer, max_length or _NO_LIMIT, special)
    if (empty := next((index for index, row in enumerate(rows) if row is None), None)) is not None:
        raise ValueError(f"text {empty} has no tokens ({texts[empty]!r}): leave it out.")
    return [row for row in rows if row is not None]
