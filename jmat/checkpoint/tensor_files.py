"""The weight files of a Hugging Face folder, read one tensor at a time; nothing in them
is ever executed.

Nothing stays mapped and each tensor is read into memory that JAX can take over as it
is, so that loading a model needs little more memory than the model.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping

import ml_dtypes
import numpy as np
import safetensors
from jax.typing import DTypeLike

from jmat.runtime.annotations import JsonObject, TorchTensor
from jmat.runtime.errors import in_one_line
from jmat.runtime.json_files import read_json_object

# The dtypes that hold weights, as safetensors calls them.
FLOATS: dict[str, DTypeLike] = {
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
}
_ALL = slice(None)
_LFS_POINTER = b"version https://git-lfs"


@dataclasses.dataclass(frozen=True)
class TensorFiles:
    """Holds the tensors of a folder: shape and dtype by name, and how to read one.

    `read(name, rows)` returns an array that is the caller's own, of a tensor whose
    dtype is among `FLOATS`: all of it, or some rows of its first axis.
    """

    folder: pathlib.Path
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    read: Callable[..., np.ndarray]

    def equal(self, a: str, b: str, *, rows: int = 4096) -> bool:
        """Returns whether two tensors of at least one axis hold the same weights,
        without reading either whole.
        """
        if (
            not self.shapes[a]
            or self.shapes[a] != self.shapes[b]
            or not {self.dtypes[a], self.dtypes[b]} <= FLOATS.keys()
        ):
            return False
        pieces = (slice(i, i + rows) for i in range(0, self.shapes[a][0], rows))
        return all(np.array_equal(self.read(a, piece), self.read(b, piece)) for piece in pieces)


@contextlib.contextmanager
def open_weights(folder: pathlib.Path) -> Iterator[TensorFiles]:
    """Opens a folder's weights: safetensors if there are any, else a PyTorch pickle
    through torch, weights only.

    Raises:
      FileNotFoundError: there are no weights, or a shard is missing.
      ValueError: a file is truncated or corrupt, holds anything but tensors, or is a
        pickle and torch is not installed.
    """
    for stem, suffix, reader in (
        ("model", ".safetensors", _safetensors),
        ("pytorch_model", ".bin", _pickle),
    ):
        single, index = folder / (stem + suffix), folder / f"{stem}{suffix}.index.json"
        if single.is_file():
            yield reader(folder, [single])
            return
        if index.is_file():
            yield reader(folder, _shards(folder, index))
            return
    raise FileNotFoundError(
        f"{folder} holds no weights; expected model.safetensors, or model.safetensors.index.json "
        "with its shards, or pytorch_model.bin."
    )


def _shards(folder: pathlib.Path, index: pathlib.Path) -> list[pathlib.Path]:
    try:
        names = sorted({str(name) for name in read_json_object(index)["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{index} is not a shard index ({in_one_line(error)}); download it again."
        ) from None
    outside = [name for name in names if pathlib.PurePath(name).name != name or name in ("", "..")]
    if outside:
        raise ValueError(f"{index} names {outside[0]!r}, which is outside its folder.")
    # also of a name too long for one
    missing = [name for name in names if not os.path.isfile(folder / name)]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {len(missing)} of {len(names)} shards: {', '.join(missing[:5])}."
        )
    return [folder / name for name in names]


def _refuse_twice(name: str, path: pathlib.Path, where: Mapping[str, pathlib.Path]) -> None:
    if name in where:
        raise ValueError(
            f"{name} is stored twice, in {where[name].name} and in {path.name}, in {path.parent}."
        )


# --- safetensors ----------------------------------------------------------------------------------


def _safetensors(folder: pathlib.Path, paths: list[pathlib.Path]) -> TensorFiles:
    where: dict[str, pathlib.Path] = {}
    first_byte: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for path in paths:
        header, start = _header(path)
        for name, about in header.items():
            _refuse_twice(name, path, where)
            where[name], first_byte[name] = path, start + about["data_offsets"][0]
            shapes[name], dtypes[name] = tuple(about["shape"]), about["dtype"]

    def read(name: str, rows: slice = _ALL) -> np.ndarray:
        shape, dtype = shapes[name], np.dtype(FLOATS[dtypes[name]])
        skipped = 0
        if shape:
            first, last, _ = rows.indices(shape[0])
            skipped, shape = first * math.prod(shape[1:]), (last - first, *shape[1:])
        buffer = _aligned(math.prod(shape) * dtype.itemsize)
        with where[name].open("rb") as file:
            file.seek(first_byte[name] + skipped * dtype.itemsize)
            file.readinto(buffer.data)
        return buffer.view(dtype).reshape(shape)

    return TensorFiles(folder, shapes, dtypes, read)


def _header(path: pathlib.Path) -> tuple[JsonObject, int]:
    """Returns the header of a file, and where the bytes of its tensors begin.
    `safe_open` checks that both agree.
    """
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass
    except safetensors.SafetensorError as error:
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise ValueError(
                    f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` there."
                ) from None
        raise ValueError(
            f"{path} is truncated or not a safetensors file ({in_one_line(error)}); download it "
            "again."
        ) from None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def _aligned(size: int) -> np.ndarray:
    """Returns bytes at an address that is a multiple of 64: JAX takes such an array on
    a CPU over instead of copying it.
    """
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size]


# --- PyTorch pickles ------------------------------------------------------------------------------

# How much of a mapped file may be read before it is mapped anew, which lets go of the pages read so
# far.
_MAPPED_BYTES = 1 << 26


def _pickle(folder: pathlib.Path, paths: list[pathlib.Path]) -> TensorFiles:
    try:
        import torch
    except ImportError:
        raise ValueError(
            f"{paths[0]} is a PyTorch pickle, which only torch can read safely; install torch, or, "
            "where torch is, AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder) "
            "writes model.safetensors."
        ) from None
    where: dict[str, pathlib.Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    names = {
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float32: "F32",
        torch.float64: "F64",
    }
    opened = {}
    for path in paths:
        opened[path] = _load_pickle(path)
        for name, tensor in opened[path].items():
            _refuse_twice(name, path, where)
            where[name], shapes[name] = path, tuple(tensor.shape)
            dtypes[name] = names.get(tensor.dtype, str(tensor.dtype))
    touched = 0

    def read(name: str, rows: slice = _ALL) -> np.ndarray:
        nonlocal touched
        path = where[name]
        if touched > _MAPPED_BYTES:
            touched = 0
            for other in [path for path in opened if zipfile.is_zipfile(path)]:
                del opened[other]
        if path not in opened:
            opened[path] = _load_pickle(path)
        tensor = opened[path][name].detach()
        tensor = (tensor[rows] if tensor.ndim else tensor).clone(
            memory_format=torch.contiguous_format
        )
        touched += tensor.nbytes
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    return TensorFiles(folder, shapes, dtypes, read)


def _load_pickle(path: pathlib.Path) -> dict[str, TorchTensor]:
    """Reads the tensors of one file. Today's format, a zip, is mapped and not read; the
    old one is read whole.
    """
    import torch

    _refuse_compressed(path)
    try:
        with warnings.catch_warnings(action="ignore"):
            tensors = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    except Exception as error:
        raise ValueError(
            f"{path} is corrupt or holds more than tensors ({type(error).__name__}): it was not "
            "loaded, and no code of it was run; ask its author for safetensors."
        ) from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str)
        and isinstance(value, torch.Tensor)
        # not sparse, and it has values
        and (value.layout, value.device.type) == (torch.strided, "cpu")
        for name, value in tensors.items()
    ):
        raise ValueError(f"{path} is not a table of named dense tensors; it was not loaded.")
    for name, tensor in tensors.items():
        # one number, say, that stands for a thousand
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            shape, size = tuple(tensor.shape), tensor.untyped_storage().nbytes()
            raise ValueError(
                f"{name} in {path} announces the shape {shape}, and holds {size} bytes; it was not "
                "loaded."
            )
    return tensors


def _refuse_compressed(path: pathlib.Path) -> None:
    """Raises ValueError for a zip that torch did not write: its parts are stored as
    they are, so that they are mapped.

    A compressed one could take a thousand times its size in memory.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            compressed = [
                part.filename
                for part in archive.infolist()
                if part.compress_type != zipfile.ZIP_STORED
            ]
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError):
        return  # the old format; or damaged, as torch will say
    if compressed:
        raise ValueError(
            f"{path} is corrupt or holds more than tensors ({compressed[0]} is compressed): not "
            "loaded."
        )
