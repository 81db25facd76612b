"""Test-wide settings: four CPU devices, strict dtype promotion, annotated shapes checked at every call.

Most of the tests' time goes to compiling, so XLA spends little on making programs fast, and the processes of one run,
scripts included, share what they compile. `JMAT_TEST_OPTIMISED=1` has programs compiled as users' are.
"""
# ruff: noqa: E402 (the environment comes before JAX, the import hook before jmat)

import atexit
import os
import tempfile

if "JMAT_TEST_CHILD" not in os.environ:  # the first process; workers and scripts inherit what it sets
    os.environ["JMAT_TEST_CHILD"] = "1"
    programs = tempfile.TemporaryDirectory(prefix="jmat-programs-")
    atexit.register(programs.cleanup)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = programs.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    quickly = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ["JMAT_TEST_XLA"] = "" if "JMAT_TEST_OPTIMISED" in os.environ else quickly
os.environ["XLA_FLAGS"] = f"{os.environ['JMAT_TEST_XLA']} --xla_force_host_platform_device_count=4"
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


@pytest.fixture(autouse=True, scope="module")
def fresh_memory():
    """Compiled programs of one file are of little use to the next, and there are gigabytes of them."""
    yield
    jax.clear_caches()


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
