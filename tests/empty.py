"""A model without weights, for functions that only look at its config."""

import dataclasses

import jax
from flax import nnx

from jmat.models import build, read_config
from jmat.models.family import Transformer
from tests.test_reference import REFERENCE


def empty_model(**fields: int) -> Transformer:
    """Returns GPT-2's small reference model with other fields of its config, and shapes
    in place of its weights.
    """
    config = dataclasses.replace(read_config(REFERENCE / "gpt2"), **fields)
    return jax.eval_shape(lambda: build(config, nnx.Rngs(0)))
