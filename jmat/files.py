"""Writes files whole or not at all, and several that belong together as a group."""

import errno
import functools
import os
import pathlib
import re
import secrets
import stat
from collections.abc import Callable, Mapping
from typing import Any

import safetensors
import safetensors.numpy
from numpy import ndarray

Write = Callable[[pathlib.Path], Any]

# `.NAME.XXXXXXXX.EXT` beside NAME, which ends in .EXT: what a process writes until it is whole.
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-z_]{8}(?P<suffix>\.[^.]*)?", re.DOTALL)


def save_atomically(path: str | os.PathLike[str], write: Write) -> None:
    """Calls `write` on a temporary file in the same folder, then moves that to `path`: a reader never sees half a file.

    Raises:
      OSError: the disk is full, the folder is not writable; one sentence that names the path. What was there before
        is untouched.
    """
    save_together({pathlib.Path(path): write})


def save_together(writers: Mapping[pathlib.Path, Write]) -> None:
    """Writes several files that belong together; the last is the one without which nobody reads the others.

    All are written to temporary files first. Then an old one of that last name is deleted, and the files move to their
    places in order: a process that is killed on the way leaves no mixture of old and new ones that could be read.

    Raises:
      OSError: the disk is full, the folder is not writable; one sentence that names the path. Where that is noticed
        while the temporary files are written, all that was there before is untouched.
    """
    *others, last = writers
    written: dict[pathlib.Path, pathlib.Path] = {}
    path = last
    try:
        for path, write in writers.items():
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{path.suffix}")
            # Made here, so that it has the permissions of a new file by the user's umask. `write` may put another
            # file in its place, as safetensors does, which gives that to its owner alone.
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            written[path] = temporary
            permissions = stat.S_IMODE(os.fstat(descriptor).st_mode)
            os.close(descriptor)
            write(temporary)
            if stat.S_IMODE(temporary.stat().st_mode) != permissions:
                temporary.chmod(permissions)
        if others:
            last.unlink(missing_ok=True)
        for path, temporary in written.items():
            os.replace(temporary, path)
    except OSError as error:
        reason = {errno.ENOSPC: "the disk is full", errno.EROFS: "the file system is read-only"}.get(
            error.errno or 0, error.strerror or str(error)
        )
        raise OSError(error.errno, f"cannot write {path}: {reason}; nothing written before is lost.") from None
    finally:
        for temporary in written.values():
            temporary.unlink(missing_ok=True)


def save_folder(folder: pathlib.Path, files: Mapping[str, bytes]) -> None:
    """Writes files that belong together, by name, into a folder, which is made where it is not there."""
    folder.mkdir(exist_ok=True)
    if files:
        save_together({folder / name: functools.partial(pathlib.Path.write_bytes, data=files[name]) for name in files})


def write_tensors(path: pathlib.Path, tensors: Mapping[str, ndarray], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file. Raises OSError where the disk is full, which safetensors reports as an own error."""
    try:
        safetensors.numpy.save_file(dict(tensors), path, metadata=dict(metadata))
    except safetensors.SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        reason = (int(number[1]), os.strerror(int(number[1]))) if number else (str(error),)
        raise OSError(*reason) from None


def is_temporary(name: str) -> str | None:
    """Returns which file a temporary file was meant for; None where `name` is not that of a temporary file."""
    match = _TEMPORARY.fullmatch(name)
    if match is None or pathlib.PurePath(match["name"]).suffix != (match["suffix"] or ""):
        return None
    return match["name"]


def local_path(name: str) -> pathlib.Path | None:
    """Returns the path that a user's text names, without symbolic links and `~`; None where it cannot be a path."""
    try:
        return pathlib.Path(os.path.realpath(pathlib.Path(name).expanduser()))
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, the home of a user whom there is not
        return None
