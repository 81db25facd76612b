"""Measures how linear every step and every part of a model is, and draws it."""

from jmat.studies.linearity.study import Options, check_comparable, figure_names, run

__all__ = ["Options", "check_comparable", "figure_names", "run"]
