"""Thousands of damaged files: each ends in one sentence or in what it holds, soon, and
in little memory.
"""

import json
import os
import pickle
import shutil
import subprocess
import sys

import jax.numpy as jnp
import pytest
import torch

from jmat.data.examples import Examples, save_examples
from jmat.maps.compact import LowRank, quantised
from jmat.maps.files import MapsInfo, save_maps
from jmat.maps.types import Linear
from tests import families, hf, mutated_files
from tests.scripts import ROOT
from tests.splits import make_split
from tests.test_gguf import write

SEED = 0
# Of JSON of all kinds together a thousand, too; `tests/test_mutated_tokenizers.py` damages
# tokenizers.
COUNT = {
    "safetensors": 1000,
    "gguf": 1000,
    "npz": 1000,
    "config.json": 400,
    "maps": 400,
    "lens": 1000,
    "pickle": 1000,
}
COUNT_OF_OTHERS = 150
INFO = MapsInfo(model="m", model_hash="h", protocol="p", corpus="c", n=9, seed=0, dtype="bfloat16")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with a file of every kind but sharded weights, and one with those."""
    folder = tmp_path_factory.mktemp("whole")
    case = families.llama("mutated", tie_word_embeddings=True)
    model = hf.make(hf.gpt2("mutated"))
    hf.save(model, folder)
    write(hf.make(case), folder / "model.gguf")
    save_examples(
        folder / "examples.npz",
        Examples(make_split([3, 1, 40], [2, 0, 3]), make_split([5, 9], [4, 4])),
    )
    low = quantised(LowRank(jnp.eye(16)[:, :2], jnp.eye(16)[:2], jnp.ones(16)))
    save_maps(folder, {"mat.1.2": Linear(jnp.eye(16), jnp.ones(16)), "rank:2.1.2": low}, INFO)
    lens = {"J": {0: torch.eye(16).half()}, "n_prompts": 3, "source_layers": [0], "d_model": 16}
    torch.save(lens, folder / "lens.pt")
    (folder / "0_2.pickle").write_bytes(pickle.dumps(torch.eye(16)))
    (folder / "pruned.json").write_text(
        json.dumps({"method": "map", "removed": [1], "blocks": "1"})
    )
    rows = [
        {"metric": "precision@1", "map": "mat", "layer": i, "value": 0.5, "n": 9} for i in range(3)
    ]
    (folder / "results.json").write_text(
        json.dumps({"experiment": "layer_jump", "config": {}, "rows": rows})
    )
    model.save_pretrained(folder / "shards", max_shard_size="8KB")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", mutated_files.KINDS)
def test_mutated_files_end_in_one_sentence_or_as_they_are(kind, whole, tmp_path):
    folder = tmp_path / "files"
    shutil.copytree(whole / "shards" if kind == "model.safetensors.index.json" else whole, folder)
    if kind == "pruned.json":  # a pruned model has dense maps alone, of the blocks removed
        save_maps(folder, {"mat.1.2": Linear(jnp.eye(16), jnp.ones(16))}, INFO)
    count = COUNT.get(kind, COUNT_OF_OTHERS)
    command = [
        sys.executable,
        "-m",
        "tests.mutated_files",
        kind,
        str(SEED),
        str(count),
        str(folder),
    ]
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    child = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr[-2000:]
    *problems, summary = map(json.loads, child.stdout.splitlines())
    assert problems == []
    assert summary["refused"] > count / 4
