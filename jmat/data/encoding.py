"""Turns text into the tokens that a model reads, for examples, tasks, probes and all
else.

Special tokens stand where the checkpoint's own tokenizer puts them. A masked model gets
all of them, [CLS] and [SEP]. A causal model gets those in front of a text, which is BOS
for LLaMA, Mistral and Gemma and nothing for GPT-2; each piece of a long text gets them
too. What the tokenizer appends for training, such as EOS, a causal model does not get:
it would be scored as if it were text.
"""

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32
from numpy import ndarray

from jmat.data.panics import TokenizerError, panics_as_errors

# of a long text that are looked at for each token that is wanted; more where they are too few
_CHARACTERS = 16
_MARGIN = 64  # tokens at a cut that may differ from those of the whole text
_PART = 1 << 20  # characters of a text that are tokenized at once
_TEXTS = 256  # texts that are tokenized at once
# a tokenizer that reads fewer characters a second, after so many seconds, is refused
_SECONDS, _PER_SECOND = 5.0, 500


@runtime_checkable
class NamesTokens(Protocol):
    """Describes the part of a tokenizer of transformers that names tokens."""

    def convert_ids_to_tokens(self, ids: int) -> str | list[str] | None:
        """Returns the name of a token."""
        ...

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Returns the text that tokens stand for, by their names."""
        ...


@runtime_checkable
class KnowsSpecialTokens(Protocol):
    """Describes the part of a tokenizer of transformers that knows special tokens."""

    @property
    def all_special_ids(self) -> list[int]:
        """Returns the ids of special tokens."""
        ...


@runtime_checkable
class Tokenizer(NamesTokens, KnowsSpecialTokens, Protocol):
    """Describes the part of a tokenizer of transformers that jmat needs."""

    truncation_side: str  # "right" or "left": where a text that is too long is cut

    def __call__(self, text: list[str], **options: Any) -> Mapping[str, Any]:
        """Returns `input_ids`, and more, of several texts."""
        ...

    def __len__(self) -> int:
        """Returns how many tokens there are."""
        ...

    def decode(self, token_ids: int | list[int]) -> str | list[str]:
        """Returns the text of tokens."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Returns the ids of all tokens by name."""
        ...

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> object:
        """Writes the tokenizer's files into a folder."""
        ...


def token_name(token: int, tokenizer: NamesTokens) -> str | None:
    """Returns the name of a token; None where the tokenizer has no such token."""
    name = tokenizer.convert_ids_to_tokens(token)
    return name if isinstance(name, str) else None


def special_id(tokenizer: KnowsSpecialTokens | None, name: str) -> int | None:
    """Returns the id of the special token `mask`, `unk`, `eos`, …; None where the
    tokenizer has none.
    """
    return getattr(tokenizer, f"{name}_token_id", None)


def known_id(tokenizer: KnowsSpecialTokens, name: str) -> int:
    """Returns the id of the special token `mask`, `eos`, …. Raises ValueError where the
    tokenizer has none.
    """
    found = special_id(tokenizer, name)
    if found is None:
        raise ValueError(f"the tokenizer has no special token {name!r}.")
    return found


class SpecialTokens(NamedTuple):
    """Holds the ids that a tokenizer puts before and after every text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


def special_tokens(tokenizer: Tokenizer, *, masked: bool) -> SpecialTokens:
    """Returns the special tokens around a text: all for a masked model, those in front
    for a causal one.

    Raises:
      ValueError: the tokenizer makes no token of any text.
    """
    letters = (token_name(token, tokenizer) for token in range(min(len(tokenizer), 1000)))
    for text in ("a", "1", *letters):
        try:
            (inside,), (whole,) = (
                _ids([text or ""], tokenizer, add_special_tokens=add) for add in (False, True)
            )
        except TokenizerError:
            raise
        except ValueError:  # there is no token for unknown letters
            continue
        starts = range(len(whole) - len(inside) + 1)
        start = next(
            (at for at in starts if inside and whole[at : at + len(inside)] == inside), None
        )
        if start is not None:
            after = whole[start + len(inside) :] if masked else []
            return SpecialTokens(tuple(whole[:start]), tuple(after))
    raise ValueError(
        "the tokenizer makes no token of any text; expected the tokenizer of this model."
    )


def encode(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    max_length: int,
    special: SpecialTokens,
) -> list[Int32[ndarray, " _"] | None]:
    """Returns the token ids of each text, special tokens included; None where a text
    has no token of its own.

    A longer text than `max_length` is cut at the side that the tokenizer names
    (`truncation_side`, by default the end) between its special tokens; how many texts
    were cut is logged. A causal model's text that spells out the tokens of
    `special.before` at its beginning does not get them twice.

    Raises:
      ValueError: `max_length` leaves no room for text; a text is no Unicode; the
        tokenizer fails on a text.
    """
    room = _room(max_length, special)
    keep_end = tokenizer.truncation_side == "left"
    arrays: list[Int32[ndarray, " _"] | None] = []
    cut = 0
    for ids in _beginnings(texts, tokenizer, room + _MARGIN, keep_end):
        own = _own(special, ids)
        cut += len(own) > room
        own = own[-room:] if keep_end else own[:room]
        arrays.append(_joined(special, own) if own else None)
    if cut:
        message = "Sentences that were cut at %d tokens: %d of %d."
        logging.getLogger(__name__).warning(message, max_length, cut, len(arrays))
    return arrays


def encode_pieces(
    texts: Sequence[str], tokenizer: Tokenizer, max_length: int, special: SpecialTokens
) -> list[list[Int32[ndarray, " _"]]]:
    """Returns all of each text in pieces of at most `max_length` tokens, each between
    the special tokens.

    A text of more than a million characters is tokenized in parts that end before a
    space, which is logged.

    Raises what `encode` does.
    """
    room = _room(max_length, special)
    parts = [_parts(text) for text in texts]
    if several := sum(len(each) > 1 for each in parts):
        message = (
            "Texts that are longer than %d characters, and were cut there before they became "
            "tokens: %d of %d."
        )
        logging.getLogger(__name__).warning(message, _PART, several, len(texts))
    ids = _guarded([part for each in parts for part in each], tokenizer)
    pieces = []
    for each in parts:
        own = _own(special, [token for _ in each for token in next(ids)])
        pieces.append([_joined(special, own[at : at + room]) for at in range(0, len(own), room)])
    return pieces


def text_tokens(
    texts: Sequence[str], tokenizer: Tokenizer, special: SpecialTokens
) -> list[list[int]]:
    """Returns the token ids of each text, whole, without the special tokens around it.
    Raises what `encode` does.
    """
    return [_own(special, ids) for ids in _guarded(texts, tokenizer)]


def ending(text: str, tokenizer: Tokenizer, tokens: int) -> str:
    """Returns the text, or its end where that alone has more than so many tokens."""
    size = _CHARACTERS * (tokens + _MARGIN)
    while size < len(text) and len(next(_guarded([text[-size:]], tokenizer))) < tokens + _MARGIN:
        size *= 4
    return text[-size:]


def check_text(text: str, name: str) -> str:
    """Returns a text that is Unicode; raises ValueError, with the name of the text, for
    one that is not.
    """
    if not isinstance(text, str):
        raise ValueError(f"{name} is of type {type(text).__name__}; expected text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        piece = text[max(error.start - 20, 0) : error.start + 20]
        raise ValueError(
            f"{name} is no Unicode text: character {error.start}, in {piece!a}, is half of a "
            "character or a byte that is not UTF-8."
        ) from None
    return text


def _room(max_length: int, special: SpecialTokens) -> int:
    added = len(special.before) + len(special.after)
    if max_length <= added:
        raise ValueError(
            f"max_length={max_length} leaves no room for text beside {added} special tokens."
        )
    return max_length - added


def _own(special: SpecialTokens, ids: list[int]) -> list[int]:
    """Returns the ids of a causal model's text without special tokens that the text
    spells out at its beginning.
    """
    before = special.before
    return ids[len(before) :] if not special.after and tuple(ids[: len(before)]) == before else ids


def _joined(special: SpecialTokens, own: list[int]) -> Int32[ndarray, " _"]:
    return np.asarray([*special.before, *own, *special.after], np.int32)


def _beginnings(
    texts: Sequence[str], tokenizer: Tokenizer, tokens: int, keep_end: bool
) -> Iterator[list[int]]:
    """Yields the ids of each text; of a long one only part, at least `tokens`, from the
    side that is kept.
    """

    def cut(text: str, size: int) -> str:
        return text[-size:] if keep_end else text[:size]

    size = _CHARACTERS * tokens
    for text, ids in zip(
        texts, _guarded([cut(text, size) for text in texts], tokenizer), strict=True
    ):
        seen = size
        while len(ids) < tokens and seen < len(text):
            seen *= 4
            ids = next(_guarded([cut(text, seen)], tokenizer))
        yield ids


def _parts(text: str) -> list[str]:
    """Returns a text in parts of at most `_PART` characters, cut before a space if
    there is one.
    """
    parts = []
    while len(text) > _PART:
        at = text.rfind(" ", _PART // 2, _PART)
        at = at if at > 0 else _PART
        parts.append(text[:at])
        text = text[at:]
    return [*parts, text]


def _guarded(texts: Sequence[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yields the ids of each text without special tokens; reads small batches, so that
    errors show early.

    Regular expressions in a tokenizer.json can take exponential time; a tokenizer that
    is so slow is refused. Its own processor time counts, so that a busy machine makes
    no difference.
    """
    for text in texts:
        check_text(text, "a text")
    start, characters, spent = 0, 0, 0.0
    while start < len(texts):
        stop, size = start + 1, len(texts[start])
        most = 8 if start == 0 else _TEXTS
        while stop < min(len(texts), start + most) and size + len(texts[stop]) <= _PART:
            size += len(texts[stop])
            stop += 1
        began = time.process_time()
        ids = _ids(texts[start:stop], tokenizer)
        start, characters, spent = stop, characters + size, spent + time.process_time() - began
        if spent > _SECONDS + characters / _PER_SECOND:
            raise TokenizerError(
                f"the tokenizer takes {spent:.0f} s for {characters} characters: a regular "
                "expression in its tokenizer.json takes exponential time."
            )
        yield from ids


def _ids(
    texts: Sequence[str], tokenizer: Tokenizer, *, add_special_tokens: bool = False
) -> list[list[int]]:
    options = {
        "add_special_tokens": add_special_tokens,
        "return_attention_mask": False,
        "verbose": False,
    }
    with panics_as_errors("the tokenizer fails on a text"):
        return tokenizer(list(texts), **options)["input_ids"]
