"""Randomness in training: other masks at every step and for every seed, the same where
both are the same.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmat.data.packing import TrainingBatch, pack, same_tokens
from jmat.runtime import mesh
from jmat.training import train as training

T, ROWS = 32, 8


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    return pack(
        same_tokens([rng.integers(5, 50, T).tolist() for _ in range(ROWS)], specials=range(5)), T
    )


def drawing(model, batch, key):
    """A loss whose value and gradient tell which key it was given; counted in halves of
    predictions.
    """
    draw = jax.random.uniform(key)
    return model["w"] * draw * 4, jnp.float32(4), jnp.float32(1)


def draws(seed, batch, first=0, steps=4):
    """What the key of every step gives, read off the loss."""
    optimizer = optax.sgd(0.0)
    step = training.make_train_step(drawing, optimizer, seed)
    state = training.init_state({"w": jnp.float32(1)}, optimizer)._replace(step=jnp.int32(first))
    values = []
    for _ in range(steps):
        state, value = step(state, batch)
        values.append(float(value))
    return values


def test_every_step_and_seed_has_a_key_of_its_own(batch):
    first = draws(0, batch)
    assert first == draws(0, batch)
    assert len({*first, *draws(1, batch)}) == 8
    assert draws(0, batch, first=2, steps=2) == first[2:]  # a resumed run repeats it


def test_evaluation_has_the_same_keys_at_every_call_and_others_for_another_seed_or_slice(batch):
    devices = mesh.data_mesh(jax.devices()[:1])
    model = {"w": jnp.float32(1)}

    def loss_of(size, seed):
        evaluate = training.make_evaluate(drawing, batch, size, devices, seed)
        first, again = evaluate(model), evaluate(model)
        assert first == again
        return first

    whole, halves = loss_of(ROWS, 0), loss_of(ROWS // 2, 0)
    assert (whole["count"], halves["count"]) == (4, 8)  # what the loss says, once a slice
    assert (whole["accuracy"], halves["accuracy"]) == (0.25, 0.25)
    keys = [jax.random.fold_in(jax.random.key(0), i) for i in range(2)]
    expected = [float(jax.random.uniform(key)) for key in keys]
    assert halves["loss"] == pytest.approx(np.mean(expected))
    assert whole["loss"] == pytest.approx(expected[0])
    assert loss_of(ROWS, 1)["loss"] != whole["loss"]


def test_the_loss_is_a_mean_over_predictions_and_its_penalty_over_tokens():
    """Two predictions of different weight, worked out in float64."""
    scores = jnp.asarray([[2.0, 0.0, -1.0], [0.0, 1.0, 3.0], [5.0, 5.0, 9.0]])
    targets, weights = jnp.asarray([0, 1, 2]), jnp.asarray([1.0, 1.0, 0.0])
    total, count, correct = training.cross_entropy(scores, targets, weights)
    wide = np.asarray(scores, np.float64)
    nats = [np.log(np.exp(row).sum()) - row[t] for row, t in zip(wide[:2], (0, 1), strict=True)]
    assert float(total) == pytest.approx(sum(nats))
    assert (float(count), float(correct)) == (2, 1)


def test_batches_go_on_where_they_were(batch):
    """Step k of an epoch of three batches, whatever step one begins with."""
    packed = TrainingBatch(
        *(np.repeat(np.arange(7, dtype=np.int32)[:, None], T, axis=1) for _ in range(4))
    )

    def rows(epoch):
        return TrainingBatch(*(field + 100 * epoch for field in packed))

    def read(first):
        return [
            (step, sorted(set(b.tokens.ravel().tolist())))
            for step, b in training.batches(rows, 2, first, 7)
        ]

    everything = [
        (s, [100 * (s // 3) + 2 * (s % 3), 100 * (s // 3) + 2 * (s % 3) + 1]) for s in range(7)
    ]
    assert read(0) == everything
    assert read(4) == everything[4:]
