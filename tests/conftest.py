"""Test-wide settings: four CPU devices, strict dtype promotion, annotated shapes
checked at every call.
"""

from tests import environment  # noqa: F401, I001 (before JAX is imported)

import pathlib

import jax
import jaxtyping
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
install_import_hook("jmat", "beartype.beartype")  # before jmat is imported

import jmat  # noqa: E402
from jmat.data.examples import load_examples  # noqa: E402

_REFERENCE = pathlib.Path(__file__).parent / "data" / "reference"


@pytest.fixture(autouse=True, scope="module")
def fresh_memory():
    """Compiled programs of one file are of little use to the next, and there are
    gigabytes of them.
    """
    yield
    jax.clear_caches()


@pytest.fixture
def unchecked():
    """Users have no annotations that are checked at every call: those of the tests are
    left out.
    """
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


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
