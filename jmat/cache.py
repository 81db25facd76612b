"""Where jmat keeps what it would otherwise have to make again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$JMAT_CACHE`, else `$XDG_CACHE_HOME/jmat`, else `~/.cache/jmat`; not made here. A cache is never needed: whoever
    cannot write there makes the thing again.
    """  # fmt: skip
    own, shared = os.environ.get("JMAT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(own).expanduser() if own else Path(shared or "~/.cache").expanduser() / "jmat"
    except RuntimeError:  # a user without a home: nothing can be kept
        return Path(os.devnull)
