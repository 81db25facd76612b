"""Studies: each answers one question about a model.

`jmat.studies.NAME.run(model, examples, Options(...))` returns its results.

Examples:
  >>> import jmat
  >>> options = jmat.studies.layer_jump.Options(targets="final")
  >>> options.targets
  'final'
"""

import importlib
import pkgutil
import types


def __getattr__(name: str) -> types.ModuleType:
    """Imports a study when it is first asked for."""
    if name in {module.name for module in pkgutil.iter_modules(__path__)}:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
