"""Compares a model with what transformers makes of the same checkpoint: MATCH,
PRECISION or WRONG.
"""

import dataclasses
import pathlib
from collections.abc import Sequence

from jmat.checkpoint import parameters
from jmat.checkpoint.load import DTYPES, find
from jmat.data.corpus import sentences_fingerprint
from jmat.data.encoding import Tokenizer, check_text
from jmat.models.family import Transformer, check_model
from jmat.report.results import Results
from jmat.report.rows import Row
from jmat.runtime.checks import check_choice
from jmat.runtime.digests import model_hash
from jmat.studies.settings import Say, Settings
from jmat.studies.verify.differences import SENTENCES, Report, format_report, report_rows, verify


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Holds the settings of the study.

    Attributes:
      dtype: in which the model was loaded.
    """

    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that is not valid."""
        super().__post_init__()
        check_choice("dtype", self.dtype, DTYPES)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class VerifyResults(Results):
    """Holds the differences site by site, and the verdict.

    Attributes:
      verdict: MATCH, PRECISION or WRONG.
    """

    verdict: str = ""

    def table(self) -> str:
        """Returns the differences as a table with a line a block, and the verdict."""
        return self.tables(self.rows)


def run(
    model: Transformer,
    text: str | None = None,
    options: Options = Options(),
    *,
    tokenizer: Tokenizer | None = None,
    folder: str | pathlib.Path | None = None,
    say: Say | None = None,
) -> VerifyResults:
    """Compares every site of a model with that of transformers on PyTorch.

    Args:
      model: as `jmat.load` returns it.
      text: to run on; None: built-in English sentences.
      options: the settings.
      tokenizer: the model's; without one, the tokens are random.
      folder: from which the model was loaded; None: by the model's name.
      say: prints what happens now; None: quiet.

    Returns:
      Rows for every site (`difference`, `rounding`), and the verdict.

    Raises:
      ValueError: a text without a tokenizer, or without tokens; torch is not installed;
        transformers does not load the folder.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> results = jmat.studies.verify.run(model, tokenizer=tokenizer)
      >>> results.verdict
      'MATCH'
    """
    check_model(model)
    if text is not None:
        check_text(text, "text")
        if tokenizer is None:
            raise ValueError(
                f"{model.name} has no tokenizer, so --text cannot be read; leave it out for random "
                "tokens."
            )
    place = find(model.name if folder is None else folder)
    if say is not None:
        say("comparing with transformers on PyTorch")
    outcome: Report = verify(place, model, tokenizer, dtype=options.dtype, text=text)
    read = {"source": "built-in sentences" if text is None else "--text"}
    read["eval"] = sentences_fingerprint(SENTENCES if text is None else [text])

    def table(rows: Sequence[Row]) -> str:
        return format_report(outcome)

    return VerifyResults(
        "verify",
        report_rows(outcome),
        {"model": model.name, **dataclasses.asdict(options)},
        model_hash(parameters(model)),
        read,
        tables=table,
        verdict=outcome.verdict,
    )
