"""Saves maps for others to use, and loads theirs: `jmat.save_maps` and
`jmat.load_maps`.
"""

import pathlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jmat.checkpoint import parameters
from jmat.maps.compact import Map, is_quantised
from jmat.maps.files import MapsInfo, read_maps
from jmat.maps.files import save_maps as write_maps
from jmat.maps.forms import TYPE_NAMES, TYPES, fits, form_of, tensors_of
from jmat.models.family import Transformer, check_model
from jmat.runtime.checks import check_path, check_whole, whole
from jmat.runtime.digests import model_hash
from jmat.runtime.versions import package_version


class Maps(dict[str, Map]):
    """Holds maps by name, such as `mat.3.8` from layer 3 to layer 8.

    Attributes:
      info: which model and text they come from.
    """

    def __init__(self, maps: Mapping[str, Map], info: MapsInfo):
        super().__init__(maps)
        self.info = info


def save_maps(
    folder: str | pathlib.Path,
    maps: Mapping[str, Map],
    *,
    model: Transformer | None = None,
    info: MapsInfo | None = None,
    n: int = 0,
    corpus: str = "",
) -> None:
    """Writes maps into a folder (`maps.safetensors`, `maps.json`), whole or not at all.

    Args:
      folder: is made where it is missing.
      maps: by name: `mat.{i}.{j}` from layer i to layer j, `{part}.{block}` for a
        sub-module.
      model: the model that they were fitted on, whose weights loading compares.
      info: all that the files say of the maps, instead of `model`, `n` and `corpus`.
      n: number of tokens that they were fitted on; 0: not known.
      corpus: name of the text.

    Raises:
      ValueError: neither `model` nor `info` is given; there are no maps, or something
        else.
      OSError: the files cannot be written.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> import numpy as np
      >>> identity = jmat.Linear(np.eye(192, dtype=np.float32))
      >>> jmat.save_maps("my_maps", {"mat.3.8": identity}, model=model)
    """
    check_path("folder", folder)
    if not isinstance(maps, Mapping):
        raise ValueError(f"maps is {type(maps).__name__}; expected a dict from names to maps.")
    if unnamed := [name for name in maps if not isinstance(name, str) or not name.strip()]:
        raise ValueError(f"the name of a map is {unnamed[0]!r}; expected text such as 'mat.3.8'.")
    if wrong := [name for name, stand_in in maps.items() if not isinstance(stand_in, TYPES)]:
        raise ValueError(
            f"map {wrong[0]!r} is of type {type(maps[wrong[0]]).__name__}; expected {TYPE_NAMES}."
        )
    if not maps:
        raise ValueError("there are no maps to save.")
    for name, stand_in in maps.items():
        _check(name, stand_in)
    parts = [part for name, stand_in in maps.items() for part in tensors_of(name, stand_in)]
    if len(set(parts)) < len(parts):
        twice = next(part for part in parts if parts.count(part) > 1)
        raise ValueError(f"two maps have a part {twice!r}: give one of them another name.")
    if info is not None and not isinstance(info, MapsInfo):
        raise ValueError(
            f"info is of type {type(info).__name__}; expected a jmat.maps.files.MapsInfo."
        )
    if info is None:
        if model is None:
            raise ValueError("save_maps needs the model that the maps were fitted on: give model=.")
        check_model(model)
        n = whole("n", n)
        check_whole("n", n, 0)
        dtype = model.embed.tokens.table.dtype.name
        about = {"protocol": "", "seed": 0, "dtype": dtype, "jmat": package_version("jmat")}
        info = MapsInfo(
            model=model.name, model_hash=model_hash(parameters(model)), corpus=corpus, n=n, **about
        )
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_maps(folder, maps, info)


def _check(name: str, stand_in: Map) -> None:
    """Raises ValueError for a map that could not be read back."""
    for leaf in jax.tree.leaves(stand_in, is_leaf=is_quantised):
        if is_quantised(leaf):
            continue
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            got = f"a {type(leaf).__name__}" if dtype is None else f"an array of {dtype}"
            raise ValueError(
                f"map {name!r} holds {got}; expected arrays of floating-point numbers."
            )
        if not np.isfinite(np.asarray(leaf)).all():
            raise ValueError(f"map {name!r} holds NaN or infinity: fit it again.")
    form = form_of(stand_in)
    if not all(np.ndim(value) for value in jax.tree.leaves(stand_in)) or not fits(stand_in, form):
        shapes = ", ".join(
            f"{key} {np.shape(value)}" for key, value in vars(stand_in).items() if value is not None
        )
        raise ValueError(
            f"the parts of map {name!r} do not fit one another: {shapes}, for {form.apply!r}."
        )


def load_maps(folder: str | pathlib.Path, *, model: Transformer | None = None) -> Maps:
    """Reads the maps of a folder. Nothing in the files is ever executed.

    Args:
      folder: holds `maps.safetensors` and `maps.json`, as `save_maps` and the
        experiments write them.
      model: the model to use them with; maps of another model are refused.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a damaged file, maps of another model, or a pickle.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> import numpy as np
      >>> identity = jmat.Linear(np.eye(192, dtype=np.float32))
      >>> jmat.save_maps("my_maps", {"mat.3.8": identity}, model=model)
      >>> maps = jmat.load_maps("my_maps", model=model)
      >>> maps["mat.3.8"].W.shape, maps.info.model
      ((192, 192), 'gpt2-docs')
    """
    check_path("folder", folder)
    if model is not None:
        check_model(model)
    weights = None if model is None else model_hash(parameters(model))
    return Maps(*read_maps(folder, model_hash=weights))
