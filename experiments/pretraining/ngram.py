"""Interpolated modified Kneser–Ney n-grams over token ids: the baseline that a language
model has to beat.

Chen & Goodman, *An Empirical Study of Smoothing Techniques for Language Modeling*
(1998), section 3. For a word w after the context c, from order n down to 1,

    p_n(w | c) = max(a(cw) − D_n(a(cw)), 0) / a(c·) + γ(c) · p_{n−1}(w | c without its first word)
    p_0 = 1 / V

where a is the adjusted count: at the highest order, and for what begins a sequence, how
often; below, after how many different words. a(c·) = Σ_w a(cw), and γ(c), the sum of
the discounts over a(c·), makes the whole sum to one. A context never seen leaves it all
to the next order.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


class Order(NamedTuple):
    """All n-grams of one length: N of them, in the order of their keys, and M contexts
    (the n-grams one shorter).
    """

    # context's index among the n-grams one shorter, times (V + 1), plus the last word
    keys: Int[np.ndarray, " N"]
    discounted: Float[np.ndarray, " N"]  # max(a − D(a), 0) / a(c·)
    backoff: Float[np.ndarray, " M"]  # γ; 1 for a context that nothing follows


@dataclasses.dataclass(frozen=True)
class NGram:
    """A fitted model; `orders[k]` holds the (k + 1)-grams. Id V stands for the
    beginning of a sequence.
    """

    vocab_size: int
    orders: tuple[Order, ...]


def fit(sequences: Sequence[Sequence[int]], *, vocab_size: int, order: int = 5) -> NGram:
    """Fits a model of `order` to sequences of token ids in [0, vocab_size). Each
    sequence is its own text.

    The model knows where a sequence begins; where it ends only if an end token stands
    there. Raises ValueError for ids outside the vocabulary, for no sequences, and for
    an order below 1.
    """
    if order < 1:
        raise ValueError(f"order={order}: expected at least 1.")
    words, starts = _flatten(sequences, vocab_size)
    base = vocab_size + 1
    place = np.arange(len(words)) - starts  # index in the sequence, the beginning having 0
    # the index of the (n − 1)-gram that ends just before each word
    context = np.zeros(len(words), np.int64)
    index = np.full(len(words), -1)  # the index of the n-gram that ends with each word
    keys: list[np.ndarray] = []
    adjusted: list[np.ndarray] = []
    for n in range(1, order + 1):
        ends = np.flatnonzero(place >= n - 1)
        if not len(ends):
            break  # no sequence is as long: higher orders would say nothing
        unique, first, inverse, counts = np.unique(
            context[ends] * base + words[ends],
            return_index=True,
            return_inverse=True,
            return_counts=True,
        )
        if n > 1:
            # How many n-grams end in each (n − 1)-gram. None where that begins a sequence: its
            # count stays as it was.
            extensions = np.bincount(index[ends[first]], minlength=len(keys[-1]))
            adjusted[-1] = np.where(extensions == 0, adjusted[-1], extensions)
        keys.append(unique)
        adjusted.append(counts)
        index = np.full(len(words), -1)
        index[ends] = inverse
        context = np.concatenate([[-1], index[:-1]])
    adjusted[0][keys[0] == vocab_size] = 0  # nothing predicts a beginning
    contexts = [1, *map(len, keys[:-1])]
    return NGram(
        vocab_size,
        tuple(_smooth(k, a, m, base) for k, a, m in zip(keys, adjusted, contexts, strict=True)),
    )


def log_prob(model: NGram, sequences: Sequence[Sequence[int]]) -> list[Float[np.ndarray, " T"]]:
    """ln p of each token after those before it in its sequence. Raises ValueError for
    ids outside the vocabulary.
    """
    words, starts = _flatten(sequences, model.vocab_size)
    base = model.vocab_size + 1
    place = np.arange(len(words)) - starts
    probability = np.full(len(words), 1 / model.vocab_size)
    context = np.zeros(len(words), np.int64)  # −1: an n-gram never seen
    for n, order in enumerate(model.orders, 1):
        known = (context >= 0) & (place >= n - 1)
        key = np.where(known, context * base + words, -1)
        index = np.searchsorted(order.keys, key).clip(max=len(order.keys) - 1)
        found = known & (order.keys[index] == key)
        gamma = np.where(known, order.backoff[context], 1.0)
        probability = np.where(found, order.discounted[index], 0.0) + gamma * probability
        context = np.concatenate([[-1], np.where(found, index, -1)[:-1]])
    lengths = [len(sequence) for sequence in sequences]
    return np.split(np.log(probability[place > 0]), np.cumsum(lengths)[:-1])


def _flatten(
    sequences: Sequence[Sequence[int]], vocab_size: int
) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]:
    """All sequences end to end, each after a beginning (id V), and for each token where
    its sequence begins.
    """
    if not sequences:
        raise ValueError("got no sequences: expected at least one.")
    words = np.concatenate(
        [np.asarray([vocab_size, *sequence], np.int64) for sequence in sequences]
    )
    lengths = np.asarray([len(sequence) + 1 for sequence in sequences])
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    bad = (
        (words < 0)
        | (words > vocab_size)
        | ((words == vocab_size) & (starts != np.arange(len(words))))
    )
    if bad.any():
        raise ValueError(
            f"token id {words[bad][0]} is outside the vocabulary, 0 .. {vocab_size - 1}."
        )
    return words, starts


def _smooth(
    keys: Int[np.ndarray, " N"], adjusted: Int[np.ndarray, " N"], contexts: int, base: int
) -> Order:
    """Discounts the adjusted counts of one order and gives every context the mass that
    was taken off.
    """
    context = keys // base
    discount = np.concatenate([[0.0], _discounts(adjusted)])[np.minimum(adjusted, 3)]
    total = np.bincount(context, adjusted, minlength=contexts)
    taken = np.bincount(context, discount, minlength=contexts)
    safe = np.maximum(total, 1)
    return Order(
        keys, (adjusted - discount) / safe[context], np.where(total > 0, taken / safe, 1.0)
    )


def _discounts(adjusted: Int[np.ndarray, " N"]) -> Float[np.ndarray, " 3"]:
    """D_1, D_2, D_3+ from how many n-grams have counts 1 .. 4 (Chen & Goodman, eq. 26);
    0.5, 1, 1.5 if too few have.
    """
    n = np.bincount(np.minimum(adjusted, 5), minlength=6)[1:5].astype(float)
    if n.min() == 0:
        return np.asarray([0.5, 1.0, 1.5])
    i = np.arange(1, 4)
    estimate = i - (i + 1) * n[0] / (n[0] + 2 * n[1]) * n[1:] / n[:3]
    return np.where((estimate > 0) & (estimate < i), estimate, 0.5 * i)
