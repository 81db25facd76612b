"""Studies: each answers one question about a model; `jmat.studies.NAME.run(model, examples, Options(...))`."""

import importlib
import pkgutil
from typing import Any


def __getattr__(name: str) -> Any:
    """Imports a study when it is first asked for."""
    if name in {module.name for module in pkgutil.iter_modules(__path__)}:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
