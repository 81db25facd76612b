"""Maps that other people keep as one pickle each: the shortcuts of Din et al. 2023
(sashay/linear-shortcut) and the stand-ins for attention of NBL (LIONS-EPFL/NBL).

Both apply a matrix from the left to columns, so that it is transposed here.
"""

import pathlib
import re

import jax.numpy as jnp

from jmat.checkpoint.pickles import Value
from jmat.checkpoint.torch_files import read_torch
from jmat.maps.compact import Map
from jmat.maps.files import MapsInfo
from jmat.maps.lens_files import square, vector
from jmat.maps.types import Identity, Linear
from jmat.models.family import Transformer

# `3_12.pickle` leads from layer 3 to layer 12; NBL's file stands in for the attention of a block.
_SHORTCUT = re.compile(r"(\d{1,4})_(\d{1,4})\.(?:pickle|pkl)")
_NBL = re.compile(r"xlayer_(\d{1,4})_weights\.(?:pickle|pkl)")


def is_pickled_map(name: str) -> bool:
    """Returns whether a file's name is one of a pickled map."""
    return bool(_SHORTCUT.fullmatch(name) or _NBL.fullmatch(name))


def read_pickled_maps(
    paths: list[pathlib.Path], model: Transformer | None
) -> tuple[dict[str, Map], MapsInfo]:
    """Returns the maps of some pickles, `mat.{i}.{j}` of shortcuts, `affine.{i}.{j}` of
    those with an intercept, and `attn.{i}` of NBL's.

    NBL's maps read the stream in front of the norm. So `ln_1.{i}` comes with each, the
    identity, which stands in for that norm.

    Raises:
      ValueError: a name that says no layers, layers or a width that the model does not
        have, two files of one map, a damaged file.
    """
    maps: dict[str, Map] = {}
    for path in sorted(paths, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)]):
        if match := _SHORTCUT.fullmatch(path.name):
            read = _shortcut(path, int(match[1]), int(match[2]), model)
        elif match := _NBL.fullmatch(path.name):
            read = _attention(path, int(match[1]), model)
        else:
            raise ValueError(
                f"the name of {path} does not say between which layers its map leads; expected "
                "one such as 3_12.pickle, or xlayer_3_weights.pkl of NBL."
            )
        if twice := sorted(maps.keys() & read.keys()):
            raise ValueError(
                f"{path} and another file beside it hold the map {twice[0]!r}: keep one of them, "
                "or name one file."
            )
        maps |= read
    return maps, MapsInfo("" if model is None else model.name)


def _shortcut(path: pathlib.Path, i: int, j: int, model: Transformer | None) -> dict[str, Map]:
    if not i < j or (model is not None and j > model.config.layers):
        last = "" if model is None else f" among 0 .. {model.config.layers}"
        raise ValueError(f"{path} leads from layer {i} to {j}; expected a later layer{last}.")
    content = read_torch(path)
    if isinstance(content, list):
        return {f"affine.{i}.{j}": _pair(path, content, model)}
    return {f"mat.{i}.{j}": Linear(jnp.asarray(square(content, path, "the map", _width(model)).T))}


def _attention(path: pathlib.Path, i: int, model: Transformer | None) -> dict[str, Map]:
    if model is not None:
        config = model.config
        if i >= config.layers:
            raise ValueError(
                f"{path} is for block {i}; this model has the blocks 0 .. {config.layers - 1}."
            )
        if not config.pre_norm or config.residual_from_norm:
            raise ValueError(
                f"{path} stands in for attention and the norm before it; this model has no norm "
                "there that only attention reads."
            )
    return {f"ln_1.{i}": Identity(), f"attn.{i}": _pair(path, read_torch(path), model)}


def _pair(path: pathlib.Path, content: Value, model: Transformer | None) -> Linear:
    """Returns the map of a list [W, bias]."""
    if not isinstance(content, list) or len(content) != 2:
        raise ValueError(f"{path} holds a {type(content).__name__}; expected a list of W and b.")
    W = square(content[0], path, "W", _width(model))
    bias = vector(content[1], path, "b", len(W))
    return Linear(jnp.asarray(W.T), jnp.asarray(bias))


def _width(model: Transformer | None) -> int | None:
    return None if model is None else model.config.width
