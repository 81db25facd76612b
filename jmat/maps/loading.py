"""Recognises files of maps by what they hold, those of other libraries too, and reads
them.
"""

import pathlib

from jmat.checkpoint import parameters
from jmat.checkpoint.torch_files import read_torch
from jmat.maps.compact import Map
from jmat.maps.files import MAPS_FILES, MapsInfo, check_width, read_maps
from jmat.maps.lens_files import CONFIG, LENS_FILE, PARAMS, read_jacobian_lens, read_tuned_lens
from jmat.maps.pickled_maps import is_pickled_map, read_pickled_maps
from jmat.models.family import Transformer
from jmat.runtime.digests import model_hash
from jmat.runtime.errors import readable_errors


@readable_errors()
def read_any(path: pathlib.Path, model: Transformer | None) -> tuple[dict[str, Map], MapsInfo]:
    """Returns the maps of a folder or file, ours or another library's.

    Args:
      path: of the folder or file.
      model: what they are meant for.

    Raises:
      FileNotFoundError: there are no maps.
      ValueError: a damaged file, anything but maps, or maps of another model.
    """
    if path.name in MAPS_FILES and path.is_file():
        return _read_ours(path.parent, model)
    if path.is_file():
        return _read_file(path, model)
    names = sorted(each.name for each in path.iterdir()) if path.is_dir() else []
    if not set(names).isdisjoint(MAPS_FILES):
        for other in (LENS_FILE, PARAMS):
            if other in names:
                raise ValueError(
                    f"{path} holds two files of maps: name one of them, {path / MAPS_FILES[1]} or "
                    f"{path / other}."
                )
        return _read_ours(path, model)
    if PARAMS in names:
        return read_tuned_lens(path, model)
    if pickles := [path / name for name in names if is_pickled_map(name)]:
        return read_pickled_maps(pickles, model)
    lenses = [name for name in names if name.endswith(".pt")]
    if LENS_FILE in lenses or len(lenses) == 1:
        return _read_file(path / (LENS_FILE if LENS_FILE in lenses else lenses[0]), model)
    if lenses:
        raise ValueError(
            f"{path} holds {len(lenses)} .pt files: name one of them, {lenses[0]} say."
        )
    return _read_ours(path, model)


def _read_ours(folder: pathlib.Path, model: Transformer | None) -> tuple[dict[str, Map], MapsInfo]:
    weights = None if model is None else model_hash(parameters(model))
    maps, info = read_maps(folder, model_hash=weights)
    if model is not None and not info.model_hash:
        check_width(maps, folder, model.config.width)
    return maps, info


def _read_file(path: pathlib.Path, model: Transformer | None) -> tuple[dict[str, Map], MapsInfo]:
    """Returns the maps of one file of another library."""
    if path.name == PARAMS and (path.parent / CONFIG).is_file():
        return read_tuned_lens(path.parent, model)
    if is_pickled_map(path.name):
        return read_pickled_maps([path], model)
    content = read_torch(path)
    if isinstance(content, dict) and "J" in content:
        return read_jacobian_lens(path, content, model)
    raise ValueError(
        f"{path} holds no maps that jmat reads: expected a Jacobian lens, a folder with a tuned "
        f"lens, pickles such as 3_12.pickle, or {' and '.join(MAPS_FILES)}."
    )
