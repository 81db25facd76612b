"""Reads a thousand damaged files of one kind in a process of its own, and prints what
each cost.

`python -m tests.mutated_files KIND SEED COUNT FOLDER` prints a line of JSON for each
file that ended neither in one sentence nor in what it holds, or took more than 5
seconds or 500 MB; then one line for all.
"""

import functools
import io
import json
import logging
import pathlib
import random
import resource
import sys
import time
import zipfile

import gguf
import jax
import numpy as np
import safetensors.numpy

from jmat.checkpoint import load_model, parameters
from jmat.checkpoint.model import _full_name
from jmat.data.examples import load_examples
from jmat.maps.files import read_maps as read_folder
from jmat.maps.loading import read_any
from jmat.models import FAMILIES
from jmat.report.results import read_results
from jmat.studies.prune.surgery import load_pruned
from tests import mutations

SECONDS, MEGABYTES = 5, 500


def stored(model):
    """What a model holds, under the names and in the layouts of its checkpoint."""
    family, values = FAMILIES[model.config.family], parameters(model)
    return {
        _full_name(key.file, family): key.layout.save(
            tuple(np.asarray(values[path]) for path in key.params)
        )
        for key in family.keys(model.config)
    }


def read_safetensors(folder):
    held = stored(load_model(folder))
    written = safetensors.numpy.load_file(folder / "model.safetensors")
    return all(
        np.array_equal(held[name], written[name].astype(np.float32))
        for name in held
        if name in written
    )


def read_gguf(folder):
    path = folder / "model.gguf"
    table = np.asarray(load_model(path).embed.tokens.table[...])
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    tensor = tensors["token_embd.weight"]
    return np.array_equal(table, gguf.dequantize(tensor.data, tensor.tensor_type))


def read_npz(folder):
    examples = load_examples(folder / "examples.npz")
    with np.load(folder / "examples.npz") as archive:
        return all(
            np.array_equal(getattr(getattr(examples, split), field), archive[f"{split}_{field}"])
            for split in ("fit", "eval")
            for field in ("tokens", "lengths", "positions")
        )


def read_weights(folder):
    return load_model(folder).config.layers > 0


def read_maps(folder):
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(dict(read_folder(folder)[0])))


@functools.cache
def model_of(folder):
    return load_model(folder)


def read_lens(folder):
    maps, _ = read_any(folder / "lens.pt", model_of(folder))
    return all(each.W.shape == (16, 16) for each in maps.values())


def read_pickle(folder):
    maps, _ = read_any(folder / "0_2.pickle", None)
    return all(np.isfinite(each.W).all() for each in maps.values())


def read_both(folder):
    return bool(load_pruned(folder)[0])


def read_results_json(folder):
    return isinstance(read_results(folder)["rows"], list)


def damage_zip(content, rng, compression):
    """A zip of which one member was changed, or the whole file."""

    def pack(parts):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", compression) as archive:
            for name, part in parts.items():
                archive.writestr(name, part)
        return file.getvalue()

    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    return mutations.damaged_zip(parts, rng, pack)


# Which file of the folder is damaged, how, and what then reads it.
KINDS = {
    "safetensors": ("model.safetensors", mutations.damaged_safetensors, read_safetensors),
    "gguf": ("model.gguf", lambda content, rng: mutations.damaged(content, rng, 2000), read_gguf),
    "npz": (
        "examples.npz",
        lambda content, rng: damage_zip(content, rng, zipfile.ZIP_DEFLATED),
        read_npz,
    ),
    "maps": ("maps.safetensors", mutations.damaged_safetensors, read_maps),
    "lens": (
        "lens.pt",
        lambda content, rng: damage_zip(content, rng, zipfile.ZIP_STORED),
        read_lens,
    ),
    "pickle": (
        "0_2.pickle",
        lambda content, rng: mutations.damaged(content, rng, 400),
        read_pickle,
    ),
    "config.json": ("config.json", mutations.damaged_json_text, read_weights),
    "maps.json": ("maps.json", mutations.damaged_json_text, read_maps),
    "pruned.json": ("pruned.json", mutations.damaged_json_text, read_both),
    "results.json": ("results.json", mutations.damaged_json_text, read_results_json),
    "model.safetensors.index.json": (
        "model.safetensors.index.json",
        mutations.damaged_json_text,
        read_weights,
    ),
}


def peak():
    """The most memory that this process has held since `forget_peak`, in MB."""
    lines = pathlib.Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def forget_peak():
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def main(kind, seed, count, folder):
    logging.disable(logging.WARNING)
    folder = pathlib.Path(folder)
    name, damage, read = KINDS[kind]
    whole = (folder / name).read_bytes()
    jax.block_until_ready(jax.numpy.zeros(1))
    assert read(folder)
    # So that a bomb ends here and not in the machine's memory.
    virtual = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + (2 << 30), resource.RLIM_INFINITY))
    refused, slowest, largest = 0, 0.0, 0.0
    for number in range(int(count)):
        content = damage(whole, random.Random(f"{kind} {seed} {number}"))
        (folder / name).write_bytes(content)
        forget_peak()
        before, start, problem = peak(), time.process_time(), ""
        try:
            if not read(folder):
                problem = "read otherwise than it is"
        except (ValueError, OSError) as error:
            refused += 1
            message = str(error)
            if not message or "\n" in message or len(message) > 3000 or not message.isprintable():
                problem = f"no sentence: {type(error).__name__}: {message[:200]!r}"
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"[:200]
        seconds, megabytes = time.process_time() - start, peak() - before
        slowest, largest = max(slowest, seconds), max(largest, megabytes)
        if seconds > SECONDS or megabytes > MEGABYTES:
            problem += f" {seconds:.1f} s, {megabytes:.0f} MB"
        if problem:
            print(json.dumps({"number": number, "problem": problem}), flush=True)
    print(json.dumps({"refused": refused, "seconds": slowest, "megabytes": largest}))


if __name__ == "__main__":
    main(*sys.argv[1:])
