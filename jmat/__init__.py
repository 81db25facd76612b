"""jmat: how linear is a transformer, and what is that worth."""

from jmat.checkpoint.load import load
from jmat.forward import logits, run
from jmat.maps.files import load_maps, save_maps
from jmat.maps.types import Constant, Identity, Linear, Zero

__all__ = ["Constant", "Identity", "Linear", "Zero", "load", "load_maps", "logits", "run", "save_maps"]
