"""Maps that are trained on what the model predicts: better than affine ones on held-out
text, and never worse.
"""

import dataclasses
import inspect

import jax
import numpy as np
import pytest

import jmat
from jmat.maps import lens
from jmat.maps.compact import Hidden, Quantised
from jmat.maps.kinds import fit_kind, parse_kind, train_kind
from jmat.maps.lens import Lesson
from jmat.maps.regression import Regression, pair_moments
from jmat.maps.types import Linear

_logits = jax.jit(jmat.logits)


@pytest.fixture(scope="module")
def streams(gpt2, gpt2_examples):
    parts = (gpt2_examples.fit, gpt2_examples.eval)
    return [list(jmat.capture(gpt2, part, ["block.0", "block.3"]).values()) for part in parts]


@pytest.fixture(scope="module")
def lesson(gpt2, streams):
    return Lesson(gpt2, *streams[0], seed=2)


@pytest.fixture(scope="module")
def maps(lesson):
    return {text: train_kind(parse_kind(text), lesson) for text in ("tuned", "mlp:8")}


def divergence(model, full, short):
    """Mean KL in nats, float64."""
    log_p, log_q = (
        np.asarray(jax.nn.log_softmax(_logits(model, np.asarray(h, np.float32))), np.float64)
        for h in (full, short)
    )
    return float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean())


def affine(x, y):
    return fit_kind(parse_kind("affine"), Regression(pair_moments(x, y)))


@pytest.mark.slow
def test_kl_on_held_out_text_is_below_that_of_the_affine_map(gpt2, streams, maps):
    x, y = streams[1]
    start = divergence(gpt2, y, affine(*streams[0])(x))
    found = {text: divergence(gpt2, y, stand_in(x)) for text, stand_in in maps.items()}
    assert found["tuned"] < 0.95 * start
    assert found["mlp:8"] < found["tuned"]
    assert isinstance(maps["tuned"], Linear)
    assert isinstance(maps["mlp:8"], Hidden)
    assert maps["mlp:8"].U.shape == (64, 8)


def test_training_is_the_same_twice_and_follows_the_seed(lesson, maps):
    short = dataclasses.replace(lesson, steps=4, every=2)
    first, second = (train_kind(parse_kind("mlp:8"), short) for _ in range(2))
    assert all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    )
    other = train_kind(parse_kind("mlp:8"), dataclasses.replace(short, seed=3))
    assert not np.array_equal(first.W, other.W)


def test_the_map_is_what_was_trained(lesson, streams):
    """Scales, means and the start are folded in."""
    short = dataclasses.replace(lesson, steps=6, every=3)
    x = streams[1][0]
    for units, stand_in in ((0, lens.tuned(short)), (8, lens.hidden(short, 8))):
        frame, change = lens._trained(short, units)
        expected = np.asarray(lens._apply(frame, change, x), np.float64)
        assert np.abs(change.V).max() > 0
        error = np.linalg.norm(np.asarray(stand_in(x)) - expected) / np.linalg.norm(expected)
        assert error < 1e-5


def test_the_first_step_is_adams_along_the_gradient(gpt2, lesson, streams):
    one = dataclasses.replace(lesson, steps=1, every=1, rate=0.01, batch=10**6)
    frame, change = lens._trained(one, 0)
    n = len(streams[0][0]) - len(streams[0][0]) // 8
    x, y = (h[:n] for h in streams[0])
    start = affine(x, y)
    np.testing.assert_allclose(frame.start.W, start.W, rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.abs(change.c), 0.01 / 64, rtol=1e-2)
    error = np.sqrt(np.square(y - np.asarray(start(x), np.float64)).mean(0))
    np.testing.assert_allclose(frame.scale, error, rtol=1e-3)
    np.testing.assert_allclose(1 / np.asarray(frame.inverse), x.std(0, dtype=np.float64), rtol=1e-3)
    for k in (0, 7, 20):  # against differences of KL, coordinate by coordinate
        step = np.zeros(64)
        step[k] = 0.05 * error[k]
        up, down = (
            divergence(gpt2, y, np.asarray(start(x), np.float64) + sign * step) for sign in (1, -1)
        )
        assert np.sign(change.c[k]) == -np.sign(up - down)


def test_training_ends_with_the_best_map(gpt2, lesson, streams):
    """A rate that diverges leaves the affine map of the tokens that are trained on;
    held-out tokens are the last.
    """
    n = len(streams[0][0]) - len(streams[0][0]) // 8
    start = affine(*(h[:n] for h in streams[0]))
    wild = train_kind(parse_kind("tuned"), dataclasses.replace(lesson, rate=1e9, steps=60, every=5))
    np.testing.assert_allclose(wild.W, start.W, rtol=0, atol=1e-6)
    x, y = (h[n:] for h in streams[0])
    kl = [
        divergence(
            gpt2,
            y,
            train_kind(parse_kind("tuned"), dataclasses.replace(lesson, steps=steps, every=1))(x),
        )
        for steps in (0, 3)
    ]
    assert kl[0] == pytest.approx(divergence(gpt2, y, start(x)), rel=1e-4)
    assert kl[1] < kl[0]


def test_patience_counts_looks_without_a_better_map(lesson, monkeypatch):
    looks = iter([3.0, 2.0, 2.5, 2.5, 9.0, 1.0])
    seen = []
    monkeypatch.setattr(lens, "_held_out", lambda *_: seen.append(next(looks)) or seen[-1])
    lens.tuned(dataclasses.replace(lesson, steps=50, every=2, patience=3))
    assert seen == [3.0, 2.0, 2.5, 2.5, 9.0]


def test_what_cannot_be_trained_is_refused(gpt2, streams, lesson):
    x, y = streams[0]
    with pytest.raises(
        ValueError, match="15 tokens are too few to train a map on: give 16 at least"
    ):
        Lesson(gpt2, x[:15], y[:15])
    with pytest.raises(ValueError, match="kind 'mat' has a closed form"):
        train_kind(parse_kind("mat"), lesson)
    with pytest.raises(
        ValueError,
        match="kind 'tuned' needs stored activations: it is trained or chosen, not fitted",
    ):
        fit_kind(parse_kind("tuned"), Regression(pair_moments(x, y)))
    wrong = x.copy()
    wrong[1, 2] = np.inf
    with pytest.raises(ValueError, match="'source' is not finite"):
        inspect.unwrap(lens.tuned)(Lesson(gpt2, wrong, y))


def test_fit_map_trains_a_lens(gpt2, gpt2_examples, streams):
    fit = jmat.fit_map(gpt2, gpt2_examples.fit, 1, 4, kind="tuned+int8")
    assert isinstance(fit.map.W, Quantised)
    assert str(fit).startswith("Map tuned+int8 from block.0 to block.3: full rank 64")
    x, y = streams[1]
    assert divergence(gpt2, y, fit.map(x)) < divergence(gpt2, y, affine(*streams[0])(x))
    with pytest.raises(
        ValueError,
        match=r"'mlp:3' leads to the final stream of a model with a head, not to block\.1",
    ):
        jmat.fit_map(gpt2, gpt2_examples.fit, 1, 2, kind="mlp:3")
