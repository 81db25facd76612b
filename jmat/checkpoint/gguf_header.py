"""Reads the header of a GGUF file (llama.cpp): its metadata, and the place of each
tensor.

Every length that the file announces is held against the bytes that are there before
anything is read or counted. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import dataclasses
import math
import mmap
import pathlib
import struct
from collections.abc import Mapping
from typing import Any

from jmat.runtime.annotations import Fields, JsonObject

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MOST_AXES = 4
_KEPT_VALUES = 1024  # of an array; longer ones belong to the tokenizer


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """Holds the place of one tensor in a GGUF file.

    Attributes:
      shape: in numpy's order, the fastest axis last.
      kind: number of its type, `gguf.GGMLQuantizationType`.
      start: its first byte in the file.
      size: bytes.
    """

    shape: tuple[int, ...]
    kind: int
    start: int
    size: int


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """Holds the metadata of a GGUF file and its tensors, by name.

    An array of text, or of more than 1,024 numbers, is only described in words.
    """

    metadata: Fields
    tensors: Mapping[str, GgufTensor]


def read_header(path: pathlib.Path, block_sizes: Mapping[int, tuple[int, int]]) -> GgufHeader:
    """Reads a header, without the tensors.

    Args:
      path: of the file.
      block_sizes: for each type of tensor, how many elements a block of it has, and how
        many bytes.

    Raises:
      ValueError: it is no GGUF file of version 2 or 3, it announces more than it holds,
        or names something twice.
    """
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _parse(_Cursor(content), block_sizes)


class _Cursor:
    """Reads values one after another, and keeps the place of the next one."""

    def __init__(self, content: mmap.mmap):
        self.content, self.place = content, len(_MAGIC)

    def take(self, size: int) -> int:
        """Returns where `size` bytes begin, and moves past them."""
        start = self.place
        if size > len(self.content) - start:
            raise ValueError(
                f"it ends after {len(self.content)} bytes, and announces {size} more at byte "
                f"{start}"
            )
        self.place += size
        return start

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        start = self.take(count * struct.calcsize(f"<{code}"))
        return struct.unpack_from(layout, self.content, start)

    def number(self, code: str) -> Any:
        return self.numbers(code)[0]

    def text(self) -> str:
        size = self.number("Q")
        start = self.take(size)
        try:
            return self.content[start : start + size].decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"its text at byte {start} is not UTF-8") from None

    def value(self, kind: int) -> object:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array(*self.numbers("I"), *self.numbers("Q"))
        raise ValueError(f"it holds a value of the unknown type {kind}")

    def array(self, kind: int, count: int) -> object:
        if kind in _SCALARS:
            size = struct.calcsize(f"<{_SCALARS[kind]}")
            if count <= _KEPT_VALUES:
                return list(self.numbers(_SCALARS[kind], count))
            self.take(count * size)
        elif kind == _STRING:
            for _ in range(count):  # ends where the file does: each takes 8 bytes at least
                self.take(self.number("Q"))
        else:
            raise ValueError(f"it holds an array of values of type {kind}")
        return f"an array of {count} values"


def _parse(cursor: _Cursor, block_sizes: Mapping[int, tuple[int, int]]) -> GgufHeader:
    version = cursor.number("I")
    if version not in _VERSIONS:
        big_endian = version & 0xFFFF == 0
        raise ValueError(
            "it is big-endian" if big_endian else f"it is of version {version}, not 2 or 3"
        )
    tensor_count, metadata_count = cursor.numbers("Q", 2)
    metadata: JsonObject = {}
    for _ in range(metadata_count):
        name = cursor.text()
        if name in metadata:
            raise ValueError(f"it holds {name} twice")
        metadata[name] = cursor.value(cursor.number("I"))
    announced: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensor_count):
        name, axes = cursor.text(), cursor.number("I")
        if axes > _MOST_AXES:
            raise ValueError(f"its tensor {name} has {axes} axes")
        if name in announced:
            raise ValueError(f"it holds the tensor {name} twice")
        announced[name] = (cursor.numbers("Q", axes)[::-1], cursor.number("I"), cursor.number("Q"))
    return GgufHeader(metadata, _placed(announced, metadata, cursor, block_sizes))


def _placed(
    announced: Mapping[str, tuple[tuple[int, ...], int, int]],
    metadata: Fields,
    cursor: _Cursor,
    block_sizes: Mapping[int, tuple[int, int]],
) -> dict[str, GgufTensor]:
    """Returns where the tensors lie. Raises ValueError where they do not fit between
    the header and the file's end.
    """
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"its alignment is {alignment!r}, not a power of 2")
    first = cursor.place + -cursor.place % alignment
    room = max(len(cursor.content) - first, 0)
    tensors, total = {}, 0
    for name, (shape, kind, offset) in announced.items():
        if kind not in block_sizes:
            raise ValueError(f"its tensor {name} is of the unknown type {kind}")
        elements, size = block_sizes[kind]
        if shape and shape[-1] % elements:
            raise ValueError(
                f"its tensor {name} of shape {shape} does not consist of blocks of {elements}"
            )
        size *= math.prod(shape) // elements
        total += size
        if offset + size > room or total > room:
            raise ValueError(
                f"its tensor {name} of shape {shape} does not fit into {room} bytes of tensors"
            )
        tensors[name] = GgufTensor(shape, kind, first + offset, size)
    return tensors
