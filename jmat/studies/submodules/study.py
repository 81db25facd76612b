"""Measures what is left of a model's predictions when linear maps stand in for its
sub-modules.

Din et al. 2023 (arXiv 2303.09435), section 5.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Unpack

from jaxtyping import Float
from matplotlib.figure import Figure
from numpy import ndarray

from jmat.capture.shared import SharedActivations
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Examples, target_tokens
from jmat.maps.jumps import fit_jumps
from jmat.maps.types import Identity
from jmat.metrics.predictions import Predictions
from jmat.models.config import ModelConfig
from jmat.models.family import Transformer
from jmat.models.sites import SUBMODULES, Site, stream_sites
from jmat.report.drawing import Drawing, titled
from jmat.report.names import model_name
from jmat.report.notes import noted
from jmat.report.plots import plot_by_layer
from jmat.report.results import Results
from jmat.report.rows import Content, Row
from jmat.report.tables import format_table
from jmat.runtime.annotations import Keywords
from jmat.runtime.checks import check_choice, chosen, chosen_layers
from jmat.runtime.mesh import usual_batch
from jmat.runtime.progress import track
from jmat.studies.evaluation import evaluate, metric_rows
from jmat.studies.r2 import resamples
from jmat.studies.settings import Say, Settings, Subject, read_subject, report
from jmat.studies.submodules.ablation import (
    ABLATIONS,
    PartMaps,
    ablate,
    fit_parts,
    part_r2_rows,
    part_sites,
)
from jmat.studies.submodules.heads import ablate_heads
from jmat.studies.submodules.refit import refit_sequentially

METRICS = ("precision@1", "precision@5", "precision@10", "surprisal")
FIGURE = "submodule_ablation.png"
MAPS = ("mat", *ABLATIONS)
REFITS = ("none", "sequential")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Holds the settings of the study.

    Attributes:
      maps: names of the maps to evaluate, of `MAPS`.
      layers: source layers, of 0 .. L; none: all.
      refit: `none` fits all maps on the unmodified model, as the paper does;
        `sequential` fits each on the stream as the maps before it left it.
      heads: also replace and remove every attention head, one at a time.
    """

    maps: Sequence[str] = MAPS
    layers: Sequence[int | str] = ()
    refit: str = "none"
    heads: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that is not valid."""
        super().__post_init__()
        check_choice("refit", self.refit, REFITS)
        chosen("maps", self.maps, MAPS)

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError for a layer that the model does not have."""
        chosen_layers(self.layers, config.layers)


def run(
    model: Transformer,
    examples: Examples | Sequence[str],
    options: Options = Options(),
    *,
    tokenizer: Tokenizer | None = None,
    say: Say | None = None,
    shared: SharedActivations | None = None,
) -> Results:
    """Replaces sub-modules by linear maps from each layer on, and compares with the
    whole model.

    Args:
      model: as `jmat.load` returns it.
      examples: examples, or texts, of which three quarters are fitted on.
      options: the settings.
      tokenizer: the model's; texts and masked models need it.
      say: prints what happens now, beside progress bars; None: quiet.
      shared: activations that other studies of the model read, too; None: this one
        reads its own.

    Returns:
      Rows for every layer and map, r2 of every part's map alone, and the maps by name,
      such as `attn.3` and `mat.3.8`.

    Raises:
      ValueError: as `jmat.studies.settings.read_subject`; a layer that the model does
        not have.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"Entry {i} holds a list of {i % 7} values." for i in range(40)]
      >>> results = jmat.studies.submodules.run(model, texts, tokenizer=tokenizer)
      >>> figure, table = results.plot(), results.table()
    """
    layers = chosen_layers(options.layers, model.config.layers)
    names = chosen("maps", options.maps, MAPS)
    subject = read_subject(model, examples, tokenizer, options, say=say, shared=shared)
    L, held_out = model.config.layers, subject.examples.eval
    streams = stream_sites(L)
    keep = tuple(dict.fromkeys((*streams, *part_sites(SUBMODULES, range(L)))))
    fit, acts = subject.capture_both(keep)
    part_maps = fit_parts(
        fit, blocks=range(L), intercept=options.intercept, progress=subject.bar("fit parts")
    )
    shortcuts = _stand_ins(subject, options, names, layers, fit, part_maps)
    jumps, _ = fit_jumps(
        [fit[site] for site in streams],
        targets="final",
        intercept=options.intercept,
        progress=subject.bar("fit"),
    )
    if "mat" in names:
        shortcuts |= {
            ("mat", l): (jumps[l, L] if l < L else Identity(), acts[streams[l]]) for l in layers
        }
    predictions = Predictions()
    targets = target_tokens(held_out, masked=not model.config.causal)
    bar = subject.bar("evaluate")
    values = evaluate(
        model, acts[streams[L]], shortcuts, targets=targets, predictions=predictions, progress=bar
    )
    rows = noted(
        metric_rows(values, L, groups=held_out.rows, seed=options.seed), predictions.note()
    )
    rows += part_r2_rows(
        acts, part_maps, resamples(held_out.positions, held_out.rows, seed=options.seed)
    )
    maps = {f"{part}.{i}": linear for (part, i), linear in part_maps.items()}
    maps |= {f"mat.{i}.{j}": linear for (i, j), linear in jumps.items()}
    return report(
        "submodule_ablation",
        subject,
        options,
        rows,
        maps=maps,
        tables=table,
        figures={FIGURE: plot},
    )


def _stand_ins(
    subject: Subject,
    options: Options,
    names: Sequence[str],
    layers: Sequence[int],
    fit: Mapping[str, Float[ndarray, "N D"]],
    part_maps: PartMaps,
) -> dict[tuple[str, int], tuple[Site, Float[ndarray, "M D"]]]:
    """Returns (map, layer) → stand-in for h_L of the held-out examples, with the
    identity to read it by.
    """
    model = subject.model
    seen = subject.as_read
    size: Keywords = {"tokens_per_batch": options.tokens_per_batch or usual_batch()}
    fitting: Keywords = {**size, "intercept": options.intercept}
    plans: dict[str, dict[int, PartMaps]] = {name: {} for name in names if name != "mat"}
    sequential = options.refit == "sequential"
    for name, sources in plans.items():
        parts = ABLATIONS[name]
        for l in track(layers, subject.bar(f"refit {name}") if sequential else None):
            if sequential:
                sources[l] = refit_sequentially(model, seen.fit, fit, parts, l, **fitting)
            else:
                sources[l] = {
                    (part, i): linear
                    for (part, i), linear in part_maps.items()
                    if part in parts and i >= l
                }
    finals = ablate(model, seen.eval, plans, progress=subject.bar("replace"), **size)
    if options.heads:
        finals |= ablate_heads(model, seen, progress=subject.bar("heads"), **fitting)
    return {key: (Identity(), final) for key, final in finals.items()}


def table(rows: Sequence[Row]) -> str:
    """Returns the table of precision@1 by layer and map."""
    return format_table(rows, index="layer", columns=("metric", "map"), metrics=METRICS[:1])


def plot(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws the metrics by layer, one panel each."""
    title = f"{model_name(results)}: sub-modules replaced from layer l on"
    return plot_by_layer(results, METRICS, **titled(drawing, title))
