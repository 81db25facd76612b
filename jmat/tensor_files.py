"""The weight files of a Hugging Face folder, read one tensor at a time; nothing in them is ever executed."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors


@dataclasses.dataclass(frozen=True)
class TensorFiles:
    """The tensors of a folder: their shapes by name, and a way to read one."""

    folder: pathlib.Path
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]


@contextlib.contextmanager
def open_weights(folder: pathlib.Path) -> Iterator[TensorFiles]:
    """Opens a folder's weights: safetensors if there are any, else a PyTorch pickle through torch, weights only.

    Raises:
      FileNotFoundError: there are no weights, or a shard is missing.
      ValueError: a file is truncated or corrupt, holds anything but tensors, or is a pickle and torch is not installed.
    """
    for stem, suffix, reader in (("model", ".safetensors", _safetensors), ("pytorch_model", ".bin", _pickle)):
        single, index = folder / (stem + suffix), folder / f"{stem}{suffix}.index.json"
        if single.is_file():
            yield reader(folder, [single])
            return
        if index.is_file():
            yield reader(folder, _shards(folder, index))
            return
    raise FileNotFoundError(
        f"{folder} holds no weights; expected model.safetensors, or model.safetensors.index.json with its shards, or "
        "pytorch_model.bin."
    )


def _shards(folder: pathlib.Path, index: pathlib.Path) -> list[pathlib.Path]:
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not a shard index ({error!r}); download it again.") from None
    outside = [name for name in names if pathlib.Path(name).name != name]
    if outside:
        raise ValueError(f"{index} names {outside[0]!r}, which is outside its folder.")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {len(missing)} of {len(names)} shards: {', '.join(missing[:5])}.")
    return [folder / name for name in names]


def _safetensors(folder: pathlib.Path, paths: list[pathlib.Path]) -> TensorFiles:
    shapes: dict[str, tuple[int, ...]] = {}
    where: dict[str, pathlib.Path] = {}
    for path in paths:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                shapes[name] = tuple(file.get_slice(name).get_shape())
                where[name] = path

    def read(name: str) -> np.ndarray:
        # Opened anew for each tensor: closing unmaps the file, else its pages would count as ours.
        with _opened(where[name]) as file:
            return file.get_tensor(name)

    return TensorFiles(folder, shapes, read)


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[Any]:
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is truncated or not a safetensors file ({error}); download it again.") from None


def _pickle(folder: pathlib.Path, paths: list[pathlib.Path]) -> TensorFiles:
    try:
        import torch
    except ImportError:
        raise ValueError(
            f"{paths[0]} is a PyTorch pickle, which only torch can read safely; install torch, or convert the model where "
            "torch is: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder) writes model.safetensors."
        ) from None
    tensors: dict[str, Any] = {}
    for path in paths:
        try:
            part = torch.load(
                path, map_location="cpu", weights_only=True, mmap=torch.serialization._is_zipfile(path.open("rb"))
            )
        except Exception as error:
            raise ValueError(
                f"{path} is corrupt or holds something else than tensors; it was not loaded "
                f"({str(error).splitlines()[0]})."
            ) from None
        if not isinstance(part, dict) or not all(isinstance(value, torch.Tensor) for value in part.values()):
            raise ValueError(f"{path} is not a table of named tensors; it was not loaded.")
        tensors |= part

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        if tensor.dtype == torch.bfloat16:
            return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    return TensorFiles(folder, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, read)
