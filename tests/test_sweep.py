"""Every pass over a corpus uses all devices, each for its own rows, and finds what one
device finds.
"""

import importlib

import jax
import numpy as np
import pytest

import jmat
from jmat.capture import sweep as module
from jmat.capture.activations import capture
from jmat.capture.stream import all_positions, packed_batches
from jmat.capture.sweep import stored_rows, sweep
from jmat.data.batches import packed
from jmat.data.examples import Examples
from jmat.data.text import whole_sentences
from jmat.maps.types import Identity, Linear
from jmat.metrics.predictions import (
    Predictions,
    compare_distributions,
    confidences_of,
    distribution,
)
from jmat.models.sites import SUBMODULES, stream_sites
from jmat.runtime import mesh as devices
from jmat.runtime.mesh import data_mesh, place, replicate
from jmat.studies.early_exit.curves import top_words
from jmat.studies.evaluation import evaluate
from jmat.studies.linearity.measure import measure, step_pairs
from jmat.studies.peek.measures import read_layers
from jmat.studies.prune.heal import distil
from jmat.studies.prune.measure import compare_on_text
from jmat.studies.submodules.ablation import ABLATIONS, ablate, fit_parts, part_sites
from jmat.studies.submodules.heads import ablate_heads
from jmat.studies.submodules.refit import refit_sequentially
from jmat.studies.tasks.scoring import Passage, log_likelihoods
from tests.test_reference import REFERENCE
from tests.test_streaming import few

L = 4


def parts_of(model, split, known={}):  # noqa: B006 (the same maps for both runs: rounding shows in maps)
    if id(split) not in known:
        acts = capture(model, split, (*stream_sites(L), *part_sites(SUBMODULES, range(L))))
        known[id(split)] = split, acts, fit_parts(acts, blocks=range(L))
    return known[id(split)][1:]


def captured(model, split, other):
    return dict(capture(model, split, ("embed", "block.3.attn"), tokens_per_batch=512))


def ablated(model, split, other):
    maps = parts_of(model, other)[1]
    plans = {
        name: {2: {(p, i): maps[p, i] for p in ABLATIONS[name] for i in (2, 3)}}
        for name in ABLATIONS
    }
    return ablate(model, split, plans, tokens_per_batch=512)


def heads_ablated(model, split, other):
    return ablate_heads(model, Examples(few(other, 150), few(split, 12)))


def refitted(model, split, other):
    acts, _ = parts_of(model, other)
    maps = refit_sequentially(model, other, acts, ("attn",), 2)
    return {
        key: np.asarray(linear(acts[f"block.{key[1]}.attn.in"])) for key, linear in maps.items()
    }


def evaluated(model, split, other):
    streams = capture(model, split, ("block.1", "block.3"))
    return evaluate(
        model,
        streams["block.3"],
        {("id", 2): (Identity(), streams["block.1"])},
        examples_per_batch=16,
    )


def predicted(model, split, other):
    acts = capture(model, split, stream_sites(L))
    streams = [acts[site] for site in stream_sites(L)]
    return {
        "top": read_layers(model, {"id": {2: Identity(), L: Identity()}}, streams, 3),
        "words": top_words(model, streams[2], 50),
    }


def scored(model, split, other):
    passages = [
        Passage(split.tokens[start : start + n], 1)
        for start, n in zip(split.starts, split.lengths, strict=True)
    ]
    predictions = Predictions()
    values = log_likelihoods(model, passages, tokens_per_batch=512, predictions=predictions)
    assert predictions.note() is None
    return values


def compared(model, split, other):
    text = whole_sentences(split)
    return {
        k: tuple(v)
        for k, v in compare_on_text(model, text, {0: {"block.1": Identity()}, 1: {}}).items()
    }


def distilled(model, split, other):
    losses, start = (
        [],
        {
            (1, 2): Linear(np.eye(64, dtype=np.float32)),
            (3, 4): Linear(np.eye(64, dtype=np.float32)),
        },
    )
    note = lambda step, loss: losses.append(loss)  # noqa: E731
    distil(
        model, split, start, steps=4, tokens_per_batch=10_000, kl_weight=0.1, log=note, log_every=1
    )
    assert losses[-1] < losses[0]
    return losses


def measured(model, split, other):
    fit, held_out = (
        packed_batches(each, all_positions(each), tokens_per_batch=512, row_multiple=4)
        for each in (other, split)
    )
    found = measure(model, fit, held_out, step_pairs(L))
    return {pair: (each.error, each.off_total) for pair, each in found.per_token.items()} | {
        ("n", "n"): found.tokens
    }


USERS = (
    captured,
    ablated,
    heads_ablated,
    refitted,
    evaluated,
    predicted,
    scored,
    compared,
    distilled,
    measured,
)
LONG = (heads_ablated, refitted, scored, compared, measured)


@pytest.fixture
def rows_seen(monkeypatch):
    """Rows of each array that the devices are given, by device; all arrays of the sweep
    pass here.
    """
    seen = {device: [] for device in jax.local_devices()}
    shard_batch = module.shard_batch

    def spy(mesh, tree):
        placed = shard_batch(mesh, tree)
        for leaf in jax.tree.leaves(placed):
            for shard in leaf.addressable_shards:
                seen[shard.device].append(shard.data.shape[0])
        return placed

    monkeypatch.setattr(module, "shard_batch", spy)
    return seen


@pytest.mark.parametrize(
    "user",
    [
        pytest.param(user, id=user.__name__, marks=[pytest.mark.slow] * (user in LONG))
        for user in USERS
    ],
)
def test_each_device_computes_its_share_and_all_find_what_one_finds(
    user, gpt2, gpt2_examples, rows_seen, monkeypatch
):
    split, other = few(gpt2_examples.eval, 40), few(gpt2_examples.fit, 150)
    got = user(gpt2, split, other)
    assert len({tuple(rows) for rows in rows_seen.values()}) == 1  # equally many of every array
    assert sum(map(sum, rows_seen.values())) == 4 * sum(rows_seen[jax.devices()[0]]) > 0
    one = data_mesh(jax.devices()[:1])
    for used in (devices, module):
        monkeypatch.setattr(used, "local_mesh", lambda chosen=None: one)
    for name in ("activations", "stream"):
        monkeypatch.setattr(
            importlib.import_module(f"jmat.capture.{name}"), "local_mesh", lambda chosen=None: one
        )
    for name in (
        "submodules.ablation",
        "submodules.heads",
        "submodules.refit",
        "evaluation",
        "tasks.scoring",
        "early_exit.curves",
        "linearity.measure",
        "peek.measures",
    ):
        monkeypatch.setattr(
            importlib.import_module(f"jmat.studies.{name}"), "local_mesh", lambda chosen=None: one
        )
    for name in ("heal", "measure"):
        monkeypatch.setattr(
            importlib.import_module(f"jmat.studies.prune.{name}"),
            "local_mesh",
            lambda chosen=None: one,
        )
    want = user(replicate(one, gpt2), split, other)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        # Maps that are fitted anew show the rounding of their inputs, times their condition number.
        tolerance = {ablated: 1e-5, refitted: 1e-4, heads_ablated: 1e-4}.get(user, 1e-6)
        np.testing.assert_allclose(
            a, b, rtol=2e-4, atol=tolerance * max(1.0, float(np.abs(b).max()))
        )


def test_values_go_to_their_examples_whatever_the_batches():
    plan = stored_rows(10, 4)
    vectors = np.arange(10, dtype=np.float32)
    assert [rows.examples.shape for rows in plan] == [(4,)] * 3
    got = sweep(
        plan[::-1],
        lambda x: {"double": x + x, "row": x[:, None] + x},
        inputs=lambda rows: rows.take(vectors),
    )
    np.testing.assert_array_equal(got["double"], 2 * vectors)
    assert got["row"].shape == (10, 4)


def test_half_precision_comes_back_as_float32_and_whole_numbers_as_they_are():
    plan = stored_rows(5, 8)
    got = sweep(
        plan,
        lambda x: [x.astype("bfloat16"), x],
        inputs=lambda rows: rows.take(np.arange(5, dtype=np.int32)),
    )
    assert [values.dtype for values in got] == [np.float32, np.int32]
    np.testing.assert_array_equal(got[0], np.arange(5))


def test_a_loaded_model_is_placed_once_and_never_copied(gpt2_examples):
    model = jmat.load(REFERENCE / "gpt2")[0]
    where = [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(model)
        for shard in leaf.addressable_shards
    ]
    assert len(where) == 4 * len(jax.tree.leaves(model))
    assert place(model) is model
    capture(model, few(gpt2_examples.eval, 5), ("block.1",))
    again = [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(place(model))
        for shard in leaf.addressable_shards
    ]
    assert again == where


def test_a_model_made_by_hand_is_not_copied_on_its_own_device(gpt2):
    alone = jax.device_put(jax.tree.map(np.asarray, gpt2), jax.devices()[0])
    placed = place(alone)
    for leaf, copied in zip(jax.tree.leaves(alone), jax.tree.leaves(placed), strict=True):
        first = next(
            shard for shard in copied.addressable_shards if shard.device == jax.devices()[0]
        )
        assert first.data.unsafe_buffer_pointer() == leaf.unsafe_buffer_pointer()


def test_reading_gathers_nothing_from_other_devices():
    x, at = devices.shard_batch(
        devices.local_mesh(), (np.zeros((8, 6, 16), np.float32), np.zeros((8, 2), np.int32))
    )
    program = jax.jit(jmat.models.sites.gather).lower(x, at).compile().as_text()
    assert "all-gather" not in program
    assert "all-reduce" not in program


@pytest.mark.parametrize("width", [170, 64 * 17 + 1, 4096])
def test_comparing_predictions_gathers_nothing_from_other_devices(width):
    full, short = devices.shard_batch(
        devices.local_mesh(), tuple(np.random.default_rng(0).normal(size=(2, 8, width)))
    )

    def read(full, short):
        one, other = distribution(full), distribution(short)
        return compare_distributions(one, other), confidences_of(other)

    program = jax.jit(read).lower(full, short).compile().as_text()
    assert "all-gather" not in program
    assert "all-reduce" not in program


def test_all_tokens_as_examples_share_rows(gpt2_examples):
    split = gpt2_examples.eval
    every = split.with_examples(all_positions(split, skip_first=1))
    batches = packed(every, cut_after_position=True)
    filled = sum(int(batch.lengths.sum()) for batch in batches)
    assert filled > 0.85 * sum(batch.tokens.size for batch in batches)
    assert every.num_examples == int((split.lengths - 1).sum())
