"""Vectors of strings out of the data of an R package (`Rdata.rdb`), such as the lines of
a book. Nothing but strings is read, and no code is run.

The file holds one object after another: its size in four bytes, the highest first, and
a zlib stream of that many bytes in R's format of serialised objects.
"""

import struct
import zlib
from collections.abc import Iterator

_MOST_BYTES = 1 << 26  # of one object: a long book has some 1e6
_STRINGS, _STRING, _MISSING = 16, 9, -1


def string_vectors(content: bytes) -> Iterator[list[str]]:
    """Returns the vectors of strings in the data of an R package, in their order; other
    objects are left out.

    Raises:
      ValueError: the content is damaged, or compressed in another way.
    """
    while content:
        if len(content) < 4:
            raise ValueError("R data ends in the middle of an object: the file is damaged.")
        (size,) = struct.unpack(">I", content[:4])
        if size > _MOST_BYTES:
            raise ValueError(
                f"an object of {size} bytes is no book: the file is damaged, or is not the data of "
                "an R package."
            )
        stream = zlib.decompressobj()
        try:
            held = stream.decompress(content[4:], size + 1)
        except zlib.error as error:
            raise ValueError(
                f"R data is not compressed by zlib, or is damaged ({error})."
            ) from None
        if len(held) != size or not stream.eof:
            raise ValueError("R data has another size than it says: the file is damaged.")
        content = stream.unused_data
        try:
            vector = _strings(held)
        except (struct.error, UnicodeDecodeError):
            raise ValueError("R data does not hold what it says: the file is damaged.") from None
        if vector is not None:
            yield vector


def _strings(held: bytes) -> list[str] | None:
    """Returns the strings of one serialised object; None where it is something else."""
    if held[:2] != b"X\n":
        return None
    (version,) = struct.unpack_from(">i", held, 2)
    at = 14
    if version == 3:  # the name of the encoding follows
        (length,) = struct.unpack_from(">i", held, at)
        at += 4 + max(length, 0)
    flags, count = struct.unpack_from(">ii", held, at)
    if flags & 0xFF != _STRINGS:
        return None
    at, texts = at + 8, list[str]()
    for _ in range(count):
        flags, length = struct.unpack_from(">ii", held, at)
        if flags & 0xFF != _STRING:
            return None
        at += 8
        if length == _MISSING:
            continue
        if not 0 <= length <= len(held) - at:
            raise struct.error("a string ends behind the object")
        texts.append(held[at : at + length].decode("utf-8"))
        at += length
    return texts
