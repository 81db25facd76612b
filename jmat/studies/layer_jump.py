"""Measures what a model already predicts at layer l, read through a linear map (`mat`)
or directly (`id`).

Din et al. 2023 (arXiv 2303.09435), section 3. For every layer, against the full model
on held-out sentences: precision@k, recall@k, surprisal and KL (nats), with 95 %
bootstrap intervals.
"""

import dataclasses
from collections.abc import Sequence
from typing import Unpack

from matplotlib.figure import Figure

from jmat.capture.shared import SharedActivations
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Examples
from jmat.maps.types import Identity
from jmat.metrics.predictions import Predictions
from jmat.models.cost import TARGETS
from jmat.models.family import Transformer
from jmat.report.drawing import Drawing, titled
from jmat.report.names import model_name
from jmat.report.notes import noted
from jmat.report.plots import plot_by_layer
from jmat.report.results import Results
from jmat.report.rows import Content, Row
from jmat.report.tables import format_table
from jmat.runtime.checks import check_choice
from jmat.studies.evaluation import evaluate, metric_rows
from jmat.studies.fitting import FitSettings, fit_layers
from jmat.studies.settings import Say, read_subject, report

METRICS = ("precision@1", "precision@5", "precision@10", "surprisal")
FIGURE = "layer_jump.png"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(FitSettings):
    """Holds the settings of the study.

    Attributes:
      targets: fit maps from every layer to `all` later layers, or only to the `final`
        one.
    """

    targets: str = "all"

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that is not valid."""
        super().__post_init__()
        check_choice("targets", self.targets, TARGETS)


def run(
    model: Transformer,
    examples: Examples | Sequence[str],
    options: Options = Options(),
    *,
    tokenizer: Tokenizer | None = None,
    say: Say | None = None,
    shared: SharedActivations | None = None,
) -> Results:
    """Fits maps between all layers and evaluates those to the final one.

    Args:
      model: as `jmat.load` returns it.
      examples: examples, or texts, of which three quarters are fitted on.
      options: the settings.
      tokenizer: the model's; texts and masked models need it.
      say: prints what happens now, beside progress bars; None: quiet.
      shared: activations that other studies of the model read, too; None: this one
        reads its own.

    Returns:
      Rows for every layer and map (`mat`, `id`), and the maps by name, such as
      `mat.3.8`.

    Raises:
      ValueError: as `jmat.studies.settings.read_subject`.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"Entry {i} holds a list of {i % 7} values." for i in range(40)]
      >>> results = jmat.studies.layer_jump.run(model, texts, tokenizer=tokenizer)
      >>> figure, table = results.plot(), results.table()
    """
    subject = read_subject(model, examples, tokenizer, options, say=say, shared=shared)
    L, held_out = model.config.layers, subject.examples.eval
    maps, n = fit_layers(subject, options, targets=options.targets)
    streams = subject.streams("eval")
    shortcuts = {
        ("mat", i): (maps[i, L] if i < L else Identity(), streams[i]) for i in range(L + 1)
    }
    shortcuts |= {("id", i): (Identity(), streams[i]) for i in range(L + 1)}
    predictions = Predictions()
    values = evaluate(
        model, streams[L], shortcuts, predictions=predictions, progress=subject.bar("evaluate")
    )
    rows = noted(
        metric_rows(values, L, groups=held_out.rows, seed=options.seed), predictions.note()
    )
    named = {f"mat.{i}.{j}": linear for (i, j), linear in maps.items()}
    return report(
        "layer_jump", subject, options, rows, maps=named, n=n, tables=table, figures={FIGURE: plot}
    )


def table(rows: Sequence[Row]) -> str:
    """Returns the table of the metrics by layer and map."""
    return format_table(rows, index="layer", columns=("metric", "map"), metrics=METRICS)


def plot(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws the metrics by layer, one panel each."""
    return plot_by_layer(
        results, METRICS, **titled(drawing, f"{model_name(results)}: reading layer l")
    )
