"""Measures perplexity on texts, and accuracy on questions with given answers, of a
model that is whole or pruned.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from jmat.checkpoint import parameters
from jmat.data.corpus import sentences_fingerprint
from jmat.data.encoding import Tokenizer
from jmat.models.family import Transformer, check_model
from jmat.models.sites import Site
from jmat.report.results import Results
from jmat.report.rows import Row
from jmat.report.tables import format_table
from jmat.runtime.annotations import Keywords
from jmat.runtime.digests import model_hash
from jmat.runtime.mesh import usual_batch
from jmat.studies.settings import Say, Settings
from jmat.studies.tasks.choices import check_choices, task_rows
from jmat.studies.tasks.questions import Question
from jmat.studies.tasks.scoring import check_causal, text_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Holds the settings of the study."""


def run(
    model: Transformer,
    questions: Mapping[str, Sequence[Question]] | Sequence[Question] = (),
    options: Options = Options(),
    *,
    tokenizer: Tokenizer | None,
    texts: Mapping[str, Sequence[str]] | Sequence[str] = (),
    sites: Mapping[str, Site] | None = None,
    say: Say | None = None,
) -> Results:
    """Measures perplexity on texts and accuracy on questions.

    Args:
      model: a causal model.
      questions: by the name of their task, as `read_task` returns them; or those of one
        task.
      options: the settings.
      tokenizer: the model's.
      texts: lines by the name of their text; or those of one text.
      sites: stand-ins for parts of the model, as for `jmat.run`.
      say: shows progress bars where it is given; None: quiet.

    Returns:
      A row for every text (`perplexity`), and rows for every task (`accuracy`,
      `accuracy_norm` and `chance`).

    Raises:
      ValueError: nothing to measure; a model that is no causal one, or has no
        tokenizer; a choice that is too long; a text without two tokens in a line.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> lines = ["Return a new array", "The default is None"]
      >>> results = jmat.studies.tasks.run(model, texts=lines, tokenizer=tokenizer)
      >>> results.rows[0]["metric"]
      'perplexity'
    """
    if isinstance(texts, str):
        raise ValueError("expected a list of texts; got one text.")
    tasks = (
        questions
        if isinstance(questions, Mapping)
        else {"questions": questions}
        if questions
        else {}
    )
    lines = texts if isinstance(texts, Mapping) else {"texts": texts} if texts else {}
    if not tasks and not lines:
        raise ValueError("nothing to measure: give questions, or texts.")
    check_model(model)
    tokenizer = check_causal(model, tokenizer, model.name)
    for asked in tasks.values():
        check_choices(model, tokenizer, asked)
    size = options.tokens_per_batch or usual_batch()
    settings: Keywords = {"seed": options.seed, "sites": sites, "tokens_per_batch": size}
    rows = []
    for name, of_text in lines.items():
        rows += text_rows(
            model, tokenizer, name, of_text, progress=name if say else None, **settings
        )
    for name, asked in tasks.items():
        rows += task_rows(model, tokenizer, name, asked, progress=name if say else None, **settings)
    read = {name: sentences_fingerprint(of_text) for name, of_text in lines.items()}
    read |= {name: sentences_fingerprint(map(repr, asked)) for name, asked in tasks.items()}
    config = {"model": model.name, **dataclasses.asdict(options)}
    return Results("tasks", rows, config, model_hash(parameters(model)), read, tables=table)


def table(rows: Sequence[Row]) -> str:
    """Returns a table of the texts and one of the tasks, where there are any."""
    return "\n".join(
        format_table(rows, index=index, columns=("metric",), intervals=True)
        for index in ("text", "task")
        if any(index in row for row in rows)
    )
