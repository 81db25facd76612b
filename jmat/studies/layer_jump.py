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
from jmat.report.plots import plot_by_layer, plot_layer_pairs
from jmat.report.results import Results
from jmat.report.rows import Content, Row
from jmat.report.tables import format_table
from jmat.runtime.checks import check_choice
from jmat.studies.evaluation import evaluate, metric_rows
from jmat.studies.fitting import FitSettings, fit_layers
from jmat.studies.settings import Say, read_subject, report
from jmat.studies.then_run import rows_of_inner_jumps

METRICS = ("precision@1", "precision@5", "precision@10", "surprisal")
FIGURE, PAIRS = "layer_jump.png", "layer_jump_pairs.png"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(FitSettings):
    """Holds the settings of the study.

    Attributes:
      targets: fit maps from every layer to `all` later layers, or only to the `final`
        one.
      then_run: also evaluate jumps to layers j < L, behind which the other blocks run;
        L(L − 1) / 2 more maps, each with part of a forward pass.
    """

    targets: str = "all"
    then_run: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that is not valid."""
        super().__post_init__()
        check_choice("targets", self.targets, TARGETS)
        if self.then_run and self.targets != "all":
            raise ValueError(f"then_run jumps to all layers: leave out targets={self.targets!r}.")


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
      `mat.3.8`. The row's `target` is L; below L it is where a jump ends behind which
      the other blocks run (`then_run`).

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
    figures = {FIGURE: plot}
    if options.then_run:
        rows += rows_of_inner_jumps(
            subject,
            maps,
            streams[L],
            seed=options.seed,
            tokens_per_batch=options.tokens_per_batch,
        )
        figures[PAIRS] = plot_jumps
    named = {f"mat.{i}.{j}": linear for (i, j), linear in maps.items()}
    return report(
        "layer_jump", subject, options, rows, maps=named, n=n, tables=table, figures=figures
    )


def table(rows: Sequence[Row]) -> str:
    """Returns the table of the metrics by layer and map, and one of precision@1 for each
    map where there are jumps to inner layers.
    """
    final = _final(rows)
    tables = [
        format_table(final, index="layer", columns=("metric", "map"), metrics=METRICS),
        *(
            f"precision@1 of {name} from layer i (down) to j (across), then the blocks behind j\n"
            + format_table(
                [row for row in rows if row["map"] == name and row["layer"] < row["target"]],
                index="layer",
                columns=("target",),
                metrics=METRICS[:1],
            )
            for name in ("mat", "id")
            if len(final) < len(rows)
        ),
    ]
    return "\n\n".join(tables)


def plot(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws the metrics by layer, one panel each."""
    shown: Content = {**results, "rows": _final(results["rows"])}
    return plot_by_layer(
        shown, METRICS, **titled(drawing, f"{model_name(results)}: reading layer l")
    )


def plot_jumps(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws heat maps of precision@1 of every jump, behind which the other blocks run."""
    title = f"{model_name(results)}: jump from layer $i$ to $j$, then run the blocks behind $j$"
    return plot_layer_pairs(results, metric=METRICS[0], **titled(drawing, title))


def _final(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of jumps to the final layer."""
    last = max((row["target"] for row in rows), default=0)
    return [row for row in rows if row["target"] == last]
