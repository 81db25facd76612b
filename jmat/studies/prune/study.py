"""Removes the least needed blocks of a model, and measures what it costs to leave them
out or to map over them.
"""

import dataclasses
import functools
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from matplotlib.figure import Figure

from jmat.capture.shared import SharedActivations
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Examples
from jmat.data.text import whole_sentences
from jmat.maps.files import MapsInfo
from jmat.models.family import Transformer
from jmat.report.drawing import Drawing, titled
from jmat.report.names import model_name
from jmat.report.results import Results, ignore_message
from jmat.report.rows import Content, Row
from jmat.report.tables import format_table
from jmat.runtime.annotations import Keywords
from jmat.runtime.mesh import usual_batch
from jmat.studies.prune.options import Options
from jmat.studies.prune.plans import Pruned, Scored, Teacher, block_scores, prune
from jmat.studies.prune.rows import METRICS, block_score_rows, plot_prune, pruned_rows, score_rows
from jmat.studies.prune.stand_ins import Stretch
from jmat.studies.prune.surgery import map_name, save_pruned
from jmat.studies.settings import Say, Subject, read_subject, report

FIGURE = "prune.png"
MODEL = "model"  # the folder of the most pruned model, among the results


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PruneResults(Results):
    """Holds the figures of pruned models.

    Attributes:
      failures: a sentence for each method that failed on the way; its rows end there,
        and all other methods have theirs.
      write_model: writes the most pruned model into a folder, with a note of which
        model and text its maps come from; None where it is not to be saved.
    """

    failures: Sequence[str] = ()
    write_model: Callable[[pathlib.Path, MapsInfo | None], object] | None = None

    def save(
        self,
        folder: str | pathlib.Path,
        *,
        before: Callable[[str], object] = ignore_message,
        **given: Any,
    ) -> list[str]:
        """Writes the files of `Results.save` and, with the option `save`, the pruned
        model to `model`.
        """
        if self.write_model is None:
            return super().save(folder, before=before, **given)
        before(MODEL)
        self.write_model(pathlib.Path(folder) / MODEL, self.maps_info)
        return [*super().save(folder, before=before, **given), MODEL]


def run(
    model: Transformer,
    examples: Examples | Sequence[str],
    options: Options = Options(),  # noqa: B008 (immutable)
    *,
    tokenizer: Tokenizer | None = None,
    say: Say | None = None,
    source: pathlib.Path | None = None,
    shared: SharedActivations | None = None,
) -> PruneResults:
    """Removes blocks one after another by every method, and compares each pruned model
    with the whole one.

    Args:
      model: as `jmat.load` returns it.
      examples: examples, or texts, of which three quarters are fitted on.
      options: the settings.
      tokenizer: the model's; texts and masked models need it.
      say: prints what happens now, beside progress bars; None: quiet, and a method that
        fails on the way is a warning.
      source: folder whose tokenizer files are written beside a model that is saved;
        default: the tokenizer writes them.
      shared: activations that other studies of the model read, too; None: this one
        reads its own.

    Returns:
      Rows of every block's scores, of the choices, and of every pruned model; the maps
      of the most pruned models by name, such as `mat.3.4`.

    Raises:
      ValueError: as `Options.check` and `jmat.studies.settings.read_subject`; every
        method failed.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"Entry {i} holds a list of {i % 7} values." for i in range(40)]
      >>> results = jmat.studies.prune.run(model, texts, tokenizer=tokenizer)
      >>> figure, table = results.plot(), results.table()
    """
    options.check(model.config)
    subject = read_subject(model, examples, tokenizer, options, say=say, shared=shared)
    size = options.tokens_per_batch or usual_batch()
    text = whole_sentences(subject.examples.eval, subject.mask_token)
    streams = subject.streams("fit")
    whole = Teacher(model, subject.examples.fit, streams, subject.mask_token, size)
    scores = block_scores(whole, options)
    pruned, failures = {}, []
    rows = block_score_rows(scores)
    for method in options.methods:
        steps, failure = _steps(subject, whole, method, options, known=scores[options.score])
        failures += [failure] if failure else []
        pruned[method] = [step for step, _ in steps]
        rows += score_rows(method, options.score, [scored for _, scored in steps])
    if not any(pruned.values()):
        raise ValueError(" ".join(failures))
    progress = subject.bar("evaluate")
    rows += pruned_rows(
        model, text, pruned, tokens_per_batch=size, seed=options.seed, progress=progress
    )
    maps = {
        map_name(method, stretch): linear
        for method, steps in pruned.items()
        for last in steps[-1:]
        for stretch, linear in last.maps.items()
    }
    write = None
    if options.save and not failures:
        method, last = options.methods[0], pruned[options.methods[0]][-1]
        write = functools.partial(_write_model, subject, method, last, source)
    base = report(
        "prune", subject, options, rows, maps=maps or None, tables=table, figures={FIGURE: plot}
    )
    return PruneResults(**vars(base), failures=failures, write_model=write)


def table(rows: Sequence[Row]) -> str:
    """Returns the tables of the blocks' scores, and of the pruned models."""
    scores = format_table(rows, index="layer", columns=("score",), metrics=("block_score",))
    models = format_table(
        rows, index="blocks", columns=("metric", "method"), metrics=METRICS, intervals=False
    )
    return f"scores of the whole model's blocks\n{scores}\n\n{models}"


def plot(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws perplexity, KL and top-1 agreement by the blocks that were removed, one
    line a method.
    """
    title = (
        f"{model_name(results)}: blocks removed by {results['config']['score'].replace('_', ' ')}"
    )
    return plot_prune(results, **titled(drawing, title))


def _steps(
    subject: Subject,
    whole: Teacher,
    method: str,
    options: Options,
    *,
    known: Mapping[Stretch, float],
) -> tuple[list[tuple[Pruned, Scored]], str | None]:
    """Returns what `jmat.studies.prune.plans.prune` yields, and a sentence where it
    fails on the way.

    A method that fails, such as a distillation that diverges, takes nothing from the
    other methods of the run.
    """
    steps = []
    try:
        for step in prune(whole, method, options, known=known, log=subject.announce):
            steps.append(step)
    except ValueError as error:
        failure = f"{method} failed at {len(steps) + 1} of {options.remove} blocks: {error}"
        subject.announce(failure)
        if subject.say is None:
            warnings.warn(failure, stacklevel=3)
        return steps, failure
    return steps, None


def _write_model(
    subject: Subject,
    method: str,
    last: Pruned,
    source: pathlib.Path | None,
    folder: pathlib.Path,
    info: MapsInfo | None,
) -> None:
    """Writes a pruned model with the subject's tokenizer into a folder."""
    beside: Keywords = {"source": source, "tokenizer": subject.tokenizer}
    save_pruned(folder, subject.model, method, last.removed, last.maps, info, **beside)
