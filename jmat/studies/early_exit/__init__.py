"""Early exit: thresholds, what they cost and keep, and forward passes that truly stop."""

from jmat.studies.early_exit.study import Options, run

__all__ = ["Options", "run"]
