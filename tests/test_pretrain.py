"""Pretraining: packing, losses, masking, the optimizer, devices, and a run that is
killed and goes on.
"""

import contextlib
import functools
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from jmat import checkpoint, forward, models
from jmat.data import packing
from jmat.report.results import read_results
from jmat.runtime import checkpoints, mesh
from jmat.training import train as training
from jmat.training.penalties import KINDS, Regularizer
from tests.scripts import kill_after, start

V, T, END = 50, 16, 0
RANDOM = np.random.default_rng(0)
# Few different lengths, to compile few programs where each is read alone.
SENTENCES = [
    RANDOM.integers(5, V, n).tolist()
    for n in [1, 20, *RANDOM.choice([4, 7, T], 60, p=[0.5, 0.45, 0.05])]
]


def gpt2(seed=0):
    hf = {
        "model_type": "gpt2",
        "vocab_size": V,
        "n_positions": T,
        "n_embd": 8,
        "n_layer": 2,
        "n_head": 2,
    }
    return models.build(models.config_from_hf(hf), nnx.Rngs(seed))


def bert():
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    hf = {"model_type": "bert", "vocab_size": V, "max_position_embeddings": T, **sizes}
    return models.build(models.config_from_hf(hf), nnx.Rngs(0))


def packed():
    return packing.pack(packing.next_tokens(SENTENCES, END), T)


def test_packing_keeps_every_sentence_whole_and_wastes_little():
    batch = packed()
    texts = []
    for tokens, segments, positions, targets in zip(*batch, strict=True):
        for segment in range(1, segments.max() + 1):
            at = segments == segment
            np.testing.assert_array_equal(positions[at], np.arange(at.sum()))
            np.testing.assert_array_equal(targets[at][:-1], tokens[at][1:])
            texts.append((*tokens[at], targets[at][-1]))
    expected = [(*s, END) if len(s) <= T else tuple(s[: T + 1]) for s in SENTENCES]
    assert sorted(texts) == sorted(expected)
    assert (batch.targets[batch.segments == 0] == -1).all()
    lengths = np.minimum(RANDOM.geometric(0.05, 1000), 96)  # as sentences are
    batch = packing.pack(packing.next_tokens([[7] * n for n in lengths], END), 96)
    assert (batch.segments > 0).sum() == lengths.sum() > 0.99 * batch.segments.size


def test_every_epoch_has_other_rows_and_equally_many():
    pairs = packing.next_tokens(SENTENCES, END)
    first, again, other = (packing.pack(pairs, T, (0, epoch)) for epoch in (0, 0, 1))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert first.rows == other.rows
    assert sorted(map(tuple, first.tokens)) != sorted(map(tuple, other.tokens))


@pytest.mark.parametrize("sentences", [[], [[1, 2], []]])
def test_nothing_to_pack_is_refused(sentences):
    with pytest.raises(ValueError, match="expected at least one and none empty"):
        packing.pack(
            packing.next_tokens(sentences, END) if all(sentences) else [(np.zeros(0),) * 2], T
        )


def test_packed_loss_is_the_sum_over_sentences_read_alone():
    model = gpt2()
    total, count, correct = training.causal_lm_loss(model, packed(), jax.random.key(0))
    expected, right = 0.0, 0
    for sentence in SENTENCES:
        tokens, targets = np.asarray(sentence[:T]), np.asarray([*sentence, END][1 : T + 1])
        x, _ = forward.run(model, tokens[None])
        scores = np.asarray(forward.logits(model, x)[0], np.float64)
        log_probs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        expected -= log_probs[np.arange(len(targets)), targets].sum()
        right += (scores.argmax(-1) == targets).sum()
    assert count == sum(min(len(s), T) for s in SENTENCES)
    assert float(total) == pytest.approx(expected, rel=1e-5)
    assert int(correct) == right


def test_masking_is_berts():
    """15 % of what is not special; of these 80 % [MASK], 10 % random, 10 % unchanged;
    all decided by the key.
    """
    mask_id, cls = 4, 2
    pairs = packing.same_tokens(
        [[cls, *RANDOM.integers(5, V, 14).tolist()] for _ in range(4000)], specials=range(5)
    )
    batch = packing.pack(pairs, T)
    masked = packing.mask_tokens(batch, jax.random.key(1), mask_id=mask_id, vocab_size=V)
    again = packing.mask_tokens(batch, jax.random.key(1), mask_id=mask_id, vocab_size=V)
    jax.tree.map(np.testing.assert_array_equal, masked, again)
    other = packing.mask_tokens(batch, jax.random.key(2), mask_id=mask_id, vocab_size=V)
    assert (np.asarray(other.tokens) != np.asarray(masked.tokens)).any(1).mean() > 0.9
    weights = np.asarray(masked.weights) > 0
    original = np.take_along_axis(batch.tokens, np.asarray(masked.places), 1)[weights]
    seen = np.take_along_axis(np.asarray(masked.tokens), np.asarray(masked.places), 1)[weights]
    np.testing.assert_array_equal(np.asarray(masked.targets)[weights], original)
    assert (original >= 5).all()
    assert weights.sum() / (batch.targets >= 0).sum() == pytest.approx(0.15, abs=0.003)
    assert (seen == mask_id).mean() == pytest.approx(0.8 + 0.1 / V, abs=0.015)
    assert (seen == original).mean() == pytest.approx(0.1 + 0.1 / V, abs=0.012)
    changed = np.asarray(masked.tokens) != batch.tokens
    assert changed.sum() == (seen != original).sum()


def test_masked_loss_is_that_of_the_whole_sentence_at_the_masked_places():
    model, key = bert(), jax.random.key(3)
    batch = packing.pack(
        packing.same_tokens([[2, *s[:10], 3] for s in SENTENCES], specials=range(5)), T
    )
    total, count, _ = training.masked_lm_loss(4)(model, batch, key)
    masked = packing.mask_tokens(batch, key, mask_id=4, vocab_size=V)
    x, _ = forward.run(model, masked.tokens, segments=batch.segments)
    log_probs = np.asarray(jax.nn.log_softmax(forward.logits(model, x)))
    rows = np.arange(batch.rows)[:, None]
    expected = -(log_probs[rows, masked.places, masked.targets] * np.asarray(masked.weights)).sum()
    assert count == masked.weights.sum() > 50
    assert float(total) == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("standard_promotion")
def test_optimizer_warms_up_decays_matrices_only_and_clips():
    params = {"matrix": jnp.ones((2, 2)), "vector": jnp.ones(2)}
    optimizer = training.make_optimizer(
        learning_rate=0.1, warmup_steps=2, steps=10, weight_decay=0.5
    )
    state, zero = optimizer.init(params), jax.tree.map(jnp.zeros_like, params)
    matrix = []
    for _ in range(10):
        updates, state = optimizer.update(zero, state, params)
        assert not updates["vector"].any()
        matrix.append(float(-updates["matrix"][0, 0] / 0.5))
    np.testing.assert_allclose(matrix[:3], [0, 0.05, 0.1], rtol=1e-5)
    assert matrix[-1] == pytest.approx(
        0.1 * (0.1 + 0.9 * (1 + np.cos(np.pi * 7 / 8)) / 2), rel=1e-4
    )
    huge = jax.tree.map(lambda leaf: 1e6 * leaf, params)
    _, clipped = optimizer.update(huge, optimizer.init(params), params)
    moments = optax.tree.get(clipped, "mu")
    norm = np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(moments)))
    assert norm == pytest.approx(0.1, rel=1e-4)  # (1 − b1) · 1
    with pytest.raises(ValueError, match="10 warm-up steps of 10"):
        training.make_optimizer(learning_rate=0.1, warmup_steps=10, steps=10)


@pytest.fixture
def standard_promotion():
    """Optax mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def after_steps(devices, loss=training.causal_lm_loss, steps=3, kind="adamw"):
    optimizer = training.make_optimizer(kind=kind, learning_rate=1e-2, warmup_steps=1, steps=10)
    step = training.make_train_step(loss, optimizer, seed=0)
    state = mesh.replicate(devices, training.init_state(gpt2(), optimizer))
    data = training.batches(
        lambda epoch: packing.pack(packing.next_tokens(SENTENCES, END), T, (0, epoch)), 8, 0, steps
    )
    losses = []
    for _, batch in data:
        state, value = step(state, mesh.shard_batch(devices, batch))
        losses.append(float(value))
    evaluate = training.make_evaluate(loss, packed(), 8, devices)
    return state, losses, evaluate(state.model)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] * (kind == "adamw"))
        for kind in training.OPTIMIZERS
    ],
)
def test_one_device_equals_four_and_it_learns(kind):
    one, four = (after_steps(mesh.data_mesh(jax.devices()[:n]), kind=kind) for n in (1, 4))
    np.testing.assert_allclose(one[1], four[1], rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), one[0].model, four[0].model
    )
    assert one[2]["count"] == four[2]["count"] == sum(min(len(s), T) for s in SENTENCES)
    assert one[2]["loss"] == pytest.approx(four[2]["loss"], rel=1e-5)
    assert (
        one[2]["loss"]
        < training.make_evaluate(training.causal_lm_loss, packed(), 8, mesh.data_mesh())(gpt2())[
            "loss"
        ]
    )


@pytest.mark.usefixtures("standard_promotion")
def test_muon_orthogonalizes_the_blocks_matrices_alone():
    model = gpt2()
    optimizer = training.make_optimizer(
        kind="muon", learning_rate=0.1, warmup_steps=0, steps=10, weight_decay=0.0
    )
    gradient = jax.tree.map(
        lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape), model
    )
    updates, _ = optimizer.update(gradient, optimizer.init(model), model)
    kernel = updates.blocks[0].ffn.up.kernel[...]
    singular = np.linalg.svd(kernel, compute_uv=False) / (0.1 * 0.2 * np.sqrt(max(kernel.shape)))
    assert singular.max() < 1.3
    assert singular.min() > 0.6  # Newton–Schulz brings them near 1
    table = updates.embed.tokens.table[...]
    # the first step of Adam, Nesterov's
    np.testing.assert_allclose(np.abs(table), np.abs(table).max(), rtol=1e-3)
    with pytest.raises(ValueError, match="choose from adamw, muon"):
        training.make_optimizer(kind="sgd", learning_rate=0.1, warmup_steps=0, steps=10)


@pytest.mark.parametrize("kind", KINDS)
def test_regularizers_are_their_formulas(kind):
    model, batch = gpt2(), packed()
    names = ("embed", "block.0", "block.1")
    _, acts = forward.run(
        model, batch.tokens, segments=batch.segments, positions=batch.positions, keep=names
    )
    h = np.stack([np.asarray(acts[name], np.float64)[batch.segments > 0] for name in names])
    cos = (
        (h[1:] * h[:-1]).sum(-1) / np.linalg.norm(h[1:], axis=-1) / np.linalg.norm(h[:-1], axis=-1)
    )
    penalties = {
        "none": 0.0,
        "cosine": (1 - cos).mean(1).sum(),
        "mse": np.square(h[1:] - h[:-1]).sum(-1).mean(1).sum(),
        "final_jump": (1 - cos[-1]).mean(),
    }
    plain, count, _ = training.causal_lm_loss(model, batch, jax.random.key(0))
    total, _, _ = training.causal_lm_loss(
        model, batch, jax.random.key(0), regularizer=Regularizer(kind, 0.7)
    )
    assert float(total / count) == pytest.approx(
        float(plain / count) + 0.7 * penalties[kind], rel=1e-5
    )


@pytest.mark.usefixtures("standard_promotion")
def test_a_penalty_on_jumps_shortens_them():
    def distance(regularizer):
        loss = functools.partial(training.causal_lm_loss, regularizer=regularizer)
        model = after_steps(mesh.data_mesh(jax.devices()[:1]), loss=loss, steps=8)[0].model
        x, acts = forward.run(model, packed().tokens, keep=("embed",))
        return float(jnp.square(x - acts["embed"]).mean())

    assert distance(Regularizer("mse", 5.0)) < 0.8 * distance(Regularizer())


def test_evaluation_is_exact_whatever_the_slices():
    model = gpt2()
    total, count, _ = training.causal_lm_loss(model, packed(), jax.random.key(0))
    found = training.make_evaluate(training.causal_lm_loss, packed(), 28, mesh.data_mesh())(model)
    assert packed().rows % 28 != 0
    assert found["loss"] == pytest.approx(float(total / count), rel=1e-5)


def test_a_batch_that_does_not_split_is_refused():
    with pytest.raises(ValueError, match="6 rows cannot be split over 4 devices"):
        mesh.shard_batch(mesh.data_mesh(), np.zeros((6, 2)))
    with pytest.raises(ValueError, match="rows do not fill a batch of 1000"):
        next(training.batches(lambda epoch: packed(), 1000, 0, 1))


def test_checkpoint_of_another_model_is_refused(tmp_path):
    manager = checkpoints.open_checkpoints(tmp_path)
    assert checkpoints.restore(manager, {"a": jnp.ones(3)})["a"].shape == (3,)
    checkpoints.save(manager, 7, {"a": jnp.arange(3.0)})
    manager.wait_until_finished()
    np.testing.assert_array_equal(checkpoints.restore(manager, {"a": jnp.ones(3)})["a"], [0, 1, 2])
    checkpoints.save(manager, 8, {"a": 3 * jnp.arange(3.0)})
    manager.wait_until_finished()
    np.testing.assert_array_equal(checkpoints.mean(manager, {"a": jnp.ones(3)}, 2)["a"], [0, 2, 4])
    np.testing.assert_array_equal(
        checkpoints.restore(manager, {"a": jnp.ones(3)}, 7)["a"], [0, 1, 2]
    )
    with pytest.raises(ValueError, match="cannot be restored"):
        checkpoints.restore(manager, {"a": jnp.ones(3), "b": jnp.ones(2)})
    manager.close()


def test_a_damaged_checkpoint_is_left_out(tmp_path):
    state, said = {"a": jnp.ones(999)}, []
    with contextlib.closing(checkpoints.open_checkpoints(tmp_path)) as manager:
        for step in (1, 2):
            checkpoints.save(manager, step, {"a": jax.random.normal(jax.random.key(step), 999)})
            manager.wait_until_finished()
    largest = max(
        (path for path in (tmp_path / "2").rglob("*") if path.is_file()),
        key=lambda p: p.stat().st_size,
    )
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with contextlib.closing(checkpoints.open_checkpoints(tmp_path)) as manager:
        with pytest.raises(
            ValueError,
            match=r"checkpoint 2 in .* is damaged: its arrays are not those that were saved",
        ):
            checkpoints.mean(manager, state, 2)
        restored = checkpoints.restore(manager, state, say=said.append)
        np.testing.assert_array_equal(restored["a"], jax.random.normal(jax.random.key(1), 999))
        assert "checkpoint 2 in" in said[0]
        assert manager.all_steps() == [1]


@pytest.mark.parametrize(("of", "under"), [(2, 3), (1, 3), (3, 9)])
def test_a_checkpoint_under_another_number_is_left_out(tmp_path, of, under):
    state, said = {"step": jnp.zeros((), jnp.int32), "a": jnp.ones(3)}, []
    with contextlib.closing(checkpoints.open_checkpoints(tmp_path, keep=4)) as manager:
        for step in (1, 2, 3):
            checkpoints.save(
                manager,
                step,
                {"step": jnp.full((), step, jnp.int32), "a": jnp.full(3, step, jnp.float32)},
            )
            manager.wait_until_finished()
    shutil.rmtree(tmp_path / f"{under}", ignore_errors=True)
    shutil.copytree(tmp_path / f"{of}", tmp_path / f"{under}")
    with contextlib.closing(checkpoints.open_checkpoints(tmp_path, keep=4)) as manager:
        with pytest.raises(
            ValueError,
            match=f"checkpoint {under} in .* is that of step {of} under another number: del",
        ):
            checkpoints.mean(manager, state, 2)
        restored = checkpoints.restore(manager, state, say=said.append)
        right = {2: 2, 1: 2, 3: 3}[of]
        assert int(restored["step"]) == right
        np.testing.assert_array_equal(restored["a"], np.full(3, right))
        assert said == [
            f"checkpoint {under} in {manager.directory} is that of step {of} under another number: "
            "it is left out"
        ]
        assert max(manager.all_steps()) == right


WORDS = "return the value of each array when a given shape is not known before it was read".split()
FLAGS = {
    "vocab_size": 280, "layers": 2, "width": 8, "heads": 2, "length": 32, "batch_size": 8, "steps": 300,
    "warmup_steps": 5, "checkpoint_every": 30, "average_checkpoints": 3, "log_every": 50, "eval_every": 100,
    "keep_every": 150,
}  # fmt: skip


def begin(out, corpus, **changes):
    flags = {**FLAGS, "out": out, "corpus": corpus, **changes}
    return start("pretrain", *(f"--{name}={value}" for name, value in flags.items()))


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_with_the_same_model_bit_for_bit(tmp_path):
    corpus = tmp_path / "text.txt"
    random = np.random.default_rng(0)
    lines = [" ".join(random.choice(WORDS, random.integers(4, 12))) for _ in range(400)]
    corpus.write_text("\n".join(lines))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    running, checkpoints = begin(whole, corpus), broken / "checkpoints"
    assert kill_after(begin(broken, corpus), checkpoints, signal.SIGKILL)[0] == -signal.SIGKILL
    code, _, said = begin(broken, corpus, learning_rate=0.5).finish()
    assert code == 1
    assert "learning_rate" in said
    code, printed, said = kill_after(
        begin(broken, corpus), checkpoints, signal.SIGTERM, later_than=60
    )
    assert code == 128 + signal.SIGTERM, said
    assert "Stopped by SIGTERM" in printed
    assert not (broken / "model" / "model.safetensors").exists()
    for finishing in (begin(broken, corpus), running):
        code, _, said = finishing.finish()
        assert code == 0, said
    assert (whole / "model" / "model.safetensors").read_bytes() == (
        broken / "model" / "model.safetensors"
    ).read_bytes()
    for step in ("000150", "000300"):
        kept = [out / "steps" / step for out in (whole, broken)]
        assert (
            kept[0].joinpath("model.safetensors").read_bytes()
            == kept[1].joinpath("model.safetensors").read_bytes()
        )
        assert checkpoint.load_model(kept[0]).config.layers == 2
    rows = [
        [r for r in read_results(out)["rows"] if r["metric"] != "tokens_per_second"]
        for out in (whole, broken)
    ]
    assert rows[0] == rows[1]
    assert [r["step"] for r in rows[0] if r["metric"] == "loss"] == list(range(50, 301, 50))
    losses = [r["value"] for r in rows[0] if r["metric"] == "held_out_loss"]
    assert losses[-1] < losses[0] < np.log(280)
    assert (
        load_file(whole / "model" / "model.safetensors")["transformer.wte.weight"].dtype
        == np.float16
    )
    assert AutoTokenizer.from_pretrained(whole / "model").eos_token_id == 0
