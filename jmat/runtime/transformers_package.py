"""Imports transformers when it is first needed, which takes seconds."""

import os
from types import ModuleType

_QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def transformers_package() -> ModuleType:
    """Returns the package `transformers`.

    Where torch is missing, transformers would warn that it offers no models. jmat needs
    none of them, so that this warning is held back while transformers is imported.
    """
    before = os.environ.get(_QUIET)
    os.environ[_QUIET] = "1"
    try:
        import transformers
    finally:
        if before is None:
            del os.environ[_QUIET]
        else:
            os.environ[_QUIET] = before
    return transformers
