"""Linearity of every step and part of a model: the passes that measure it, and the rows
and plots that tell of it.
"""

from jmat.studies.linearity.study import Options, check_comparable, figure_names, run

__all__ = ["Options", "check_comparable", "figure_names", "run"]
