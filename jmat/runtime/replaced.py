"""Keeps the files of a run that is replaced in OUT/.replaced, until there are new
results.

A process can be killed at any moment: then the next run that claims the folder moves
them back.
"""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Collection

from jmat.runtime.files import is_temporary, save_atomically
from jmat.runtime.run_file import RUN, not_ours

# The files of a run that is replaced stay there, with its run.json, until there are new results.
REPLACED = ".replaced"


def discard_replaced(folder: pathlib.Path) -> None:
    """Deletes the files of a run that was replaced, now that there are new results."""
    if (folder / REPLACED / RUN).is_file():
        shutil.rmtree(folder / REPLACED, ignore_errors=True)


def move_aside(folder: pathlib.Path, names: Collection[str]) -> pathlib.Path:
    """Moves files of a run to OUT/.replaced; those of a run before it, without
    successor yet, stay there instead.
    """
    aside = folder / REPLACED
    aside.mkdir(exist_ok=True)
    if not (aside / RUN).exists() and any(
        is_temporary(path.name) != RUN for path in aside.iterdir()
    ):
        raise ValueError(not_ours(folder, REPLACED))
    if (aside / RUN).exists():
        for path in (folder / name for name in names):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        return aside
    content = (folder / RUN).read_bytes()
    save_atomically(aside / RUN, lambda path: path.write_bytes(content))
    for name in names:
        (folder / name).rename(aside / name)
    return aside


def move_back(folder: pathlib.Path) -> None:
    """Moves the files of OUT/.replaced to where they were."""
    aside = folder / REPLACED
    content = (aside / RUN).read_bytes()
    save_atomically(folder / RUN, lambda path: path.write_bytes(content))
    for path in aside.iterdir():
        if path.name != RUN and not os.path.lexists(folder / path.name):
            path.rename(folder / path.name)
    (aside / RUN).unlink()
    with contextlib.suppress(OSError):
        aside.rmdir()


def is_half_moved(folder: pathlib.Path) -> bool:
    """Returns whether OUT/.replaced holds files of the run whose folder this still is."""
    try:
        content = (folder / REPLACED / RUN).read_bytes()
        return not (folder / RUN).exists() or (folder / RUN).read_bytes() == content
    except (FileNotFoundError, NotADirectoryError):
        return False
