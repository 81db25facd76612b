"""Compares ways to write text: plain, and with drafts that the whole model checks."""

from jmat.studies.decoding.study import FIGURE, TEXTS, Options, run

__all__ = ["FIGURE", "TEXTS", "Options", "run"]
