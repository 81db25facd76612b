"""Prunes whole blocks: which to remove, what stands in for them, what that costs, and
the smaller model.
"""

from jmat.studies.prune.options import Options
from jmat.studies.prune.study import FIGURE, MODEL, PruneResults, run

__all__ = ["FIGURE", "MODEL", "Options", "PruneResults", "run"]
