"""Sentences → tokens → examples: which positions are read, by protocol."""

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32
from numpy import ndarray

from jmat.data.examples import Examples, Split

PROTOCOLS = ("din2023", "jmat")


def tokenize(
    sentences: Sequence[str], tokenizer: Any, max_length: int, special_tokens: bool
) -> list[Int32[ndarray, " _"]]:
    """The token ids of each sentence, by a `transformers` tokenizer.

    Sentences without any token of their own are left out; cuts and raises as `tokenize_each`.
    """
    pieces = tokenize_each(sentences, tokenizer, max_length, special_tokens)
    return [piece for piece in pieces if piece is not None]


def tokenize_each(
    sentences: Sequence[str], tokenizer: Any, max_length: int, special_tokens: bool
) -> list[Int32[ndarray, " _"] | None]:
    """The same for every sentence: None where it has no token of its own.

    What is longer than `max_length` is cut by the tokenizer's own rule (BERT's [SEP] stays last), and how many were is
    logged.

    Raises:
      ValueError: `max_length` leaves no room for text.
    """
    added = tokenizer.num_special_tokens_to_add() if special_tokens else 0
    if max_length <= added:
        raise ValueError(f"max_length={max_length} leaves no room for text beside {added} special tokens.")

    def encode(texts: list[str], **options: Any) -> list[list[int]]:
        return (
            tokenizer(texts, add_special_tokens=special_tokens, verbose=False, **options)["input_ids"] if texts else []
        )

    encoded = encode(list(sentences))
    too_long = [i for i, ids in enumerate(encoded) if len(ids) > max_length]
    shorter = encode([sentences[i] for i in too_long], truncation=True, max_length=max_length)
    for i, ids in zip(too_long, shorter, strict=True):
        encoded[i] = ids
    if too_long:
        logging.getLogger(__name__).warning(
            "%d of %d sentences were cut at %d tokens.", len(too_long), len(encoded), max_length
        )
    return [np.asarray(ids, np.int32) if len(ids) > added else None for ids in encoded]


def make_examples(
    fit_sentences: Sequence[str],
    eval_sentences: Sequence[str],
    tokenizer: Any,
    *,
    protocol: str,
    max_length: int,
    seed: int,
    masked: bool,
    positions_per_sentence: int = 1,
    skip_first: int | None = None,
    skip_special: bool | None = None,
) -> Examples:
    """Tokenizes, and draws the positions of the examples. Masked models get their special tokens, causal ones none.

    `din2023` is the protocol of arXiv 2303.09435: one position a sentence, uniform over all its tokens, the first one
    and [CLS] and [SEP] included. `jmat` draws `positions_per_sentence` different ones (fewer where there are no more)
    and leaves out what is no prediction worth making: a causal model's first token, a masked one's special tokens.

    Args:
      protocol: one of `PROTOCOLS`.
      max_length: the model's positions; longer sentences are cut.
      seed: draws the positions, independently for the two parts.
      masked: whether the model is a masked one (BERT) or a causal one (GPT-2).
      positions_per_sentence: for `jmat`.
      skip_first: for `jmat`, how many first tokens are left out; default 1, for masked models 0.
      skip_special: for `jmat`, whether special tokens are left out; default: for masked models.

    Raises:
      ValueError: an unknown protocol, settings against the protocol, no sentence with an eligible position.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol {protocol!r} is unknown; choose one of {', '.join(PROTOCOLS)}.")
    if protocol == "din2023" and (positions_per_sentence != 1 or skip_first or skip_special):
        raise ValueError(
            "protocol din2023 draws one position a sentence and skips none; choose protocol jmat for more."
        )
    if positions_per_sentence < 1 or (skip_first or 0) < 0:
        raise ValueError(f"positions_per_sentence={positions_per_sentence}, skip_first={skip_first}: need ≥ 1 and ≥ 0.")
    if skip_first is None:
        skip_first = int(protocol == "jmat" and not masked)
    if skip_special is None:
        skip_special = protocol == "jmat" and masked
    skipped = sorted(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}) if skip_special else []

    def part(name: str, sentences: Sequence[str], stream: int) -> Split:
        kept, positions = [], []
        copies: Counter[bytes] = Counter()
        for tokens in tokenize(sentences, tokenizer, max_length, special_tokens=masked):
            eligible = np.flatnonzero(~np.isin(tokens, skipped))
            eligible = eligible[eligible >= skip_first]
            if len(eligible):
                generator = _generator(tokens, seed, stream, copies)
                kept.append(tokens)
                positions.append(np.sort(generator.permutation(eligible)[:positions_per_sentence]))
        if not kept:
            raise ValueError(
                f"none of the {len(sentences)} {name} sentences has a position to read"
                + (f" after the first {skip_first}." if skip_first else ": is the text empty?")
            )
        return Split(
            tokens=np.concatenate(kept),
            lengths=np.array([len(tokens) for tokens in kept], np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            rows=np.repeat(np.arange(len(kept), dtype=np.int32), [len(p) for p in positions]),
        )

    return Examples(fit=part("fit", fit_sentences, 0), eval=part("eval", eval_sentences, 1))


def _generator(tokens: Int32[ndarray, " T"], seed: int, stream: int, copies: Counter[bytes]) -> np.random.Generator:
    """Returns the random generator of one sentence; counts its earlier copies in `copies`.

    It depends on the sentence and not on its neighbours: a text with a few other sentences
    keeps the positions of all the rest.
    """
    key = hashlib.sha256(tokens.tobytes()).digest()[:8]
    copies[key] += 1
    return np.random.default_rng([seed, stream, copies[key], int.from_bytes(key)])
