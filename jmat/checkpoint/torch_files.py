"""Reads what `torch.save` and `pickle.dump` wrote of tensors, without PyTorch, and
without running anything in the file.

`torch.save` writes a zip: a pickle `NAME/data.pkl`, and the bytes of each storage in a
member `NAME/data/KEY`, as they are. Before PyTorch 1.6 it wrote several pickles one
after another, and the bytes behind them; a tensor in a plain pickle still has such a
file inside.
"""

import functools
import io
import pathlib
import struct
import zipfile
import zlib
from collections.abc import Mapping

import numpy as np
from numpy import ndarray

from jmat.checkpoint.pickles import PickleError, Value, read_pickle
from jmat.checkpoint.stored_tensors import (
    STORAGES,
    Budget,
    NumpyArray,
    Storage,
    Tensor,
    is_size,
    plain_names,
)
from jmat.runtime.errors import in_one_line, shortened_name

_MAGIC = 0x1950A86A20F9469CFC6C  # the first value of a file from before PyTorch 1.6
_PROTOCOL = 1001
_MOST_PLAIN = 1 << 31  # bytes of a plain pickle: a map of width 16,384 in float64
_MOST_PICKLE = 1 << 25  # bytes of the pickle in a zip: it holds no values of tensors
_MOST_DIRECTORY = 1 << 20  # bytes of the list of a zip's members
_END, _END64, _LOCAL = b"PK\5\6", b"PK\6\7", b"PK\3\4"
_LOCAL_SIZE = 30
# What the package raises for a damaged list of members.
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    NotImplementedError,
    ValueError,
    EOFError,
    OverflowError,
    struct.error,
    OSError,
)
_ENCRYPTED = 1  # bit of a member's flags
_LFS_POINTER = b"version https://git-lfs"


def read_torch(path: pathlib.Path) -> Value:
    """Returns what a file of `torch.save` or `pickle.dump` holds, with a `Tensor` for
    each tensor of floating-point numbers, and a `NumpyArray` for each array.

    Values are read when they are asked for.

    Raises:
      ValueError: a damaged file; one that holds anything but plain values and tensors;
        sizes that do not fit the file.
      OSError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            first = file.read(len(_LFS_POINTER))
        if first == _LFS_POINTER:
            raise PickleError("is a Git LFS pointer, not the file itself: run `git lfs pull`")
        if first.startswith(_LOCAL):
            return _read_zip(path)
        if path.stat().st_size > _MOST_PLAIN:
            raise PickleError(f"is no zip, and has more than {_MOST_PLAIN} bytes")
        return _read_plain(path.read_bytes())
    except PickleError as error:
        raise ValueError(f"{path} {error}; nothing of it was run.") from None


def tensor_values(value: Value, path: pathlib.Path) -> ndarray | None:
    """Returns the values of a tensor or an array in float32; None for something else.

    Raises ValueError where the values are damaged.
    """
    tensor = value.tensor if isinstance(value, NumpyArray) else value
    if not isinstance(tensor, Tensor):
        return None
    try:
        return tensor.values()
    except PickleError as error:
        raise ValueError(f"{path} {error}; nothing of it was run.") from None


# --- zips -----------------------------------------------------------------------------------------


class _Member:
    """Holds the bytes of a zip's member, which are compared with its checksum when they
    are first read.
    """

    def __init__(self, name: str, content: memoryview, checksum: int):
        self.name, self.content, self.checksum = name, content, checksum
        self.checked = False

    def read(self) -> memoryview:
        """Returns the bytes. Raises PickleError where the checksum is another."""
        if not self.checked and zlib.crc32(self.content) != self.checksum:
            raise PickleError(f"is damaged: {self.name} does not have its checksum")
        self.checked = True
        return self.content


def _read_zip(path: pathlib.Path) -> Value:
    content = np.memmap(path, np.uint8, "r").data
    members = _members(path, content)
    pickles = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise PickleError("is a zip without data.pkl, so torch.save did not write it")
    main, root = members[pickles[0]], pickles[0].removesuffix("data.pkl")
    if len(main.content) > _MOST_PICKLE:
        raise PickleError("holds a pickle of more bytes than any file of maps needs")
    order = members.get(f"{root}byteorder")
    if order is not None and bytes(order.content[:8]) != b"little":
        raise PickleError("was written by a machine of another byte order")

    def storage(identity: Value) -> Storage:
        dtype, key, count = _identity(identity)
        part = members.get(f"{root}data/{key}")
        if part is None:
            raise PickleError(f"lacks the member data/{key}")
        made = Storage(dtype, count, part.read)
        if made.nbytes != len(part.content):
            raise PickleError(
                f"announces {made.nbytes} bytes of data/{key}, and has {len(part.content)}"
            )
        return made

    names = plain_names(Budget(len(content))) | STORAGES
    return read_pickle(io.BytesIO(main.read()), names, storage)


def _identity(identity: Value) -> tuple[np.dtype, str, int]:
    """Returns dtype, key and size of a storage from its persistent id."""
    if isinstance(identity, tuple) and len(identity) >= 5:
        word, dtype, key, _, count, *rest = identity
        if (
            word == "storage"
            and isinstance(dtype, np.dtype)
            and isinstance(key, str)
            and len(key) < 100
            and is_size(count)
            and not any(rest)
        ):
            return dtype, key, count
    raise PickleError("refers to something else than a storage of floating-point numbers")


def _members(path: pathlib.Path, content: memoryview) -> dict[str, _Member]:
    """Returns the members of a zip, all of which are stored as they are.

    Compressed ones could take a thousand times their size in memory.
    """
    _check_directory(content)
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except _ZIP_ERRORS as error:
        raise PickleError(f"is a damaged or truncated zip ({in_one_line(error)})") from None
    members = {}
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise PickleError(f"has a compressed member {shortened_name(entry.filename)}")
        if entry.flag_bits & _ENCRYPTED:
            raise PickleError(f"has an encrypted member {shortened_name(entry.filename)}")
        if entry.filename in members:
            raise PickleError(f"has two members {shortened_name(entry.filename)}")
        start = _start(content, entry.header_offset)
        if start + entry.file_size > len(content):
            raise PickleError(f"is truncated: {shortened_name(entry.filename)} ends behind it")
        part = content[start : start + entry.file_size]
        members[entry.filename] = _Member(shortened_name(entry.filename), part, entry.CRC)
    if sum(len(member.content) for member in members.values()) > len(content):
        raise PickleError("is a zip whose members overlap")
    return members


def _start(content: memoryview, header: int) -> int:
    """Returns where the bytes of a member begin whose header is at a place."""
    local = bytes(content[header : header + _LOCAL_SIZE]) if header >= 0 else b""
    if len(local) < _LOCAL_SIZE or not local.startswith(_LOCAL):
        raise PickleError("is a damaged or truncated zip")
    name, extra = struct.unpack_from("<HH", local, 26)
    return header + _LOCAL_SIZE + name + extra


def _check_directory(content: memoryview) -> None:
    """Raises PickleError for a list of members that takes too much memory to read."""
    tail = bytes(content[-(1 << 16) - 42 :])
    if (at := tail.rfind(_END)) < 0 or len(tail) - at < 22:
        raise PickleError("is a damaged or truncated zip")
    (size,) = struct.unpack_from("<L", tail, at + 12)
    if at >= 20 and tail[at - 20 :].startswith(_END64):
        (place,) = struct.unpack_from("<Q", tail, at - 12)
        record = bytes(content[place : place + 56]) if place < len(content) else b""
        size = struct.unpack_from("<Q", record, 40)[0] if len(record) == 56 else size
    if size > _MOST_DIRECTORY:
        raise PickleError("is a zip of more members than any file of maps has")


# --- plain pickles, and files from before PyTorch 1.6 ---------------------------------------------


def _read_plain(content: bytes) -> Value:
    budget = Budget(len(content))
    names = plain_names(budget) | {"torch.storage._load_from_bytes": _storage_in}
    if _is_old(content):
        return _read_old(content, names | STORAGES)
    return read_pickle(io.BytesIO(content), names)


def _storage_in(content: Value = None) -> Storage:
    """Returns the storage that a plain pickle holds as a file from before PyTorch 1.6."""
    made = _read_old(content, STORAGES) if isinstance(content, bytes) else None
    if not isinstance(made, Storage):
        raise PickleError("holds something else than numbers in a storage")
    return made


def _is_old(content: bytes) -> bool:
    try:
        return read_pickle(io.BytesIO(content), {}) == _MAGIC
    except PickleError:
        return False


def _read_old(content: bytes, names: Mapping[str, Value]) -> Value:
    """Returns what a file from before PyTorch 1.6 holds: numbers that say what it is,
    the content, the keys of its storages, and for each its size and bytes.
    """
    file, view = io.BytesIO(content), memoryview(content)
    storages: dict[str, Storage] = {}

    def storage(identity: Value) -> Storage:
        dtype, key, count = _identity(identity)
        made = storages.setdefault(key, Storage(dtype, count, None))
        if (made.dtype, made.count) != (dtype, count):
            raise PickleError("describes a storage in two ways")
        return made

    if [read_pickle(file, {}) for _ in range(2)] != [_MAGIC, _PROTOCOL]:
        raise PickleError("is no file of torch.save")
    about = read_pickle(file, {})
    if not isinstance(about, dict) or about.get("little_endian") is not True:
        raise PickleError("was written by a machine of another byte order")
    made = read_pickle(file, names, storage)
    keys = read_pickle(file, {})
    if not isinstance(keys, list):
        raise PickleError("is a damaged file of torch.save")
    place = file.tell()
    for key in keys:
        part = storages.get(key) if isinstance(key, str) else None
        if part is None or int.from_bytes(view[place : place + 8], "little") != part.count:
            raise PickleError("is a damaged file of torch.save")
        start, place = place + 8, place + 8 + part.nbytes
        if place > len(view):
            raise PickleError("is truncated")
        part.read = functools.partial(_piece, view, start, place)
    return made


def _piece(view: memoryview, start: int, stop: int) -> memoryview:
    return view[start:stop]
