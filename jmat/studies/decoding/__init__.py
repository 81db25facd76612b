"""Compares ways to write text: plain, with drafts that the whole model checks, and with
tokens that leave the model early.
"""

from jmat.decode.exits import FILLS
from jmat.metrics.confidence import CONFIDENCES
from jmat.studies.decoding.methods import WAYS
from jmat.studies.decoding.options import Options
from jmat.studies.decoding.study import FIGURE, TEXTS, run

__all__ = ["CONFIDENCES", "FIGURE", "FILLS", "TEXTS", "WAYS", "Options", "run"]
