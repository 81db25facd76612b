r"""Trains a small language model on the text that every jmat installation holds.

Trains a GPT-2 or BERT on the `train` sentences of a corpus, and writes an ordinary
Hugging Face folder, OUT/model, that transformers and `jmat.load` read (weights in
float16). The two bundled models were made by:

    python -m experiments.pretrain --arch=gpt2 --layers=8 --width=192 --heads=6 \
        --batch_size=32 --learning_rate=5e-3 --weight_decay=0.2 \
        --epochs=6 --average_checkpoints=4 --out=runs/gpt2-docs
    python -m experiments.pretrain --arch=bert --layers=6 --width=128 --heads=4 \
        --batch_size=24 --learning_rate=1.5e-3 --warmup_steps=300 \
        --epochs=8 --optimizer=adamw --out=runs/bert-docs

The first takes about an hour and a quarter on two idle cores and ends at a held-out
loss of 3.59 nats a token (its last checkpoint alone: 3.70); the second half an hour.

With --regularizer, a penalty on how the stream moves is added to the loss: `cosine`,
the sum over blocks of the mean over tokens of 1 - cos(h_l, h_{l-1}); `mse`, the same of
the squared distance; `final_jump`, the cosine of the last block alone. The `loss` of a
step is recorded with the penalty, held-out losses without it.

A run that is killed goes on from its last checkpoint when started again with the same
flags, and ends with the same model, bit for bit.
"""

import contextlib
import functools
import hashlib
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags
from flax import nnx

from experiments import cli, tracking
from experiments.pretraining.limits import (
    MOST_STEPS,
    check_loss,
    check_sizes,
    check_weights,
    step_count,
)
from experiments.pretraining.setup import (
    encode,
    hf_config,
    language_model_loss,
    prepare_tokenizer,
    save_tokenizer,
)
from jmat import checkpoint, models
from jmat.data import corpus, packing, splitting
from jmat.report.notes import with_note
from jmat.report.results import read_results, write_results
from jmat.report.rows import Row
from jmat.runtime import checkpoints, mesh, stopping
from jmat.runtime.checks import LARGEST_SEED
from jmat.runtime.digests import model_hash
from jmat.runtime.folders import OutputFolder, check_output_folder, output_path
from jmat.training import train as training
from jmat.training.penalties import KINDS, Regularizer

# What decides the result, and so must be the same when a run is resumed.
_SETTINGS: dict[str, flags.FlagHolder[Any]] = {
    "arch": flags.DEFINE_enum(
        "arch", "gpt2", ["gpt2", "bert"], "Predicts next (gpt2) or masked (bert) tokens."
    ),
    "corpus": flags.DEFINE_string(
        "corpus", "docs", "`docs`, or a text file with one sentence or paragraph a line."
    ),
    "vocab_size": flags.DEFINE_integer(
        "vocab_size", 4096, "Vocabulary, special tokens included.", lower_bound=1
    ),
    "layers": flags.DEFINE_integer("layers", 8, "Blocks.", lower_bound=1),
    "width": flags.DEFINE_integer(
        "width", 192, "Width of the stream; the feed-forward part is 4 times as wide.", 1
    ),
    "heads": flags.DEFINE_integer(
        "heads", 6, "Attention heads; must divide the width.", lower_bound=1
    ),
    "length": flags.DEFINE_integer(
        "length", 96, "Tokens a row, and the longest text that the model can read.", 1
    ),
    "batch_size": flags.DEFINE_integer("batch_size", 32, "Rows a step.", lower_bound=1),
    "optimizer": flags.DEFINE_enum(
        "optimizer", "muon", training.OPTIMIZERS, "Optimiser of the weights."
    ),
    "learning_rate": flags.DEFINE_float(
        "learning_rate", 2e-3, "Peak learning rate.", lower_bound=0.0
    ),
    "warmup_steps": flags.DEFINE_integer(
        "warmup_steps", 100, "Steps of linear warm-up.", lower_bound=0
    ),
    "weight_decay": flags.DEFINE_float(
        "weight_decay", 0.1, "Decay of matrices (muon: the blocks').", lower_bound=0.0
    ),
    "regularizer": flags.DEFINE_enum(
        "regularizer",
        "none",
        KINDS,
        "Penalty on how the stream moves: 1 - cos between neighbouring layers (cosine) or the last "
        "two (final_jump), or the squared length of what a block adds (mse).",
    ),
    "reg_weight": flags.DEFINE_float(
        "reg_weight", 0.5, "The penalty's weight beside the loss.", lower_bound=0.0
    ),
    "steps": flags.DEFINE_integer(
        "steps", 0, "Steps; 0 means as many as `epochs` epochs have.", 0, MOST_STEPS
    ),
    "epochs": flags.DEFINE_float(
        "epochs", 4.0, "Passes over the text, where `steps` is 0.", lower_bound=0.0
    ),
    "checkpoint_every": flags.DEFINE_integer(
        "checkpoint_every", 200, "Steps between two checkpoints.", lower_bound=1
    ),
    "average_checkpoints": flags.DEFINE_integer(
        "average_checkpoints",
        1,
        "The model is the mean of the last so many checkpoints; it overfits less.",
        lower_bound=1,
    ),
    "seed": flags.DEFINE_integer(
        "seed",
        0,
        "Decides the initial weights, the order of the data and the masks.",
        0,
        LARGEST_SEED,
    ),
}
_OUT = flags.DEFINE_string(
    "out", "runs/pretrain", "Folder for the model, the results and the checkpoints."
)
_LOG_EVERY = flags.DEFINE_integer(
    "log_every", 20, "Steps between two lines of progress.", lower_bound=1
)
_EVAL_EVERY = flags.DEFINE_integer(
    "eval_every", 200, "Steps between two held-out losses.", lower_bound=1
)
_EVAL_SENTENCES = flags.DEFINE_integer(
    "eval_sentences", 1000, "Sentences that held-out losses are of.", lower_bound=1
)

_KEEP_EVERY = flags.DEFINE_integer(
    "keep_every",
    0,
    "Also write the model to OUT/steps/STEP every so many steps, for curves over training; 0: "
    "never.",
    lower_bound=0,
)
_OVERWRITE = flags.DEFINE_bool(
    "overwrite",
    False,
    "Replace what a run with other flags left in --out, once there are new results.",
)
flags.adopt_module_key_flags(tracking)


def train(
    state: training.TrainState,
    step_fn: Callable[
        [training.TrainState, packing.TrainingBatch], tuple[training.TrainState, jax.Array]
    ],
    data: Any,
    log: Callable[[int, str, float], None],
    evaluate: Callable[[Any], dict[str, float]],
    save: Callable[[training.TrainState], None],
    keep: Callable[[training.TrainState], None],
    checkpoint_every: int,
    steps: int,
) -> tuple[training.TrainState, bool]:
    """Takes the remaining steps. Returns the state, and False where SIGTERM cut the
    training short, the state saved.

    Raises ValueError at the first step whose loss is not finite, or after which the
    held-out loss is not; the checkpoints of steps before it stay.
    """
    began, tokens = time.perf_counter(), 0
    # not looked at yet: one, while the next step is computed
    losses: list[tuple[int, jax.Array]] = []
    terminated: list[int] | None = None
    with contextlib.ExitStack() as stack:
        for step, batch in data:
            done = step + 1
            state, loss = step_fn(state, batch)
            # until the first step is compiled and done, there is nothing to save
            if terminated is None:
                jax.block_until_ready(loss)
                terminated = stack.enter_context(stopping.sigterm_received())
            losses.append((done, loss))
            intervals = (
                _LOG_EVERY.value,
                _EVAL_EVERY.value,
                checkpoint_every,
                _KEEP_EVERY.value or steps,
            )
            writes = (
                done == steps or bool(terminated) or any(done % every == 0 for every in intervals)
            )
            while len(losses) > (0 if writes else 1):
                check_loss(*losses.pop(0))
            tokens += int((np.asarray(batch.segments) > 0).sum())
            if done % _LOG_EVERY.value == 0 or done == steps:
                log(done, "loss", float(loss))
                log(done, "tokens_per_second", tokens / (time.perf_counter() - began))
                began, tokens = time.perf_counter(), 0
            if done % _EVAL_EVERY.value == 0 or done == steps:
                held_out = evaluate(state.model)
                if held_out["count"]:  # of little text, no token may be masked
                    check_loss(done, held_out["loss"])
                    log(done, "held_out_loss", held_out["loss"])
                began, tokens = time.perf_counter(), 0
            if _KEEP_EVERY.value and done % _KEEP_EVERY.value == 0:
                keep(state)
            if done % checkpoint_every == 0 or done == steps or terminated:
                save(state)
            if terminated and done < steps:
                return state, False
        return state, True


def main(argv: list[str]) -> None:
    """Trains, or goes on training, and writes OUT/model and OUT/results.json."""
    del argv
    settings = {name: flag.value for name, flag in _SETTINGS.items()}
    out, arch, length, seed = (
        output_path(_OUT.value),
        settings["arch"],
        settings["length"],
        settings["seed"],
    )
    check_sizes(settings)
    check_output_folder(out)
    sentences = corpus.load_corpus(settings["corpus"])
    split = splitting.split(sentences)
    splitting.check_parts(split, settings["corpus"])
    digest = hashlib.sha256("\n".join(split["train"]).encode()).hexdigest()
    claim = cli.claim_folder(
        out,
        "pretrain",
        settings | {"train_sha256": digest},
        writes=("model", "steps", "checkpoints"),
        reads=("corpus",),
        overwrite=_OVERWRITE.value,
    )
    tokenizer, new_files = prepare_tokenizer(
        arch, split["train"], settings["vocab_size"], out / "model"
    )
    pairs = {name: encode(arch, tokenizer, sentences, length) for name, sentences in split.items()}

    sizes = {name: settings[name] for name in ("layers", "width", "heads", "length")}
    config = models.config_from_hf(hf_config(arch, vocab_size=len(tokenizer), **sizes))
    devices, batch_size = mesh.data_mesh(), settings["batch_size"]
    rows = packing.pack(pairs["train"], length, (seed, 0)).rows
    steps = step_count(settings, rows)
    regularizer = Regularizer(settings["regularizer"], settings["reg_weight"])
    schedule = {name: settings[name] for name in ("learning_rate", "warmup_steps", "weight_decay")}
    optimizer = training.make_optimizer(kind=settings["optimizer"], steps=steps, **schedule)
    state = mesh.replicate(
        devices, training.init_state(models.build(config, nnx.Rngs(seed)), optimizer)
    )
    every, averaged = settings["checkpoint_every"], settings["average_checkpoints"]
    manager = checkpoints.open_checkpoints(claim.path("checkpoints"), keep=averaged + 1)
    state = checkpoints.restore(manager, state, say=cli.say)
    first = int(state.step)
    history = read_rows(out, first)
    size = sum(leaf.size for leaf in jax.tree.leaves(state.model))
    print(f"{size:,} parameters, {rows} rows an epoch; steps {first} .. {steps}", flush=True)

    plain, loss = (
        language_model_loss(arch, tokenizer, penalty) for penalty in (Regularizer(), regularizer)
    )
    data = training.batches(
        lambda epoch: packing.pack(pairs["train"], length, (seed, epoch)), batch_size, first, steps
    )
    sharded = ((step, mesh.shard_batch(devices, batch)) for step, batch in data)
    watched = packing.pack(pairs["fit"][: _EVAL_SENTENCES.value], length)
    log = make_log(history, first, steps)

    def save(state: training.TrainState) -> None:
        check_weights(state)
        save_tokenizer(claim.path("model"), new_files)
        write_results(out, "pretrain", settings, history)
        for step in manager.all_steps():
            if step % every:  # what SIGTERM left would take the place of one that is to be averaged
                manager.delete(step)
        checkpoints.save(manager, int(state.step), state)

    step_fn = training.make_train_step(loss, optimizer, seed)
    evaluate = training.make_evaluate(plain, watched, batch_size, devices)
    keep = functools.partial(keep_model, claim)
    try:
        state, finished = train(state, step_fn, sharded, log, evaluate, save, keep, every, steps)
    finally:
        manager.wait_until_finished()
    if not finished:
        manager.close()
        print(
            f"Stopped by SIGTERM after {int(state.step)} steps; start again with the same flags to "
            "go on."
        )
        sys.exit(stopping.EXIT_TERMINATED)
    model = state.model if averaged == 1 else checkpoints.mean(manager, state, averaged).model
    manager.close()
    save_tokenizer(claim.path("model"), new_files)  # where the last step had been taken before
    checkpoint.save_model(out / "model", model, dtype="float16")
    held_out = packing.pack(pairs["eval"], length)
    final = training.make_evaluate(plain, held_out, batch_size, devices)(model)
    evaluated: list[Row] = [
        {"metric": f"eval_{name}", "step": steps, **measured(value)}
        for name, value in final.items()
    ]
    note = training.predictions(
        model, held_out.take(np.arange(min(batch_size, held_out.rows)))
    ).note()
    evaluated = [with_note(row, note) for row in evaluated]
    history += evaluated
    text = {"source": settings["corpus"], "corpus": corpus.sentences_fingerprint(sentences)}
    text |= {part: corpus.sentences_fingerprint(split[part]) for part in ("train", "eval")}
    trained = model_hash(checkpoint.parameters(model))
    write_results(out, "pretrain", settings, history, model_hash=trained, text=text)
    print(f"Held out: {', '.join(f'{name} {value:.4g}' for name, value in final.items())}")
    cli.print_notes(evaluated)
    print(f"Wrote {out / 'model'} and {out / 'results.json'}.")


def measured(value: float) -> Row:
    """Returns the fields of a row; a mean of no tokens, none of which was masked in a
    small text, has no value.
    """
    return (
        {"value": value}
        if np.isfinite(value)
        else {"value": None, "note": "no token of the text was masked"}
    )


def keep_model(claim: OutputFolder, state: training.TrainState) -> None:
    """Writes OUT/steps/STEP, a Hugging Face folder without tokenizer."""
    checkpoint.save_model(
        claim.path("steps") / f"{int(state.step):06}", state.model, dtype="float16"
    )


def read_rows(out: pathlib.Path, step: int) -> list[Row]:
    """The rows that an earlier, killed process wrote up to `step`."""
    rows = read_results(out)["rows"] if step > 0 else []
    return [row for row in rows if row["step"] <= step and not row["metric"].startswith("eval_")]


def make_log(rows: list[Row], first: int, steps: int) -> Callable[[int, str, float], None]:
    """A function (step, metric, value) that appends a row and prints it with the time
    left.
    """
    began = time.perf_counter()

    def log(step: int, metric: str, value: float) -> None:
        rows.append({"metric": metric, "step": step, "value": value})
        left = (time.perf_counter() - began) / (step - first) * (steps - step) / 60
        print(
            f"step {step:>6}/{steps}  {metric:<18}{value:>10.4f}   {left:.1f} min left", flush=True
        )

    return log


if __name__ == "__main__":
    cli.run(main)
