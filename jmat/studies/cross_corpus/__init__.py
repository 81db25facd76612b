"""Measures whether maps to the final layer travel to other text."""

from jmat.studies.cross_corpus.study import CURVES, PAIRS, Options, run

__all__ = ["CURVES", "PAIRS", "Options", "run"]
