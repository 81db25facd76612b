"""Measures what a linear classifier reads off each layer."""

from jmat.studies.probe.study import CLASSIFIERS, FIGURE, Options, Other, run

__all__ = ["CLASSIFIERS", "FIGURE", "Options", "Other", "run"]
