"""Writes files whole or not at all, and several that belong together as a group."""

import errno
import functools
import json
import os
import pathlib
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy import ndarray

from jmat.runtime.annotations import JsonObject

Write = Callable[[pathlib.Path], object]

# `.NAME.XXXXXXXX.EXT` beside NAME, which ends in .EXT: what a process writes until it is whole.
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-z_]{8}(?P<suffix>\.[^.]*)?", re.DOTALL)


def save_atomically(path: str | os.PathLike[str], write: Write) -> None:
    """Calls `write` on a temporary file in the same folder, then moves that to `path`:
    a reader never sees half a file.

    Raises:
      OSError: the disk is full, the folder is not writable; one sentence that names the
        path. What was there before is untouched.
    """
    save_together({pathlib.Path(path): write})


def save_together(writers: Mapping[pathlib.Path, Write]) -> None:
    """Writes several files that belong together; the last is the one without which
    nobody reads the others.

    All are written to temporary files first. Then an old one of that last name is
    deleted, and the files move to their places in order: a process that is killed on
    the way leaves no mixture of old and new ones that could be read.

    Raises:
      OSError: the disk is full, the folder is not writable; one sentence that names the
        path. Where that is noticed while the temporary files are written, all that was
        there before is untouched.
    """
    *others, last = writers
    written: dict[pathlib.Path, pathlib.Path] = {}
    path = last
    try:
        for path, write in writers.items():
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{path.suffix}")
            # Made here, so that it gets the permissions of a new file, by the user's umask,
            # whatever `write` does.
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            written[path] = temporary
            write(temporary)
        if others:
            last.unlink(missing_ok=True)
        for path, temporary in written.items():
            os.replace(temporary, path)
    except OSError as error:
        reason = {
            errno.ENOSPC: "the disk is full",
            errno.EROFS: "the file system is read-only",
        }.get(error.errno or 0, error.strerror or str(error))
        raise OSError(
            error.errno, f"cannot write {path}: {reason}; nothing written before is lost."
        ) from None
    finally:
        for temporary in written.values():
            temporary.unlink(missing_ok=True)


def save_folder(folder: pathlib.Path, files: Mapping[str, bytes]) -> None:
    """Writes files that belong together, by name, into a folder, which is made where it
    is not there.
    """
    folder.mkdir(exist_ok=True)
    if files:
        save_together(
            {
                folder / name: functools.partial(pathlib.Path.write_bytes, data=files[name])
                for name in files
            }
        )


def write_tensors(
    path: pathlib.Path, tensors: Mapping[str, ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes a safetensors file, byte for byte as the package safetensors does.

    The package's own function writes to another temporary file beside `path`, which
    nobody would recognise and delete after a run that was killed, and which only its
    owner may read.

    Args:
      path: of the file.
      tensors: arrays of numbers or booleans by name.
      metadata: texts by name.
    """
    names = sorted(tensors, key=lambda name: (-_rank(tensors[name]), name))
    header: JsonObject = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        array = tensors[name]
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": _DTYPES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)


# The names that safetensors has for dtypes, in the order in which it stores arrays, from the last
# to the first.
_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}


def _rank(array: ndarray) -> int:
    """Returns the place of an array's dtype in `_DTYPES`."""
    return list(_DTYPES).index(array.dtype.name)


def is_temporary(name: str) -> str | None:
    """Returns which file a temporary file was meant for; None where `name` is not that
    of a temporary file.
    """
    match = _TEMPORARY.fullmatch(name)
    if match is None or pathlib.PurePath(match["name"]).suffix != (match["suffix"] or ""):
        return None
    return match["name"]


def discard_temporary(paths: Iterable[pathlib.Path]) -> None:
    """Deletes the temporary files among some paths: what a process that was killed left
    half-written.
    """
    for path in paths:
        if is_temporary(path.name) and path.is_file():
            path.unlink(missing_ok=True)


def local_path(name: str) -> pathlib.Path | None:
    """Returns the path that a user's text names, without symbolic links and `~`; None
    where it cannot be a path.
    """
    try:
        return pathlib.Path(os.path.realpath(pathlib.Path(name).expanduser()))
    # too long, a zero byte, the home of a user whom there is not
    except (OSError, ValueError, RuntimeError):
        return None


def text_lines(path: str | os.PathLike[str]) -> list[str]:
    """Returns all lines of a text file, without the space at their ends; raises as
    `file_text`.
    """
    return [line.strip() for line in file_text(path).split("\n")]


def file_text(path: str | os.PathLike[str]) -> str:
    """Returns what a text file holds, without a byte-order mark.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is a folder, not UTF-8, or holds NUL characters.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no text file {path}.")
    if not path.is_file():
        raise ValueError(
            f"{path} is not a file; expected a text file with one sentence or paragraph a line."
        )
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {error.start} is invalid): convert it to UTF-8."
        ) from None
    # UTF-16 without a byte-order mark is valid UTF-8 with NUL behind every letter
    if (at := text.find("\0")) >= 0:
        raise ValueError(
            f"{path} holds a NUL character (line {text.count(chr(10), 0, at) + 1}), so it is no "
            "plain text, or UTF-16: convert it to UTF-8, for example with iconv -f UTF-16LE -t "
            "UTF-8."
        )
    return text
