"""Pretraining refuses what cannot be trained, and stops where it diverges."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.pretraining import limits as pretraining
from jmat.data import packing
from jmat.data.splitting import check_parts
from jmat.runtime import mesh
from jmat.training import train as training
from tests.scripts import run
from tests.test_pretrain import bert, gpt2

SETTINGS = {
    "arch": "gpt2", "width": 8, "heads": 2, "length": 16, "steps": 0, "epochs": 2.0, "batch_size": 4, "warmup_steps": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"heads": 3}, "--width=8 is not a multiple of --heads=3"),
        (
            {"arch": "bert", "length": 2},
            r"--length=2 has no room for a token between \[CLS\] and \[SEP\]",
        ),
        ({"steps": 3}, "--warmup_steps=3 of --steps=3: the learning rate would never be reached"),
    ],
)
def test_sizes_that_do_not_go_together(changes, says):
    with pytest.raises(ValueError, match=says):
        pretraining.check_sizes(SETTINGS | changes)
    pretraining.check_sizes(SETTINGS | {"arch": "bert", "length": 3, "steps": 4})


@pytest.mark.parametrize(
    ("changes", "rows", "says"),
    [
        (
            {},
            3,
            "the text fills 3 rows of 16 tokens, and a batch is 4 rows: give more text, or "
            "--batch_size=3 or less",
        ),
        (
            {"epochs": 0.1},
            8,
            "--epochs=0.1 of 2 steps each are 0.2 steps; expected 1 to 2,147,483,647",
        ),
        ({"epochs": 1e308}, 400, "--epochs=1e.308 of 100 steps each are inf steps"),
        ({}, 7, "2 steps are no more than --warmup_steps=3"),
    ],
)
def test_a_text_too_small_for_the_steps(changes, rows, says):
    with pytest.raises(ValueError, match=says):
        pretraining.step_count(SETTINGS | changes, rows)
    assert pretraining.step_count(SETTINGS, 8) == 4
    assert pretraining.step_count(SETTINGS | {"steps": 9}, 8) == 9


def test_an_empty_part_of_a_corpus_is_named():
    with pytest.raises(
        ValueError,
        match=r"corpus x is too small to be divided \(train 3, fit 0, eval 1 sentences\)",
    ):
        check_parts({"train": ["a"] * 3, "fit": [], "eval": ["b"]}, "x")


@pytest.mark.parametrize("loss", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_stops(loss):
    with pytest.raises(ValueError, match=f"the loss of step 7 is {loss}: training has diverged"):
        pretraining.check_loss(7, loss)
    pretraining.check_loss(7, 1.0)


def test_weights_that_are_not_finite_are_not_kept():
    state = training.TrainState(
        {"a": jnp.ones(3), "b": jnp.array([1.0, np.nan])}, None, jnp.int32(5)
    )
    with pytest.raises(ValueError, match="step 5 has left weights that are not finite"):
        pretraining.check_weights(state)
    pretraining.check_weights(state._replace(model={"a": jnp.ones(3)}))


def test_a_text_of_which_nothing_is_masked_has_no_loss():
    batch = packing.pack(packing.same_tokens([[2, 3]] * 4, specials=range(5)), 16)
    evaluate = training.make_evaluate(training.masked_lm_loss(4), batch, 4, mesh.data_mesh())
    found = evaluate(bert())
    assert found["count"] == 0
    assert np.isnan([found["loss"], found["accuracy"]]).all()


def test_predictions_of_a_trained_model_differ():
    batch = packing.pack(packing.next_tokens([[7, 9, 12, 5], [3, 4]], 0), 16)
    assert training.predictions(gpt2(), batch).note() is None


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    random = np.random.default_rng(0)
    lines = [" ".join(random.choice(["value", "of", "the", "array", "is"], 8)) for _ in range(300)]
    path.write_text("\n".join(lines))
    return path


SMALL = "--layers=1 --width=16 --heads=2 --vocab_size=300 --length=32 --batch_size=8 --warmup_steps=0".split()


def test_mistakes_are_told_before_training(tmp_path, text):
    three = tmp_path / "three.txt"
    three.write_text("\n".join(text.read_text().splitlines()[:3]))
    for flags, says in (
        ([f"--corpus={three}"], "is too small to be divided"),
        ([f"--corpus={text}", "--batch_size=100000"], "the text fills "),
        ([f"--corpus={text}", "--seed=4294967296"], "seed"),
        ([f"--corpus={text}", "--seed=99999999999999999999"], "seed"),
    ):
        _, said = run("pretrain", *SMALL, *flags, f"--out={tmp_path / 'out'}", code=1)
        assert says in said
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_that_diverges_stops_where_it_does_and_keeps_what_it_had(tmp_path, text):
    flags = [*SMALL, f"--corpus={text}", f"--out={tmp_path}", "--learning_rate=1e38", "--steps=9"]
    _, said = run("pretrain", *flags, "--checkpoint_every=1", code=1)
    assert "training has diverged" in said
    assert not (tmp_path / "model" / "model.safetensors").exists()
    assert (tmp_path / "checkpoints" / "1").is_dir()
    assert json.loads((tmp_path / "results.json").read_text())["rows"] == []


@pytest.mark.slow
def test_half_a_tokenizer_is_trained_anew(tmp_path, text):
    flags = [*SMALL, f"--corpus={text}", f"--out={tmp_path}", "--steps=2"]
    run("pretrain", *flags)
    whole = (tmp_path / "model" / "tokenizer.json").read_bytes()
    for damage in (b"", whole[:500], None):
        (tmp_path / "model" / "tokenizer.json").unlink()
        if damage is not None:
            (tmp_path / "model" / "tokenizer.json").write_bytes(damage)
        _, said = run("pretrain", *flags)
        assert "trained anew" in said
        assert (tmp_path / "model" / "tokenizer.json").read_bytes() == whole
