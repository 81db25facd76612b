"""Writes files that `torch.load(weights_only=True)` reads, without PyTorch: the zip
that `torch.save` writes.
"""

import pathlib
import struct
import zipfile

import numpy as np
from numpy import ndarray

from jmat.checkpoint.stored_tensors import DTYPES

_ALIGNED = 64  # bytes: PyTorch maps members that begin at multiples of these
_LOCAL_SIZE = 30
_PADDING = 0x4246  # the header of the padding that PyTorch writes
_DATE = (1980, 1, 1, 0, 0, 0)  # the first that there is: equal content, equal files
_PUT_TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"

# `Plain` values that the file can hold, in dicts and lists.
Plain = None | bool | int | float | str | ndarray | list["Plain"] | dict[str | int, "Plain"]


def write_torch(path: pathlib.Path, content: Plain, *, root: str = "archive") -> None:
    """Writes a file; arrays become tensors.

    Args:
      path: of the file.
      content: numbers, text, arrays of floating-point numbers, and lists and dicts of
        them. Keys are text or whole numbers.
      root: name of the folder in the zip.

    Raises:
      ValueError: an array of another dtype.
    """
    storages: list[ndarray] = []
    pickle = b"\x80\x02" + _pickled(content, storages) + b"."
    members: dict[str, bytes | memoryview] = {"data.pkl": pickle, "byteorder": b"little"}
    for key, values in enumerate(storages):
        members[f"data/{key}"] = values.reshape(-1).view(np.uint8).data
    members["version"] = b"3\n"
    with path.open("wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, part in members.items():
            archive.writestr(_entry(f"{root}/{name}", file.tell()), part)


def _entry(name: str, place: int) -> zipfile.ZipInfo:
    """Returns the header of a member at a place of the file, padded so that the bytes
    behind it are aligned.
    """
    entry = zipfile.ZipInfo(name, _DATE)
    start = place + _LOCAL_SIZE + len(name.encode()) + 4
    padding = -start % _ALIGNED
    entry.extra = struct.pack("<HH", _PADDING, padding) + b"Z" * padding
    return entry


def _pickled(value: Plain, storages: list[ndarray]) -> bytes:
    """Returns the instructions that make a value; the storages of its arrays are added
    to `storages`.
    """
    if isinstance(value, bool) or value is None:
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        size = value.bit_length() // 8 + 1
        return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        text = value.encode()
        return b"X" + struct.pack("<I", len(text)) + text
    if isinstance(value, list):
        return b"](" + b"".join(_pickled(each, storages) for each in value) + b"e"
    if isinstance(value, ndarray):
        return _tensor(np.ascontiguousarray(value), storages)
    pairs = (part for pair in value.items() for part in pair)
    return b"}(" + b"".join(_pickled(part, storages) for part in pairs) + b"u"


def _tensor(values: ndarray, storages: list[ndarray]) -> bytes:
    name = next((name for name, dtype in DTYPES.items() if dtype == values.dtype), None)
    if name is None:
        raise ValueError(f"a file of torch.save cannot hold an array of {values.dtype}.")
    strides = [step // values.itemsize for step in values.strides]
    key, count = _pickled(str(len(storages)), []), _pickled(values.size, [])
    storages.append(values)
    storage = b"(" + _pickled("storage", []) + f"ctorch\n{name}Storage\n".encode()
    storage += key + _pickled("cpu", []) + count + b"tQ"
    shape = b"(" + b"".join(_pickled(n, []) for n in values.shape) + b"t"
    steps = b"(" + b"".join(_pickled(n, []) for n in strides) + b"t"
    hooks = b"ccollections\nOrderedDict\n)R"
    return _PUT_TENSOR + b"(" + storage + _pickled(0, []) + shape + steps + b"\x89" + hooks + b"tR"
