"""Runs every study that applies to one model, and reports them together on one page."""

from jmat.studies.overview.options import STUDIES, Options
from jmat.studies.overview.study import FILES, Overview, run

__all__ = ["FILES", "STUDIES", "Options", "Overview", "run"]
