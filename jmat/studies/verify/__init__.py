"""Compares a checkpoint, site by site, with what transformers computes on PyTorch."""

from jmat.studies.verify.study import Options, run

__all__ = ["Options", "run"]
