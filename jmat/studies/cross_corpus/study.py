"""Fits maps to the final layer on each of several corpora, and evaluates them on all of
these corpora.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Unpack

from matplotlib.figure import Figure

from jmat.data.encoding import Tokenizer
from jmat.data.examples import Examples
from jmat.maps.kinds import AFFINE, IDENTITY, MAT, Kind, parse_kinds
from jmat.models.config import ModelConfig
from jmat.models.family import Transformer
from jmat.models.sites import stream_sites
from jmat.report.drawing import Drawing, titled
from jmat.report.names import model_name
from jmat.report.results import Results
from jmat.report.rows import Content, Row
from jmat.report.tables import format_table
from jmat.runtime.annotations import Keywords
from jmat.runtime.checks import chosen_layers
from jmat.studies.cross_corpus.kinds import (
    fit_kinds,
    kinds_table,
    plot_kind_curves,
    plot_kind_pairs,
)
from jmat.studies.cross_corpus.plots import plot_learning_curve, plot_pairs
from jmat.studies.cross_corpus.rows import (
    Fit,
    Streams,
    check_sizes,
    cross_rows,
    fit_sizes,
    over_layers,
)
from jmat.studies.map_zoo.fits import check_fitted_here
from jmat.studies.settings import Say, Settings, Subject, read_subject, report

PAIRS, CURVES = "pairs.png", "learning_curve.png"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Holds the settings of the study.

    Attributes:
      sizes: numbers of examples to fit on; none: doubling from 250, and all of them.
      layers: source layers, of 0 .. L − 1; none: all.
      maps: kinds of maps, such as `mat`, `ridge` or `rank:64` (`jmat.maps.kinds`); `id`
        is always there.
    """

    sizes: Sequence[int | str] = ()
    layers: Sequence[int | str] = ()
    maps: Sequence[str] = (MAT,)

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that is not valid."""
        super().__post_init__()
        if wrong := [size for size in self.sizes if not str(size).isdecimal() or int(size) < 1]:
            raise ValueError(
                f"sizes has {wrong[0]!r}; expected whole numbers above 0, such as 250,500,1000."
            )

        kinds = self.kinds()
        check_fitted_here(kinds, "cross_corpus")
        if self.intercept and any(str(kind) != MAT for kind in kinds):
            raise ValueError(
                f"intercept=True makes {AFFINE} of {MAT}; other kinds have an intercept or none: "
                "leave it out."
            )

    def kinds(self) -> list[Kind]:
        """Returns the kinds that are fitted. Raises ValueError for a name that is none,
        and where none is to be fitted.
        """
        kinds = [kind for kind in parse_kinds(self.maps) if kind.name != IDENTITY]
        if not kinds:
            raise ValueError(
                f"maps={IDENTITY}: nothing is fitted for {IDENTITY}; name other kinds."
            )
        return kinds

    @property
    def several(self) -> bool:
        """Returns whether other kinds than `mat` are fitted."""
        return [str(kind) for kind in self.kinds()] != [MAT]

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError for a layer that the model does not have, for the final one
        alone, and for a rank above the model's width.
        """
        L = config.layers
        for kind in self.kinds():
            kind.check_width(config.width, config.width)
        if chosen_layers(self.layers, L) == [L]:
            raise ValueError(
                f"layers={L} is the final layer, to which every map leads: name one of 0 .. "
                f"{L - 1}."
            )


def run(
    model: Transformer,
    corpora: Mapping[str, Examples | Sequence[str]],
    options: Options = Options(),
    *,
    tokenizer: Tokenizer | None = None,
    say: Say | None = None,
) -> Results:
    """Fits maps on every corpus, from few to all of its examples, and evaluates each on
    every corpus.

    The examples are read once, and smaller numbers of them are among the larger ones.

    Args:
      model: as `jmat.load` returns it.
      corpora: name → examples, or texts, of which three quarters are fitted on.
      options: the settings.
      tokenizer: the model's; texts and masked models need it.
      say: prints what happens now, beside progress bars; None: quiet.

    Returns:
      Rows for every layer, map (`id` and the kinds that were fitted), corpus that it was
      fitted on (`fit_corpus`), number of examples (`n_fit`) and corpus that it was
      evaluated on (`eval_corpus`). With other kinds than `mat` there are also rows
      without a layer: means over the layers, and, in metrics that end in `_minus_own`,
      their paired differences from the map of the kind that was fitted on as many
      examples of the evaluation corpus.

    Raises:
      ValueError: as `jmat.studies.settings.read_subject`; no corpus; a layer or a
        number of examples that is not there.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"Entry {i} holds a list of {i % 7} values." for i in range(40)]
      >>> corpora = {"even": texts[::2], "odd": texts[1::2]}
      >>> results = jmat.studies.cross_corpus.run(model, corpora, tokenizer=tokenizer)
      >>> figure, table = results.plot(), results.table()
    """
    L = model.config.layers
    options.check(model.config)
    layers = [*(layer for layer in chosen_layers(options.layers, L) if layer < L), L]
    if not corpora:
        raise ValueError(
            "there is no corpus to fit on; give a dict from names to examples or texts."
        )
    subjects = {
        name: read_subject(model, examples, tokenizer, options, say=say)
        for name, examples in corpora.items()
    }
    smallest = min(subject.examples.fit.num_examples for subject in subjects.values())
    sizes = check_sizes([int(size) for size in options.sizes], smallest)
    fits, kinds = list[Fit](), options.kinds()
    held_out: dict[str, Streams] = {}
    for name, subject in subjects.items():
        subject.announce(f"corpus {name}")
        fit, held_out[name] = (_read(subject, part, layers, options) for part in ("fit", "eval"))
        fitting: Keywords = {"seed": options.seed, "progress": subject.bar("fit")}
        if any(str(kind) == MAT for kind in kinds):
            fits += fit_sizes(name, fit, sizes, intercept=options.intercept, **fitting)
        if others := [kind for kind in kinds if str(kind) != MAT]:
            fits += fit_kinds(model, name, fit, others, sizes, **fitting)
    rows: list[Row] = []
    for found in fits:
        if found.problem:
            subject.announce(f"{found.n} examples of {found.corpus}, {found.problem}")
    for name, streams in held_out.items():
        resampling: Keywords = {"groups": subjects[name].examples.eval.rows, "seed": options.seed}
        bar = subject.bar(f"evaluate on {name}")
        rows += cross_rows(
            model, fits, name, streams, several=options.several, progress=bar, **resampling
        )
    text = {name: subject.text for name, subject in subjects.items()}
    figures = {PAIRS: _plot_pairs, CURVES: _plot_learning_curve}
    shown: Keywords = {"tables": table, "figures": figures}
    if options.several:
        figures = {PAIRS: _plot_kind_pairs, CURVES: _plot_kind_curves}
        shown = {"tables": kinds_table, "figures": figures}
    return report("cross_corpus", subject, options, rows, text=text, **shown)


def _read(subject: Subject, part: str, layers: Sequence[int], options: Options) -> Streams:
    """Returns h_layer of the examples of one part, by layer."""
    sites = {layer: stream_sites(subject.model.config.layers)[layer] for layer in layers}
    acts = subject.capture(
        getattr(subject.as_read, part),
        tuple(sites.values()),
        progress=subject.bar(f"capture {part}"),
    )
    return {layer: acts[site] for layer, site in sites.items()}


def table(rows: Sequence[Row]) -> str:
    """Returns two tables of means over the layers: all pairs with the most examples,
    and the learning curve.
    """
    means = [{**row, "fit_corpus": row["fit_corpus"] or "id"} for row in over_layers(rows)]
    most = max(row["n_fit"] for row in means)
    pairs = [row for row in means if row["n_fit"] in (0, most)]
    return "\n".join(
        [
            f"mean over layers; fitted on {most} examples of the corpora down, evaluated on those "
            "across",
            format_table(
                pairs,
                index="fit_corpus",
                columns=("metric", "eval_corpus"),
                metrics=("precision@1", "r2"),
            ),
            "\nprecision@1, mean over layers, over the examples fitted on (0: id); fit corpus, "
            "evaluation corpus",
            format_table(
                means,
                index="n_fit",
                columns=("fit_corpus", "eval_corpus"),
                metrics=("precision@1",),
            ),
        ]
    )


def _plot_pairs(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    title = f"{model_name(results)}: linear map fitted on one corpus, evaluated on another"
    return plot_pairs(results, **titled(drawing, title))


def _plot_learning_curve(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    title = f"{model_name(results)}: linear map over the examples it is fitted on"
    return plot_learning_curve(results, **titled(drawing, title))


def _plot_kind_pairs(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    title = f"{model_name(results)}: precision@1 of maps fitted on one corpus, evaluated on another"
    return plot_kind_pairs(results, **titled(drawing, title))


def _plot_kind_curves(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    title = f"{model_name(results)}: kinds of maps over the examples they are fitted on"
    return plot_kind_curves(results, **titled(drawing, title))
