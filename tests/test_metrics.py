"""Metrics against independent definitions: full sorts, scikit-learn, and the coverage
that an interval promises.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import r2_score as sklearn_r2

from jmat.metrics import bootstrap
from jmat.metrics.bootstrap import bootstrap_counts, bootstrap_mean
from jmat.metrics.predictions import (
    compare,
    confidences_of,
    cross_entropy,
    distribution,
    perplexity,
    rank,
    top_2_gap,
)
from jmat.metrics.r2 import r2_score
from jmat.metrics.top import top_k

N, V = 64, 37


def confidences(logits):
    return confidences_of(distribution(logits))


@pytest.fixture(scope="module")
def logits():
    """Two sets of logits that agree half of the time, on a coarse grid so that ties are
    common.
    """
    rng = np.random.default_rng(0)
    full = rng.standard_normal((N, V))
    short = full + 0.7 * rng.standard_normal((N, V))
    return np.round(2 * full).astype(np.float32), np.round(2 * short).astype(np.float32)


def _softmax(x):
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("k", [1, 3, 10, V])
def test_precision_and_recall_are_those_of_top_k(logits, k):
    full, short = logits
    values = compare(full, short, ks=(k,))
    top_full, top_short = (np.asarray(jax.lax.top_k(half, k)[1]) for half in (full, short))
    precision = [float(top_short[n, 0] in top_full[n]) for n in range(N)]
    recall = [float(top_full[n, 0] in top_short[n]) for n in range(N)]
    np.testing.assert_array_equal(values[f"precision@{k}"], precision)
    np.testing.assert_array_equal(values[f"recall@{k}"], recall)
    if k == 3:
        assert precision != recall  # or the test could not tell them apart


def test_ties_rank_the_lower_id_first():
    full, short = distribution(jnp.eye(4)[jnp.array([0, 1, 3])]), distribution(jnp.zeros((3, 4)))
    np.testing.assert_array_equal(rank(full, short), [0, 1, 3])
    values = compare(jnp.zeros((1, 4)), jnp.asarray([[0.0, 0.0, 1.0, 1.0]]), ks=(2, 3))
    assert (float(values["precision@2"][0]), float(values["precision@3"][0])) == (0, 1)


def test_a_rank_needs_two_distributions():
    good, bad = jnp.zeros((4, 4)), jnp.zeros((4, 4)).at[0].set(jnp.nan).at[1, 2].set(jnp.inf)
    for full, short in ((good, bad), (bad, good)):
        np.testing.assert_array_equal(
            rank(distribution(full), distribution(short)), [np.nan, np.nan, 0, 0]
        )


@pytest.mark.parametrize("width", [5, 130, 640, 64 * 17 + 1, 1021, 29 * 61])
@pytest.mark.parametrize("k", [1, 2, 10])
def test_top_k_is_that_of_a_stable_sort(width, k):
    """Ties are common; blocks of the usual size, of a divisor, and with a rest."""
    k = min(k, width)
    rng = np.random.default_rng(width)
    scores = np.round(2 * rng.normal(size=(40, width))).astype(np.float32) + 0.0  # no -0
    scores[rng.random(scores.shape) < 0.1] = -np.inf
    scores[0, -3:] = 100  # behind the last whole block
    scores[1] = -np.inf
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    for compute in (top_k, jax.jit(top_k, static_argnums=1)):
        values, found = compute(jnp.asarray(scores), k)
        np.testing.assert_array_equal(found, ids)
        np.testing.assert_array_equal(values, np.take_along_axis(scores, ids, axis=1))


def test_k_beyond_the_vocabulary_means_all_of_it(logits):
    np.testing.assert_array_equal(compare(*logits, ks=(1000,))["precision@1000"], 1)


def test_surprisal_and_kl_in_nats(logits):
    full, short = logits
    p, q = _softmax(full), _softmax(short)
    values = compare(full, short)
    np.testing.assert_allclose(
        values["surprisal"], -np.log(p[np.arange(N), short.argmax(-1)]), rtol=1e-5
    )
    np.testing.assert_allclose(values["kl"], np.sum(p * np.log(p / q), -1), rtol=1e-4, atol=1e-6)


def test_surprisal_does_not_underflow():
    # p_full of the shortcut's token is exp(−200), which is 0 in float32: its logarithm must not be
    # −inf.
    values = compare(jnp.asarray([[200.0, 0.0]]), jnp.asarray([[0.0, 1.0]]))
    np.testing.assert_allclose(values["surprisal"], 200, rtol=1e-6)


def test_agreement_is_perfect(logits):
    values = compare(logits[0], logits[0])
    assert all(
        np.all(np.asarray(values[f"{name}@{k}"]) == 1)
        for name in ("precision", "recall")
        for k in (1, 5, 10)
    )
    np.testing.assert_allclose(values["kl"], 0, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_non_finite_logits_never_score(logits, bad, which):
    pair = [half.copy() for half in logits]
    pair[which][5, 3] = bad
    for value in compare(*pair).values():
        assert list(np.flatnonzero(np.isnan(value))) == [5]
    sure = confidences(pair[which])
    assert all(np.isnan(sure[name][5]) for name in ("gap", "max_probability", "entropy"))


def test_excluded_tokens_are_no_error(logits):
    full, short = (np.where(np.arange(V) == 0, -np.inf, half).astype(np.float32) for half in logits)
    values = compare(full, short)
    assert all(np.isfinite(value).all() for value in values.values())
    np.testing.assert_allclose(
        values["kl"], compare(full[:, 1:], short[:, 1:])["kl"], rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        confidences(full)["entropy"], confidences(full[:, 1:])["entropy"], rtol=1e-5
    )


def test_half_precision_logits_are_read_in_float32(logits):
    # a grid of halves is exact in bfloat16
    full, short = (jnp.asarray(half, jnp.bfloat16) for half in logits)
    for name, value in compare(full, short).items():
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, compare(*logits)[name], rtol=1e-6)


def test_confidences_match_their_definitions(logits):
    p = _softmax(logits[0])
    values = confidences(logits[0])
    two = np.sort(p, -1)[:, -2:]
    np.testing.assert_allclose(values["gap"], two[:, 1] - two[:, 0], atol=1e-6)
    np.testing.assert_array_equal(values["gap"], top_2_gap(logits[0]))
    assert np.any(np.asarray(values["gap"]) == 0)  # ties do occur here
    np.testing.assert_allclose(values["max_probability"], p.max(-1), rtol=1e-5)
    np.testing.assert_allclose(values["entropy"], -np.sum(p * np.log(p), -1), rtol=1e-5)
    np.testing.assert_array_equal(values["top_1"], logits[0].argmax(-1))


def test_cross_entropy_and_perplexity():
    logits = jnp.log(jnp.asarray([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]]))
    nats = cross_entropy(logits, jnp.asarray([[1, 2]]))
    np.testing.assert_allclose(nats, -np.log([[0.25, 0.8]]), rtol=1e-6)
    assert perplexity(nats) == pytest.approx(1 / np.sqrt(0.25 * 0.8))
    assert perplexity(np.array([1.0, np.nan]), np.array([1.0, 0.0])) == pytest.approx(np.e)
    assert perplexity(np.array([1.0, 2.0, 4.0]), np.array([3.0, 0.5, 1.0])) == pytest.approx(
        np.exp(8 / 4.5)
    )
    with pytest.raises(ValueError, match="1 of 2 cross entropies are NaN"):
        perplexity(np.array([1.0, np.nan]))
    with pytest.raises(ValueError, match="no cross entropies"):
        perplexity(np.ones(2), np.zeros(2))


@pytest.mark.parametrize("target", [-1, -100, 3])
def test_cross_entropy_of_no_token_is_nan(target):
    assert np.isnan(cross_entropy(jnp.zeros((1, 3)), jnp.asarray([target]))[0])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("constant", [None, "exact", "wrong"])
def test_r2_is_that_of_scikit_learn(weighted, constant):
    rng = np.random.default_rng(1)
    Y = (rng.standard_normal((50, 8)) * np.geomspace(0.01, 100, 8) + 5).astype(np.float32)
    Y_hat = (Y + rng.standard_normal((50, 8))).astype(np.float32)
    if constant:
        Y[:, 2] = 0.5
        Y_hat[:, 2] = 0.5 + (constant == "wrong")
    expected = sklearn_r2(
        Y, Y_hat, multioutput="variance_weighted" if weighted else "uniform_average"
    )
    assert r2_score(Y, Y_hat, variance_weighted=weighted) == pytest.approx(expected, rel=1e-5)


def test_r2_of_constant_coordinates_is_zero_or_one():
    Y = np.full((7, 2), 0.1)  # the mean of seven times 0.1 is not 0.1
    for weighted in (False, True):
        assert r2_score(Y, Y, variance_weighted=weighted) == 1
        assert r2_score(Y, Y + np.array([0, 1]), variance_weighted=weighted) == 0.5


def test_r2_refuses_what_has_no_score():
    Y = np.ones((3, 2))
    with pytest.raises(ValueError, match="N >= 2"):
        r2_score(Y[:1], Y[:1])
    with pytest.raises(ValueError, match="NaN"):
        r2_score(Y, np.where(np.eye(3, 2) > 0, np.nan, Y))


def test_bootstrap_interval_matches_the_normal_one():
    rng = np.random.default_rng(2)
    values = rng.standard_normal((400, 3)) * [1, 2, 3] + [0, 10, 20]
    mean, low, high = bootstrap_mean(values, samples=4000)
    half = 1.96 * values.std(0) / np.sqrt(400)
    np.testing.assert_allclose(mean, values.mean(0))
    np.testing.assert_allclose(low, mean - half, atol=0.1 * half.max())
    np.testing.assert_allclose(high, mean + half, atol=0.1 * half.max())
    wide = bootstrap_mean(values, samples=4000, confidence=0.99)
    assert np.all(wide[1] < low)
    assert np.all(wide[2] > high)


def test_bootstrap_does_not_depend_on_shape_or_chunks(monkeypatch):
    values = np.random.default_rng(3).standard_normal((30, 2, 3)).astype(np.float32)
    whole = bootstrap_mean(values, samples=200, seed=5)
    monkeypatch.setattr(bootstrap, "_CHUNK", 30 * 7)
    for a, b in zip(whole, bootstrap_mean(values, samples=200, seed=5), strict=True):
        assert a.shape == (2, 3)
        np.testing.assert_allclose(a, b)
    alone = bootstrap_mean(values[:, 1, 2], samples=200, seed=5)
    np.testing.assert_allclose(alone, [stat[1, 2] for stat in whole])
    resampled = bootstrap_counts(30, samples=200, seed=5) @ values[:, 1, 2] / 30
    np.testing.assert_allclose(alone[1:], np.percentile(resampled, [2.5, 97.5]))
    assert np.any(bootstrap_mean(values, samples=200, seed=6)[1] != whole[1])


def test_bootstrap_draws_groups_whole():
    values = np.random.default_rng(4).standard_normal(40)
    copies, groups = np.repeat(values, 5), 7 * np.repeat(np.arange(40), 5)
    np.testing.assert_allclose(bootstrap_mean(copies, groups=groups), bootstrap_mean(values))
    assert bootstrap_mean(copies)[1] > bootstrap_mean(values)[1]  # as if they were independent
    uneven = bootstrap_counts(5, groups=np.array([0, 0, 0, 3, 3]), samples=50)
    assert {tuple(row) for row in uneven.tolist()} == {
        (1, 1, 1, 1, 1),
        (2, 2, 2, 0, 0),
        (0, 0, 0, 2, 2),
    }


def test_the_interval_of_a_share_is_not_below_0_by_rounding():
    assert bootstrap_mean((np.arange(700) < 3).astype(np.float64))[1] == 0


def test_bootstrap_of_equal_values_has_no_width():
    mean, low, high = bootstrap_mean(np.full((7, 2), 0.1))
    np.testing.assert_allclose([mean, low, high], 0.1, rtol=1e-15)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, np.nan], "1 of 2 values are NaN or infinite"),
        ([np.inf, np.inf], "2 of 2"),
        ([], "at least one example"),
    ],
)
def test_bootstrap_refuses_what_has_no_mean(values, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_mean(np.array(values))


def test_bootstrap_refuses_nonsense_options():
    with pytest.raises(ValueError, match="confidence"):
        bootstrap_mean(np.ones(3), confidence=95.0)
