"""jmat: how linear is a transformer, and what is that worth."""

from jmat.forward import logits, run
from jmat.load import load

__all__ = ["load", "logits", "run"]
