"""Keeps content that is slow to make in files, and notices where these were damaged."""

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Content = TypeVar("Content")


def cache_folder() -> Path:
    """Returns `$JMAT_CACHE`, else `$XDG_CACHE_HOME/jmat`, else `~/.cache/jmat`.

    The folder is not made here. A cache is never needed: what cannot be kept there is
    made again.
    """
    own, shared = os.environ.get("JMAT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(own).expanduser() if own else Path(shared or "~/.cache").expanduser() / "jmat"
    except RuntimeError:  # a user without a home: nothing can be kept
        return Path(os.devnull)


def cached(
    stem: str,
    suffix: str,
    make: Callable[[], Content],
    load: Callable[[Path], Content],
    save: Callable[[Path, Content], object],
    fingerprint: Callable[[Content], str],
) -> Content:
    """Returns what the cache keeps in the file `STEM-FINGERPRINT.SUFFIX`, or makes and
    keeps it.

    The fingerprint in a file's name is that of its content: a file that was cut,
    overwritten or exchanged does not match its name, is reported in one line, and is
    made anew. It is no error if the folder cannot be written.

    Args:
      stem: beginning of the file's name; says all that the content depends on.
      suffix: end of the file's name, such as `.txt`.
      make: makes the content where no file has it.
      load: reads a file; raises OSError or ValueError where that cannot be done.
      save: writes a file, whole or not at all.
      fingerprint: of a content, in letters and digits.
    """
    folder = cache_folder()
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob(f"{stem}-*{suffix}")):
            with contextlib.suppress(OSError, ValueError):
                content = load(path)
                if path.name == f"{stem}-{fingerprint(content)}{suffix}":
                    return content
            logging.getLogger(__name__).warning(
                "%s is damaged: it is left out, and made anew.", path
            )
    content = make()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        save(folder / f"{stem}-{fingerprint(content)}{suffix}", content)
    return content
