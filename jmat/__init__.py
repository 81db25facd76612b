"""jmat: how linear is a transformer, and what is that worth."""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

from jmat.capture.activations import capture
from jmat.checkpoint.load import load
from jmat.data.reading import encode
from jmat.decode.draft import Draft
from jmat.decode.exits import Exits
from jmat.decode.fit_exits import fit_exits
from jmat.decode.generate import generate
from jmat.decode.lookup import Lookup
from jmat.decode.tuning import tune_draft
from jmat.forward import logits, run
from jmat.maps.carry import fit_carry
from jmat.maps.fit import fit_map
from jmat.maps.sharing import load_maps, push_maps, save_maps
from jmat.maps.shortcut import Shortcut
from jmat.maps.types import Constant, Identity, Linear, Zero
from jmat.models.edits import Add, At, Edit, Scale
from jmat.models.sites import sites, streams
from jmat.models.tree import tree

if TYPE_CHECKING:
    from jmat import studies
    from jmat.report.results import read_results
    from jmat.studies.shortcuts import evaluate

__version__ = importlib.metadata.version("jmat")

__all__ = [
    "Add",
    "At",
    "Constant",
    "Draft",
    "Edit",
    "Exits",
    "Identity",
    "Linear",
    "Lookup",
    "Scale",
    "Shortcut",
    "Zero",
    "capture",
    "encode",
    "evaluate",
    "fit_carry",
    "fit_exits",
    "fit_map",
    "generate",
    "load",
    "load_maps",
    "logits",
    "push_maps",
    "read_results",
    "run",
    "save_maps",
    "sites",
    "streams",
    "studies",
    "tree",
    "tune_draft",
]


def __getattr__(name: str) -> object:
    """Imports what draws figures when it is first asked for."""
    if name == "studies":
        return importlib.import_module("jmat.studies")
    if name == "evaluate":
        return importlib.import_module("jmat.studies.shortcuts").evaluate
    if name == "read_results":
        return importlib.import_module("jmat.report.results").read_results
    raise AttributeError(f"module 'jmat' has no attribute {name!r}")
