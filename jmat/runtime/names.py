"""Tells names that jmat knows, such as `gpt2-docs` and `docs`, from files and folders
of the same name.
"""

import os
import pathlib
from collections.abc import Callable, Collection

PREFIX = "jmat:"  # before a name that jmat knows, where a file or folder has it, too


def known_name(
    name_or_path: str | os.PathLike[str],
    known: Collection[str],
    is_there: Callable[[pathlib.Path], bool],
    *,
    kind: str,
) -> str | None:
    """Returns the name, without prefix, if it is one that jmat knows; None if it can
    only be a file or folder.

    Args:
      name_or_path: what a user gave. A path object means a file or folder, if there is
        one.
      known: the names.
      is_there: whether something that could be meant lies at a path.
      kind: what is named, such as "model".

    Raises:
      ValueError: the name is empty, has the prefix and is not known, or is both known
        and a file or folder here.
    """
    if not isinstance(name_or_path, str | os.PathLike):
        got = type(name_or_path).__name__
        raise ValueError(f"expected the name of a {kind}, or a path; got an object of type {got}.")
    name = os.fspath(name_or_path)
    if not name.strip():
        raise ValueError(
            f"the name of the {kind} is empty; expected {', '.join(known)}, or a path."
        )
    if name.startswith(PREFIX):
        if name.removeprefix(PREFIX) not in known:
            raise ValueError(
                f"jmat has no {kind} {name.removeprefix(PREFIX)!r}; it has {', '.join(known)}."
            )
        return name.removeprefix(PREFIX)
    if name not in known:
        return None
    if not is_there(pathlib.Path(name)):
        return name
    if not isinstance(name_or_path, str):
        return None
    raise ValueError(
        f"{name!r} is both a {kind} that jmat has and a path here; write ./{name} for the one "
        f"here, or {PREFIX}{name} for jmat's."
    )
