"""Measures which sub-modules a linear map can stand in for."""

from jmat.studies.submodules.study import FIGURE, MAPS, REFITS, Options, run

__all__ = ["FIGURE", "MAPS", "REFITS", "Options", "run"]
