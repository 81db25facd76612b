"""Test-wide settings: four CPU devices, strict dtype promotion, annotated shapes checked at every call."""
# ruff: noqa: E402 (the environment comes before JAX, the import hook before jmat)

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"

import pathlib

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
install_import_hook("jmat", "beartype.beartype")

import jmat
from jmat.data.examples import load_examples

_REFERENCE = pathlib.Path(__file__).parent / "data" / "reference"


@pytest.fixture(scope="session")
def gpt2():
    return jmat.load(_REFERENCE / "gpt2")[0]


@pytest.fixture(scope="session")
def bert():
    return jmat.load(_REFERENCE / "bert")[0]


@pytest.fixture(scope="session")
def gpt2_examples():
    return load_examples(_REFERENCE / "gpt2" / "examples.npz")


@pytest.fixture(scope="session")
def bert_examples():
    return load_examples(_REFERENCE / "bert" / "examples.npz")
