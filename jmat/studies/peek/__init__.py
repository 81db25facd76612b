"""Shows what every layer already predicts, in the terminal, in a notebook and as a
page.
"""

from jmat.studies.peek.study import FILES, Options, check, framed, run

__all__ = ["FILES", "Options", "check", "framed", "run"]
