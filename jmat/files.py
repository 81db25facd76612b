"""Files are written whole or not at all."""

import errno
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any


def save_atomically(path: pathlib.Path, write: Callable[[pathlib.Path], Any]) -> None:
    """Calls `write` on a temporary file in the same folder, then moves that to `path`: a reader never sees half a file.

    Raises:
      OSError: the disk is full, the folder is not writable; one sentence that names the path. What was there before
        is untouched.
    """
    path = pathlib.Path(path)
    temporary = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
        os.close(handle)
        temporary = pathlib.Path(name)
        write(temporary)
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except OSError as error:
        reason = {errno.ENOSPC: "the disk is full", errno.EROFS: "the file system is read-only"}.get(
            error.errno or 0, error.strerror or str(error)
        )
        raise OSError(error.errno, f"cannot write {path}: {reason}; nothing written before is lost.") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
