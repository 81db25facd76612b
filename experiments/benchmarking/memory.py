"""Peak memory of a streaming pass, in a process of its own.

python -m experiments.benchmarking.memory FOLDER DTYPE TOKENS TOKENS_PER_BATCH
"""

import json
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
import numpy as np

import jmat
from experiments.benchmarking.setup import sentences_of
from jmat.capture.stream import all_positions, packed_batches, stream_moments
from jmat.checkpoint import load_model
from jmat.data.batches import Batch
from jmat.maps.jumps import jump_pairs
from jmat.models.config import ModelConfig
from jmat.runtime.annotations import JsonObject


def measure(
    folder: pathlib.Path, dtype: str, tokens: int, tokens_per_batch: int
) -> dict[str, int] | None:
    """Bytes by which a new process grows while it loads the model and sums up the
    moments of all pairs.

    Returns `growth` at its peak and, of that, what the `weights` and `statistics` are;
    None where the system does not tell (only Linux does).
    """
    arguments = [str(folder), dtype, str(tokens), str(tokens_per_batch)]
    root = pathlib.Path(jmat.__file__).parents[1]
    command = [sys.executable, "-m", "experiments.benchmarking.memory", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(
            f"the process that measures memory failed: {done.stderr.strip().splitlines()[-1]}"
        )
    return json.loads(done.stdout.strip().splitlines()[-1])


def plan(config: ModelConfig, tokens: int, tokens_per_batch: int) -> list[Batch]:
    """Packed batches of random sentences in which every token is read."""
    split = sentences_of(tokens, config.vocab_size, seed=3)
    read = all_positions(split)
    return packed_batches(
        split, read, tokens_per_batch=tokens_per_batch, row_multiple=len(jax.local_devices())
    )


def _resident(what: str) -> int | None:
    """Bytes of this process, now (`VmRSS`) or at most so far (`VmHWM`)."""
    try:
        status = pathlib.Path("/proc/self/status").read_text("utf-8")
    except OSError:
        return None
    found = re.search(rf"{what}:\s+(\d+) kB", status)
    return None if found is None else 1024 * int(found[1])


def _main(folder: str, dtype: str, tokens: str, tokens_per_batch: str) -> JsonObject | None:
    jax.block_until_ready(jax.numpy.zeros(1) + 1)
    before = _resident("VmRSS")
    model = load_model(pathlib.Path(folder), dtype=dtype)
    pairs = jump_pairs(model.config.layers)
    moments = stream_moments(model, plan(model.config, int(tokens), int(tokens_per_batch)), pairs)
    jax.block_until_ready(moments)
    peak = _resident("VmHWM")
    if before is None or peak is None:
        return None

    def size(tree: Any) -> int:
        return int(sum(np.dtype(leaf.dtype).itemsize * leaf.size for leaf in jax.tree.leaves(tree)))

    return {"growth": peak - before, "weights": size(model), "statistics": size(moments)}


if __name__ == "__main__":
    print(json.dumps(_main(*sys.argv[1:])))
