"""Affine maps from the layers to the last one, as matrices and biases for the files of
lenses.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from numpy import ndarray

from jmat.maps.compact import Diagonal, Hadamard, Hidden, LowRank, Map
from jmat.maps.forms import form_of, jump_of
from jmat.maps.types import Constant, Identity, Linear
from jmat.models.family import Transformer


def maps_to_last(
    maps: Mapping[str, Map], model: Transformer, form: str
) -> dict[int, tuple[str, Float[ndarray, "D D"], Float[ndarray, " D"] | None]]:
    """Returns name, W and bias of each map by its source layer. Raises ValueError for a
    map that a lens cannot hold.
    """
    D, L = model.config.width, model.config.layers
    by_layer: dict[int, tuple[str, ndarray, ndarray | None]] = {}
    for name, stand_in in maps.items():
        jump = jump_of(name)
        if jump is None or not jump[1] < jump[2] == L:
            raise ValueError(
                f"map {name!r} does not lead to layer {L}, the last, by a name such as "
                f"'mat.0.{L}', as the maps of format={form!r} do: leave it out."
            )
        source = jump[1]
        if source in by_layer:
            raise ValueError(
                f"maps {by_layer[source][0]!r} and {name!r} lead from one layer, and "
                f"format={form!r} has one map for each: leave one out."
            )
        if isinstance(stand_in, Hidden):
            raise ValueError(
                f"map {name!r} has a hidden layer, and format={form!r} holds affine maps only."
            )
        shape = form_of(stand_in).shape
        if shape != (D,) * len(shape):
            raise ValueError(f"map {name!r} is {list(shape)}; this model needs {[D, D]}.")
        by_layer[source] = (name, *_affine(stand_in, D))
    return by_layer


def _affine(
    stand_in: Identity | Constant | Linear | LowRank | Diagonal | Hadamard, D: int
) -> tuple[ndarray, ndarray | None]:
    """Returns W and bias of an affine map from D coordinates to D, float32."""
    if isinstance(stand_in, Identity):
        return np.eye(D, dtype=np.float32), None
    if isinstance(stand_in, Constant):
        return np.zeros((D, D), np.float32), np.asarray(stand_in.value, np.float32)
    bias = None if stand_in.bias is None else np.asarray(stand_in.bias, np.float32)
    if isinstance(stand_in, Linear):
        return np.asarray(stand_in.W.astype(jnp.float32)), bias
    # Without the bias: W as a difference would lose the digits that a large bias takes.
    with jax.default_matmul_precision("highest"):
        return np.asarray(dataclasses.replace(stand_in, bias=None)(jnp.eye(D))), bias
