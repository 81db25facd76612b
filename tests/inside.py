"""Scripts run inside the tests' own process, where the model's programs are compiled
already; figures are kept.

Every script has its own copy of the modules below `experiments`, and its own flags,
which would clash with others'. What holds of every run is checked in every run: all
resamples are drawn by --seed, and all notes are printed.
"""

import contextlib
import dataclasses
import functools
import importlib
import io
import itertools
import json
import logging
import pathlib
import shutil
import sys
import tempfile
from typing import Any
from unittest import mock

import jax
import numpy as np
from absl import app, flags  # noqa: F401 (defines flags, which every script expects, as orbax does)
from matplotlib.figure import Figure
from safetensors.numpy import load_file, save_file

from jmat.capture import reading
from jmat.maps.files import read_maps
from jmat.metrics import bootstrap
from jmat.metrics.predictions import Predictions
from jmat.report.notes import AGREEMENT, format_notes
from jmat.runtime import checkpoints  # noqa: F401 (imports orbax)
from jmat.runtime.errors import printable
from jmat.studies import fitting
from tests import kept
from tests.test_reference import REFERENCE

_WORDS = (
    "returns array value name list file error string number object function class type key index "
    "path shape item input output new first last given empty current default optional parent child "
    "token line text count size"
).split()
_COUNT = itertools.count()
# stands in every run in place of the note on predictions that are all alike
NOTE = "a note on what is predicted"
# Scripts whose rows hold one model's predictions against another's, or against the text.
_PREDICT = "layer_jump map_zoo submodule_ablation early_exit peek cross_corpus prune tasks bundled_quality pretrain".split()
_OWN_SIZES = ("benchmark", "bundled_quality")  # scripts whose batches have sizes of their own
# scripts that print notes of some rows only, or of none
_OWN_OUTPUT = ("verify", "benchmark", "pretrain")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run has left."""

    name: str
    out: pathlib.Path
    printed: str
    said: str
    figures: tuple[Figure, ...]
    # of predictions that notes are on: how many, and how certain
    collected: tuple[tuple[int, float], ...] = ()

    @functools.cached_property
    def results(self) -> dict[str, Any]:
        return json.loads((self.out / "results.json").read_text("utf-8"))

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.results["rows"]

    @functools.cached_property
    def maps(self):
        """Maps by name, and what maps.json says of them."""
        return read_maps(self.out)

    def find(self, **wanted):
        """The rows with these fields; a field that should not be there is given as
        None.
        """
        return [
            row for row in self.rows if all(row.get(key) == value for key, value in wanted.items())
        ]

    def one(self, **wanted):
        """The only row with these fields."""
        (row,) = self.find(**wanted)
        return row


def call(script, *arguments, **given) -> Outcome:
    """Runs a script with flags, by default on the reference GPT-2; a run that was made
    before is not made again.

    Raises ValueError, with what the script said, where it does not end well.
    """
    named = {"model": REFERENCE / "gpt2", **given}
    words = tuple(
        f"--{name}={','.join(map(str, value)) if isinstance(value, list | tuple) else value}"
        for name, value in named.items()
        if value is not None
    )
    return _call(script, (*words, *arguments))


@functools.cache
def _call(script, words) -> Outcome:
    out, figures = _folder() / str(next(_COUNT)), []

    def savefig(figure, file, **_):
        figures.append(figure)
        pathlib.Path(file).write_bytes(b"\x89PNG")

    collected: dict[int, list[Any]] = {}  # with the object itself, so that no other one gets its id

    def add(predictions, logits, real=None, *, to=Predictions.add):
        probabilities = jax.nn.softmax(np.asarray(logits, np.float32), -1).max(-1)
        kept_ones = np.ones(probabilities.shape, bool) if real is None else np.asarray(real, bool)
        collected.setdefault(id(predictions), [predictions]).append(
            np.asarray(probabilities)[kept_ones]
        )
        to(predictions, logits, real)

    sizes: set[int] = set()

    def sized(make):
        def batches(*given, **named):
            sizes.add(named["tokens_per_batch"])
            return make(*given, **named)

        return batches

    arguments = [f"experiments.{script}", *words, f"--out={out}"]
    printed, said = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with _as_before(), loaded(script) as module, mock.patch.object(sys, "argv", arguments):
        try:
            with (
                mock.patch.object(Figure, "savefig", savefig),
                mock.patch.object(Predictions, "add", add),
                mock.patch.object(
                    Predictions, "note", lambda each: NOTE if each._count > 1 else None
                ),
                mock.patch.object(
                    bootstrap, "_count_chunks", wraps=bootstrap._count_chunks
                ) as draw,
                mock.patch.object(reading, "padded_batches", sized(reading.padded_batches)),
                mock.patch.object(reading, "packed", sized(reading.packed)),
                mock.patch.object(fitting, "packed_batches", sized(fitting.packed_batches)),
                contextlib.redirect_stdout(printed),
                contextlib.redirect_stderr(said),
            ):
                module.cli.run(module.main)
            code = 0
        except SystemExit as end:
            code = end.code or 0
    texts = [stream.buffer.getvalue().decode("utf-8") for stream in (printed, said)]
    if code:
        raise ValueError(f"{script} ended with {code}: {texts[1]}")
    certainties = [np.concatenate(parts) for _, *parts in collected.values()]
    collected_ones = tuple((len(p), float(p.mean())) for p in certainties if len(p))
    outcome = Outcome(kept.name_of(script, words), out, *texts, tuple(figures), collected_ones)
    wanted = next((int(word.partition("=")[2]) for word in words if word.startswith("--seed=")), 0)
    assert {seed for _, _, seed, _ in (each.args for each in draw.call_args_list)} <= {wanted}, (
        "resamples by --seed"
    )
    if script not in _OWN_SIZES:
        size = next(
            (
                int(word.partition("=")[2])
                for word in words
                if word.startswith("--tokens_per_batch=")
            ),
            1024,
        )
        assert sizes <= {size}, (
            "tokens in a batch as --tokens_per_batch says, by default what suits a CPU"
        )
    _check_notes(script, outcome)
    kept.check(outcome)
    return outcome


def _check_notes(script, outcome):
    """Holds the notes that were printed against those of the rows in results.json."""
    if script not in _OWN_OUTPUT:
        lines = outcome.printed.splitlines()
        notes = [printable(note) for note in format_notes(outcome.rows)]
        assert [lines.count(note) for note in notes] == [1] * len(notes)
    if script in _PREDICT:
        assert outcome.printed.splitlines().count(NOTE) == 1
        compared = [row for row in outcome.rows if row["metric"].startswith(AGREEMENT)]
        silent = [row for row in compared if NOTE not in row.get("note", "")]
        # The n-gram's perplexity is its own, and that of the model beside it is of the same tokens.
        assert {row["metric"] for row in silent} <= (
            {"perplexity"} if script == "bundled_quality" else set()
        )


@contextlib.contextmanager
def _as_before():
    """Restores what a script sets for its whole process."""
    precision, handlers, level = (
        jax.config.jax_default_matmul_precision,
        [*logging.root.handlers],
        logging.root.level,
    )
    try:
        yield
    finally:
        jax.config.update("jax_default_matmul_precision", precision)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


@contextlib.contextmanager
def loaded(script):
    """The module of a script, as if no other had been imported, with its flags at their
    defaults.
    """
    before, modules = dict(flags.FLAGS.__dict__), _experiments()
    state, own = _worlds.setdefault(script, ({}, {}))
    for name in modules:
        del sys.modules[name]
    sys.modules.update(own)
    _become(state or _without_scripts(before))
    try:
        module = importlib.import_module(f"experiments.{script}")
        if not state:
            state |= flags.FLAGS.__dict__
            own |= _experiments()
        for name in list(flags.FLAGS):
            flags.FLAGS[name].unparse()
        yield module
    finally:
        for name in _experiments():
            del sys.modules[name]
        sys.modules.update(modules)
        _become(before)


_worlds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}


def _experiments():
    return {
        name: module for name, module in sys.modules.items() if name.split(".")[0] == "experiments"
    }


def _become(state):
    flags.FLAGS.__dict__.clear()
    flags.FLAGS.__dict__.update(state)


def _without_scripts(state):
    """The flags that libraries define."""
    by_module = {
        key: {
            module: [*found]
            for module, found in state[key].items()
            if "experiments" not in str(module)
        }
        for key in ("__flags_by_module", "__flags_by_module_id", "__key_flags_by_module")
    }
    kept = {flag.name for found in by_module["__flags_by_module"].values() for flag in found}
    return {
        **state,
        "__flags": {name: flag for name, flag in state["__flags"].items() if name in kept},
        **by_module,
    }


@functools.cache
def _folder() -> pathlib.Path:
    folder = tempfile.TemporaryDirectory(prefix="jmat-inside-")
    _kept.append(folder)
    return pathlib.Path(folder.name)


_kept: list[Any] = []


@functools.cache
def changed_model(family="gpt2") -> pathlib.Path:
    """A checkpoint of the same shape and tokenizer as a reference model, with other
    weights.
    """
    folder = _folder() / f"changed-{family}"
    shutil.copytree(REFERENCE / family, folder)
    random, tensors = np.random.default_rng(0), load_file(folder / "model.safetensors")
    noisy = {
        name: value * random.normal(1, 0.3, value.shape).astype(value.dtype)
        for name, value in tensors.items()
    }
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@functools.cache
def text(count=260, seed=0) -> pathlib.Path:
    """A file of sentences of made-up English; each occurs once."""
    random, path = np.random.default_rng(seed), _folder() / f"text-{count}-{seed}.txt"
    lines = [
        " ".join(random.choice(_WORDS, random.integers(6, 14))).capitalize() + "."
        for _ in range(count)
    ]
    assert len(set(lines)) == count
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path
