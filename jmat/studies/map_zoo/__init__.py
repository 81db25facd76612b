"""Compares kinds of maps between layers, and of parts of blocks."""

from jmat.studies.map_zoo.study import BYTES, KINDS, LAYERS, PAIRS, Options, figures, run

__all__ = ["BYTES", "KINDS", "LAYERS", "PAIRS", "Options", "figures", "run"]
