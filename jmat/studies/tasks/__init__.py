"""Measures what a causal model is worth: perplexity on texts, and accuracy on questions
with given answers.
"""

from jmat.studies.tasks.questions import Question, read_task
from jmat.studies.tasks.study import Options, run

__all__ = ["Options", "Question", "read_task", "run"]
