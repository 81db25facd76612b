"""jmat: how linear is a transformer, and what is that worth."""

from jmat.checkpoint.load import load
from jmat.forward import logits, run
from jmat.maps.files import load_maps, save_maps
from jmat.maps.types import Constant, Identity, Linear, Zero
from jmat.models.edits import Add, At, Edit, Scale

__all__ = [
    "Add",
    "At",
    "Constant",
    "Edit",
    "Identity",
    "Linear",
    "Scale",
    "Zero",
    "load",
    "load_maps",
    "logits",
    "run",
    "save_maps",
]
