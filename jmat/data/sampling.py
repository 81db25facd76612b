"""Sentences → tokens → examples: which positions are read, by protocol."""

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Int32
from numpy import ndarray

from jmat.data import encoding
from jmat.data.encoding import Tokenizer, encode
from jmat.data.examples import Examples, Split
from jmat.runtime.digests import short_hash

PROTOCOLS = ("din2023", "jmat")


def tokenize(
    sentences: Sequence[str], tokenizer: Tokenizer, max_length: int, special_tokens: bool
) -> list[Int32[ndarray, " _"]]:
    """Returns the token ids of each sentence, with all special tokens of a
    `transformers` tokenizer, or without.

    Sentences without any token of their own are left out; cuts, logs and raises as
    `jmat.data.encoding.encode`, which also gives causal models theirs.
    """
    special = (
        encoding.special_tokens(tokenizer, masked=True)
        if special_tokens
        else encoding.SpecialTokens()
    )
    return [
        piece for piece in encode(sentences, tokenizer, max_length, special) if piece is not None
    ]


def skipped_tokens(
    tokenizer: Tokenizer, *, masked: bool, skip_special: bool | None
) -> Collection[int]:
    """Returns the ids of tokens that protocol `jmat` does not read, given its setting.

    By default (None) special tokens are left out for a masked model, and for a causal
    one whose tokenizer puts any in front of a text, such as BOS. The token for unknown
    words is always read.
    """
    before = encoding.special_tokens(tokenizer, masked=masked).before
    if not (skip_special if skip_special is not None else masked or before):
        return ()
    return {*special_ids(tokenizer), *before}


def special_ids(tokenizer: Tokenizer) -> set[int]:
    """Returns the ids of special tokens, without that of unknown words, which stands
    for text.
    """
    return {*tokenizer.all_special_ids} - {encoding.special_id(tokenizer, "unk")}


def make_examples(
    fit_sentences: Sequence[str],
    eval_sentences: Sequence[str],
    tokenizer: Tokenizer,
    *,
    protocol: str,
    max_length: int,
    seed: int,
    masked: bool,
    positions_per_sentence: int = 1,
    skip_first: int | None = None,
    skip_special: bool | None = None,
) -> Examples:
    """Tokenizes, and draws the positions of the examples. Special tokens are those of
    `jmat.data.encoding`.

    `din2023` is the protocol of arXiv 2303.09435: one position a sentence, uniform over
    all its tokens, the first one and BOS, [CLS] and [SEP] included. `jmat` draws
    `positions_per_sentence` different ones (fewer where there are no more) and leaves
    out what is no prediction worth making: special tokens, and a causal model's first
    position, which is BOS where the tokenizer puts one there, and else the first token
    of the text.

    Args:
      protocol: one of `PROTOCOLS`.
      max_length: the model's positions; longer sentences are cut.
      seed: draws the positions, independently for the two parts.
      masked: whether the model is a masked one (BERT) or a causal one (GPT-2).
      positions_per_sentence: for `jmat`.
      skip_first: for `jmat`, how many first positions are left out, BOS counted;
        default 1, for masked models 0.
      skip_special: for `jmat`, whether special tokens are left out; default as in
        `skipped_tokens`.

    Raises:
      ValueError: an unknown protocol, settings against the protocol, no sentence with
        an eligible position.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol {protocol!r} is unknown; choose one of {', '.join(PROTOCOLS)}.")
    if protocol == "din2023" and (positions_per_sentence != 1 or skip_first or skip_special):
        raise ValueError(
            "protocol din2023 draws one position a sentence and skips none; choose protocol jmat "
            "for more."
        )
    if positions_per_sentence < 1 or (skip_first or 0) < 0:
        raise ValueError(
            f"positions_per_sentence={positions_per_sentence}, skip_first={skip_first}: need ≥ 1 "
            "and ≥ 0."
        )
    if skip_first is None:
        skip_first = int(protocol == "jmat" and not masked)
    special = encoding.special_tokens(tokenizer, masked=masked)
    skipped: list[int] = []
    if protocol == "jmat":
        skipped = sorted(skipped_tokens(tokenizer, masked=masked, skip_special=skip_special))

    def part(name: str, sentences: Sequence[str], stream: int) -> Split:
        kept, positions = [], []
        copies: Counter[str] = Counter()
        for tokens in encode(sentences, tokenizer, max_length, special):
            if tokens is None:
                continue
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


def _generator(
    tokens: Int32[ndarray, " T"], seed: int, stream: int, copies: Counter[str]
) -> np.random.Generator:
    """Returns the random generator of one sentence; counts its earlier copies in
    `copies`.

    It depends on the sentence and not on its neighbours: a text with a few other
    sentences keeps the positions of all the rest.
    """
    key = short_hash(tokens.tobytes())
    copies[key] += 1
    return np.random.default_rng([seed, stream, copies[key], int(key, 16)])
