"""Compares kinds of maps from every layer to the final one."""

from jmat.studies.map_zoo.study import BYTES, KINDS, LAYERS, Options, run

__all__ = ["BYTES", "KINDS", "LAYERS", "Options", "run"]
