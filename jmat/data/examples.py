"""Examples: sentences as token ids, and the positions in them at which activations are
read; and their files.

Everything is numpy, on the host. Letters: S sentences, M examples.
"""

import dataclasses
import os
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int, Int32
from numpy import ndarray

from jmat.data.npz import read_arrays
from jmat.runtime.digests import short_hash
from jmat.runtime.errors import readable_errors
from jmat.runtime.files import save_atomically

_FIELDS = ("tokens", "lengths", "positions", "rows")


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Holds sentences end to end, and the positions in them that are examples.

    Attributes:
      tokens: ids of all sentences, one after another.
      lengths: tokens of each sentence, at least 1.
      positions: where each example stands in its sentence, from 0.
      rows: the sentence of each example; default: one example a sentence, in order.

    Raises:
      ValueError: the arrays contradict one another.
    """

    tokens: Int32[ndarray, " total"]
    lengths: Int32[ndarray, " S"]
    positions: Int32[ndarray, " M"]
    rows: Int32[ndarray, " M"] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.rows is None:
            object.__setattr__(self, "rows", np.arange(len(self.lengths), dtype=np.int32))
        if (self.lengths < 1).any():
            raise ValueError(
                f"sentence {int(np.argmax(self.lengths < 1))} has no tokens: leave empty sentences "
                "out."
            )
        if self.lengths.sum(dtype=np.int64) != len(self.tokens):
            raise ValueError(
                f"the lengths add up to {self.lengths.sum(dtype=np.int64)}, for {len(self.tokens)} "
                "tokens."
            )
        if len(self.rows) != len(self.positions):
            raise ValueError(
                f"{len(self.positions)} positions for {len(self.rows)} rows (default: one a "
                "sentence)."
            )
        if (bad := (self.rows < 0) | (self.rows >= self.num_sentences)).any():
            raise ValueError(
                f"example {int(bad.argmax())} is in sentence {self.rows[bad][0]} of "
                f"{self.num_sentences}."
            )
        if (bad := (self.positions < 0) | (self.positions >= self.lengths[self.rows])).any():
            where = int(bad.argmax())
            raise ValueError(
                f"example {where} is at position {self.positions[where]} of a sentence of"
                f" {self.lengths[self.rows[where]]} tokens; positions count from 0."
            )

    @property
    def num_examples(self) -> int:
        """Returns the number of examples, M."""
        return len(self.positions)

    @property
    def num_sentences(self) -> int:
        """Returns the number of sentences, S."""
        return len(self.lengths)

    @property
    def starts(self) -> Int[ndarray, " S"]:
        """Returns where each sentence begins in `tokens`."""
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    def with_examples(self, read: Bool[ndarray, " total"]) -> "Split":
        """Returns the same sentences with an example at every token that is read."""
        where = np.flatnonzero(read)
        rows = np.searchsorted(np.cumsum(self.lengths, dtype=np.int64), where, side="right").astype(
            np.int32
        )
        positions = (where - self.starts[rows]).astype(np.int32)
        return Split(tokens=self.tokens, lengths=self.lengths, positions=positions, rows=rows)

    def places(self, sentences: Int[ndarray, " K"]) -> Int[ndarray, " total"]:
        """Returns the places in `tokens` of the tokens of some sentences, in their
        order, repeats included.
        """
        spans = zip(self.starts[sentences], self.lengths[sentences], strict=True)
        return np.concatenate([np.arange(start, start + length) for start, length in spans])


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """Holds examples to fit maps on, and others to evaluate them on."""

    fit: Split
    eval: Split


def fingerprint(text: Split | Examples) -> str:
    """Returns 16 hex digits of SHA-256 over all tokens, lengths, positions and rows.

    Two texts with one fingerprint hold the same tokens and the same examples.
    """
    splits = (text.fit, text.eval) if isinstance(text, Examples) else (text,)
    fields = [getattr(split, name) for split in splits for name in _FIELDS]
    return short_hash(
        *(f"{len(field)} ".encode() + np.ascontiguousarray(field).tobytes() for field in fields)
    )


def count_shared(examples: Examples) -> int:
    """Returns how many sentences to evaluate on are, token by token, also among those
    to fit on.
    """
    fit, held_out = (
        [
            split.tokens[start : start + length].tobytes()
            for start, length in zip(split.starts, split.lengths, strict=True)
        ]
        for split in (examples.fit, examples.eval)
    )
    return sum(map(set(fit).__contains__, held_out))


def check_tokens(tokens: Int[ndarray, "..."], vocab_size: int) -> None:
    """Raises ValueError where an id is outside the embedding, which JAX would clamp to
    its last row in silence.
    """
    flat = tokens.reshape(-1)
    for where in (int(flat.argmax()), int(flat.argmin())) if flat.size else ():
        if not 0 <= flat[where] < vocab_size:
            raise ValueError(
                f"token id {flat[where]} at place {where} is outside the model's vocabulary, 0 .. "
                f"{vocab_size - 1}: the tokens come from another tokenizer."
            )


def save_examples(path: str | os.PathLike[str], examples: Examples) -> None:
    """Writes `fit_tokens`, `fit_lengths`, `fit_positions` and the same with `eval_`,
    int32, in an .npz.

    `fit_rows` and `eval_rows` are there only where they are not the default, one
    example a sentence.
    """
    arrays: dict[str, ndarray] = {}
    for name, part in (("fit", examples.fit), ("eval", examples.eval)):
        arrays |= {
            f"{name}_{field}": getattr(part, field) for field in ("tokens", "lengths", "positions")
        }
        if not np.array_equal(part.rows, np.arange(part.num_sentences)):
            arrays[f"{name}_rows"] = part.rows

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:  # a file and not a name, to which numpy would add .npz
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    save_atomically(Path(path), write)


@readable_errors()
def load_examples(path: str | os.PathLike[str]) -> Examples:
    """Reads what `save_examples` wrote. Nothing in the file can run code.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is corrupt or truncated, misses an array, or its arrays contradict
        one another.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no examples file {path}.")
    try:
        arrays = read_arrays(
            path, [f"{split}_{field}" for split in ("fit", "eval") for field in _FIELDS]
        )
    except ValueError as error:
        raise ValueError(
            f"{path} is not a readable .npz: it is corrupt, truncated, or something else "
            f"({error}); make it again with jmat.data.save_examples."
        ) from None
    try:
        examples = Examples(fit=_split(arrays, "fit"), eval=_split(arrays, "eval"))
    except ValueError as error:
        raise ValueError(f"{path} holds no valid examples: {error}") from None
    if not (examples.fit.num_examples and examples.eval.num_examples):
        counts = (
            f"{examples.fit.num_examples} to fit on and {examples.eval.num_examples} to evaluate on"
        )
        raise ValueError(f"{path} has {counts}; expected at least one of each.")
    return examples


def _split(arrays: dict[str, ndarray], name: str) -> Split:
    fields = [field for field in _FIELDS if f"{name}_{field}" in arrays]
    if missing := {"tokens", "lengths", "positions"}.difference(fields):
        raise ValueError(
            f"{', '.join(f'{name}_{field}' for field in sorted(missing))} missing; found "
            f"{sorted(arrays)}."
        )
    try:
        return Split(**{field: _int32(arrays[f"{name}_{field}"]) for field in fields})
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _int32(array: ndarray) -> Int32[ndarray, " n"]:
    limits = np.iinfo(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"an array is {array.dtype}{list(array.shape)}; expected a list of int32.")
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        raise ValueError("a number does not fit int32.")
    return array.astype(np.int32)


def target_tokens(split: Split, *, masked: bool) -> Int[ndarray, " N"]:
    """Returns the token that each example's prediction is about: the next or the masked
    one; -1 where the sentence ends.
    """
    where = split.starts[split.rows] + split.positions
    if masked:
        return split.tokens[where]
    ends = split.positions + 1 == split.lengths[split.rows]
    return np.where(ends, -1, split.tokens[np.minimum(where + 1, len(split.tokens) - 1)])


def mask_positions(split: Split, mask_token: int | None) -> Split:
    """Returns the examples as a masked model reads them: one sentence an example,
    masked at its position.

    Every pass over a model reads a split as it is, so this is done once, when the split
    is made. Tokens to predict (`target_tokens`) come from the split before. The split
    itself is returned where `mask_token` is None, for causal models.
    """
    if mask_token is None:
        return split
    lengths = split.lengths[split.rows]
    tokens = split.tokens[split.places(split.rows)]
    ends = np.cumsum(lengths)
    tokens[ends - lengths + split.positions] = mask_token
    rows = np.arange(split.num_examples, dtype=np.int32)
    return Split(tokens=tokens, lengths=lengths, positions=split.positions, rows=rows)
