"""Holds the experiments of the command line, each a module."""

import os
import sys

# Where a script is started without a standard stream (`2>&-`), the next file that is opened takes
# its number, and what libraries print would end up in that file, such as a model's weights; and
# Python has no stream of that name, to which they could print. This comes before any other file is
# opened.
for _number, _name in enumerate(("stdin", "stdout", "stderr")):
    try:
        os.fstat(_number)
    except OSError:
        os.open(os.devnull, os.O_RDWR)
    if getattr(sys, _name) is None:
        setattr(
            sys, _name, os.fdopen(_number, "w" if _number else "r", encoding="utf-8", closefd=False)
        )

# Without torch, which only `verify` and parts of `benchmark` need, transformers would warn in every
# run that models are not available. This comes before transformers is imported.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
