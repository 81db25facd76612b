"""Reads arrays of an .npz file; announced sizes are compared with the file before
anything is unpacked.
"""

import io
import math
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy import ndarray

# Arrays that hold one number over and over shrink a thousandfold, so that small files may announce
# much; large ones hold tokens, which shrink to a tenth at most.
_ALWAYS_ALLOWED = 1 << 26  # bytes, of all arrays together
_MOST_TIMES = 100  # beyond that, at most so many times the file


def read_arrays(path: Path, names: Iterable[str]) -> dict[str, ndarray]:
    """Returns those of the named arrays that an .npz file holds; others are not
    unpacked, and nothing in it is run.

    Raises:
      ValueError: it is no zip, or an array is damaged, announces more than the file can
        hold, or holds Python objects.
    """
    most = max(_ALWAYS_ALLOWED, _MOST_TIMES * path.stat().st_size)
    try:
        with zipfile.ZipFile(path) as archive:
            parts = {part.filename: part for part in archive.infolist()}
            wanted = {name: parts[f"{name}.npy"] for name in names if f"{name}.npy" in parts}
            announced = sum(part.file_size for part in wanted.values())
            if announced > most:
                raise ValueError(
                    f"it announces {announced} bytes, of at most {most} that such a file can hold"
                )
            return {name: _parse(_unpack(archive, part)) for name, part in wanted.items()}
    except ValueError:
        raise
    except Exception as error:  # a damaged zip raises a dozen different ones
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _unpack(archive: zipfile.ZipFile, part: zipfile.ZipInfo) -> bytes:
    """Returns the content of a part, never more than it announces; zipfile compares its
    checksum.
    """
    if part.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{part.filename} is compressed in a way that numpy does not write")
    with archive.open(part) as file:
        return file.read(part.file_size)


def _parse(content: bytes) -> ndarray:
    """Returns the array of a .npy file, whose header must announce as many bytes as
    follow.
    """
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read_header is None:
        raise ValueError(f"an array is of the format {version}")
    shape, fortran_order, dtype = read_header(file)
    if dtype.hasobject:
        raise ValueError("an array holds Python objects, which could run code")
    size = math.prod(shape) * dtype.itemsize
    if size != len(content) - file.tell():
        raise ValueError(
            f"an array announces {size} bytes, and {len(content) - file.tell()} follow"
        )
    return np.frombuffer(content, dtype, offset=file.tell()).reshape(
        shape, order="F" if fortran_order else "C"
    )
