"""Divides sentences into parts that never share one, and draws from them by a hash."""

import hashlib
import os
import string
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

SPLIT_SHARES = {"train": 0.78, "fit": 0.155, "eval": 0.065}


def split(sentences: Iterable[str]) -> dict[str, list[str]]:
    """Divides sentences into ``train`` (78 %), ``fit`` (15.5 %) and ``eval`` (6.5 %),
    in their order.

    The place of a sentence depends on its own letters alone, not on case, digits,
    punctuation or the other sentences: whatever versions are installed, none ever moves
    from one part to another, and near-identical ones stay together.
    """
    parts: dict[str, list[str]] = {name: [] for name in SPLIT_SHARES}
    bounds = np.cumsum(list(SPLIT_SHARES.values()))
    for sentence in sentences:
        place = int.from_bytes(digest(letters(sentence))[:8]) / 2**64
        parts[list(parts)[int(np.searchsorted(bounds[:-1], place, side="right"))]].append(sentence)
    return parts


def check_parts(parts: Mapping[str, Sequence[str]], name: str | os.PathLike[str]) -> None:
    """Raises ValueError where one of the parts of a corpus (`split`) is empty."""
    if not all(parts.values()):
        sizes = ", ".join(f"{part} {len(sentences)}" for part, sentences in parts.items())
        raise ValueError(
            f"corpus {name} is too small to be divided ({sizes} sentences): give more text."
        )


def divide(texts: Iterable[str], fit: int, held_out: int) -> tuple[list[str], list[str]]:
    """Divides texts by a hash of their letters into those to fit on and those to
    evaluate on.

    Texts that differ in case, digits and punctuation alone stand side by side, so all
    but those at the cut stay together. The order in which the texts are given does not
    matter.

    Args:
      texts: the texts, each once.
      fit: parts to fit on, in proportion to `held_out`.
      held_out: parts to evaluate on.
    """
    ranked = sorted(texts, key=lambda text: (digest(letters(text)), digest(text)))
    cut = round(len(ranked) * fit / (fit + held_out))
    return ranked[:cut], ranked[cut:]


def draw(sentences: Iterable[str], count: int, seed: int) -> list[str]:
    """Returns the `count` sentences that come first by a hash of the seed and their
    letters.

    Each sentence is ranked by itself, so a corpus with a few sentences more or fewer
    (other versions of the packages that `docs` is read from) gives nearly the same
    draw.
    """
    return sorted(sentences, key=lambda text: digest(f"{seed} {letters(text)}"))[:count]


def distinct(sentences: Iterable[str]) -> list[str]:
    """Returns the first of each group of sentences that have the same letters, in their
    order.
    """
    first: dict[str, str] = {}
    for sentence in sentences:
        first.setdefault(letters(sentence), sentence)
    return list(first.values())


_NOT_LETTERS = str.maketrans("", "", string.punctuation + string.digits)


def letters(sentence: str) -> str:
    """Returns a sentence without case, digits and punctuation, its words one space
    apart; itself where nothing is left.
    """
    return " ".join(sentence.casefold().translate(_NOT_LETTERS).split()) or sentence


def digest(text: str) -> bytes:
    """Returns the SHA-256 of a text."""
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()
