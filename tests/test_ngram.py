"""Kneser–Ney: against the formulas written out with dictionaries, and proper
probabilities in every context.
"""

import collections
import math

import numpy as np
import pytest

from experiments.pretraining import ngram

V = 7
RANDOM = np.random.default_rng(0)
# Skewed, so that counts of 1, 2, 3 and 4 all occur; of many lengths, down to one token.
TEXT = [
    np.minimum(RANDOM.geometric(0.35, n) - 1, V - 2).tolist()
    for n in [1, 1, 2, *RANDOM.integers(3, 12, 60)]
]
HELD_OUT = [[0, 1, 2, 3, 4, 5, 6, 6, 0], [6], [5, 5, 5, 5, 5, 5], [2, 0, 0, 1]]


def slow_log_prob(order, sequence):
    """The recursion of Chen & Goodman, word by word."""
    padded = [("<s>", *sentence) for sentence in TEXT]
    grams = {
        n: collections.Counter(s[i : i + n] for s in padded for i in range(len(s) - n + 1))
        for n in range(1, order + 1)
    }
    counts = {}
    for n in range(1, order + 1):
        left = collections.Counter(g[1:] for g in grams[n + 1]) if n < order else {}
        keep = n == order
        counts[n] = {
            g: c if keep or g[0] == "<s>" else left[g] for g, c in grams[n].items() if g != ("<s>",)
        }
    discounts = {}
    for n in counts:
        n1, n2, n3, n4 = (sum(c == k for c in counts[n].values()) for k in (1, 2, 3, 4))
        if min(n1, n2, n3, n4) == 0:
            discounts[n] = {1: 0.5, 2: 1.0, 3: 1.5}
            continue
        y = n1 / (n1 + 2 * n2)
        raw = {1: 1 - 2 * y * n2 / n1, 2: 2 - 3 * y * n3 / n2, 3: 3 - 4 * y * n4 / n3}
        discounts[n] = {i: d if 0 < d < i else i / 2 for i, d in raw.items()}

    def p(word, context):
        n = len(context) + 1
        lower = p(word, context[1:]) if n > 1 else 1 / V
        following = {g: c for g, c in counts[n].items() if g[:-1] == context}
        if not following:
            return lower
        total = sum(following.values())
        gamma = sum(discounts[n][min(c, 3)] for c in following.values()) / total
        c = counts[n].get((*context, word), 0)
        return (max(c - discounts[n][min(c, 3)], 0) / total if c else 0) + gamma * lower

    text = ("<s>", *sequence)
    return [math.log(p(text[i], text[max(0, i - order + 1) : i])) for i in range(1, len(text))]


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_equals_the_recursion(order):
    model = ngram.fit(TEXT, vocab_size=V, order=order)
    found = ngram.log_prob(model, HELD_OUT)
    assert [len(f) for f in found] == [len(s) for s in HELD_OUT]
    for got, sequence in zip(found, HELD_OUT, strict=True):
        np.testing.assert_allclose(got, slow_log_prob(order, sequence), rtol=1e-12)


@pytest.mark.parametrize(
    "context", [[], [0], [6], [0, 0], [1, 0, 0, 2], [6, 6, 6, 6], TEXT[10][:4], TEXT[20][2:7]]
)
def test_probabilities_sum_to_one_after_seen_and_unseen_contexts(context):
    model = ngram.fit(TEXT, vocab_size=V)
    last = [
        log_probs[-1]
        for log_probs in ngram.log_prob(model, [[*context, word] for word in range(V)])
    ]
    assert np.exp(last).sum() == pytest.approx(1, abs=1e-12)


def test_discounts_come_from_counts_of_counts_in_the_test_data():
    """The test above would not see a wrong estimate if every order fell back to fixed
    discounts.
    """
    counts = np.repeat([1, 2, 3, 4, 9], [50, 20, 10, 6, 3])
    y = 50 / 90
    expected = [1 - 2 * y * 20 / 50, 2 - 3 * y * 10 / 20, 3 - 4 * y * 6 / 10]
    np.testing.assert_allclose(ngram._discounts(counts), expected)
    np.testing.assert_allclose(ngram._discounts(np.asarray([1, 2])), [0.5, 1, 1.5])


def test_an_order_beyond_the_longest_sequence_changes_nothing():
    longest = ngram.fit([[0, 1, 2], [2, 1]], vocab_size=4, order=4)
    for got, want in zip(
        ngram.log_prob(
            ngram.fit([[0, 1, 2], [2, 1]], vocab_size=4, order=50), [[0, 1, 2, 3, 1, 1], [3]]
        ),
        ngram.log_prob(longest, [[0, 1, 2, 3, 1, 1], [3]]),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


def test_wrong_input_is_refused():
    with pytest.raises(ValueError, match="token id 7 is outside the vocabulary"):
        ngram.fit([[1, 7]], vocab_size=V)
    with pytest.raises(ValueError, match="token id -1"):
        ngram.log_prob(ngram.fit(TEXT, vocab_size=V), [[-1]])
    with pytest.raises(ValueError, match="no sequences"):
        ngram.fit([], vocab_size=V)
    with pytest.raises(ValueError, match="order=0"):
        ngram.fit(TEXT, vocab_size=V, order=0)
