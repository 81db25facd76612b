"""Measures how many blocks are saved when the model stops at the first layer whose
shortcut is sure, and the cost.

Din et al. 2023 (arXiv 2303.09435), section 6, with other confidences, a cheap check, a
calibrated threshold, and the clock of a forward pass that truly stops.
"""

import dataclasses
from collections.abc import Sequence
from typing import Unpack

from matplotlib.figure import Figure

from jmat.capture.shared import SharedActivations
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Examples
from jmat.data.sampling import PROTOCOLS
from jmat.maps.jumps import fit_jumps
from jmat.maps.types import Identity
from jmat.metrics.predictions import Predictions
from jmat.models.family import Transformer
from jmat.models.sites import Site, stream_sites
from jmat.report.drawing import Drawing, titled
from jmat.report.environment import timed_on
from jmat.report.names import model_name
from jmat.report.notes import noted
from jmat.report.plots import plot_early_exit
from jmat.report.results import Results
from jmat.report.rows import Content, Row
from jmat.report.tables import format_table
from jmat.runtime import hosts
from jmat.runtime.annotations import Keywords
from jmat.runtime.checks import check_choice, check_share, check_whole
from jmat.studies.early_exit.curves import (
    calibration_rows,
    curve_rows,
    saved_rows,
    timing_rows,
    top_words,
)
from jmat.studies.evaluation import evaluate
from jmat.studies.fitting import announce_ranks
from jmat.studies.settings import Say, Settings, read_subject, report

FIGURE = "early_exit.png"
COLUMNS = ("layers", "precision@1", "flops_ratio", "flops_ratio_token")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Holds the settings of the study.

    Attributes:
      protocol: `din2023` takes one position for all thresholds of a masked model, as
        the paper's code does; `jmat` takes the position that is read.
      check_every: the cheap check looks at every so many layers.
      short_list: the cheap check reads so many words of the head.
      delta: disagreement with the full model to stay under, 0 to 1.
      epsilon: chance that the bound on disagreement fails, 0 to 1.
      timing_examples: examples timed, if there are as many; 0 times nothing.
    """

    protocol: str = "din2023"
    check_every: int = 2
    short_list: int = 512
    delta: float = 0.1
    epsilon: float = 0.05
    timing_examples: int = 64

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that is not valid."""
        super().__post_init__()
        check_choice("protocol", self.protocol, PROTOCOLS)
        check_whole("check_every", self.check_every, 1)
        check_whole("short_list", self.short_list, 2)
        check_share("delta", self.delta)
        check_share("epsilon", self.epsilon)
        check_whole("timing_examples", self.timing_examples, 0)


def run(
    model: Transformer,
    examples: Examples | Sequence[str],
    options: Options = Options(),
    *,
    tokenizer: Tokenizer | None = None,
    say: Say | None = None,
    shared: SharedActivations | None = None,
) -> Results:
    """Fits maps to the final layer and stops at the first layer where one of them is
    sure.

    Of several processes the first one times the passes; all get its figures.

    Args:
      model: as `jmat.load` returns it.
      examples: examples, or texts, of which three quarters are fitted on.
      options: the settings.
      tokenizer: the model's; texts and masked models need it.
      say: prints what happens now, beside progress bars; None: quiet.
      shared: activations that other studies of the model read, too; None: this one
        reads its own.

    Returns:
      Rows for every threshold, confidence and map (`mat`, `id`), for the blocks saved,
      the calibrated threshold and the clock; and the maps by name, such as `mat.3.12`.

    Raises:
      ValueError: as `jmat.studies.settings.read_subject`.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"Entry {i} holds a list of {i % 7} values." for i in range(40)]
      >>> results = jmat.studies.early_exit.run(model, texts, tokenizer=tokenizer)
      >>> figure, table = results.plot(), results.table()
    """
    subject = read_subject(model, examples, tokenizer, options, say=say, shared=shared)
    L, split, every = model.config.layers, subject.examples.eval, options.check_every
    if every >= L:
        subject.announce(
            f"the cheap check never looks: it is asked for every {every} blocks, and the model has "
            f"{L}"
        )
    sites = stream_sites(L)
    fit, held_out = subject.capture_both(sites)
    streams = [fit[site] for site in sites]
    jumps, solutions = fit_jumps(
        streams, targets="final", intercept=options.intercept, progress=subject.bar("fit")
    )
    announce_ranks(subject, solutions)
    maps: dict[str, dict[int, Site]] = {
        "mat": {l: jumps[l, L] for l in range(L)} | {L: Identity()},
        "id": dict.fromkeys(range(L + 1), Identity()),
    }
    words = top_words(model, fit[sites[L]], options.short_list)
    shortcuts = {
        (name, l): (of[l], held_out[sites[l]]) for name, of in maps.items() for l in range(L + 1)
    }
    predictions = Predictions()
    bar = subject.bar("evaluate")
    values = evaluate(
        model, held_out[sites[L]], shortcuts, words=words, predictions=predictions, progress=bar
    )
    cheap = {"check_every": every, "words": len(words)}
    subject.announce("every threshold, with intervals")
    rows, outcomes = curve_rows(
        model.config, values, split, options.protocol, cheap, seed=options.seed
    )
    rows += saved_rows(outcomes, L, split.rows, seed=options.seed)
    rows += calibration_rows(outcomes, split.rows, options.delta, options.epsilon)
    remarks = []
    if options.timing_examples:
        subject.announce("timing passes that stop")
        sample = subject.as_read.eval, min(options.timing_examples, split.num_examples)
        rows += timing_rows(model, maps["mat"], words, every, outcomes, sample, options.protocol)
        remarks += [timed_on()] if hosts.is_first() else []
    named = {f"mat.{l}.{L}": jumps[l, L] for l in range(L)}
    rows = noted(rows, predictions.note())
    shown: Keywords = {"tables": table, "figures": {FIGURE: plot}, "remarks": remarks}
    return report("early_exit", subject, options, rows, maps=named, **shown)


def table(rows: Sequence[Row]) -> str:
    """Returns the table of the paper's rule by lambda and map."""
    shown = [row for row in rows if "lambda" in row and row["confidence"] == "gap"]
    return format_table(shown, index="lambda", columns=("metric", "map"), metrics=COLUMNS)


def plot(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws precision@1 against blocks run and against FLOPs."""
    return plot_early_exit(results, **titled(drawing, f"{model_name(results)}: early exit"))
