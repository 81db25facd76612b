"""Measures how linear a model is from layer to layer and inside its blocks, and prints
and draws it.

Razzhigaev et al. 2024 (arXiv 2405.12250): in sample, adjusted, and held out with 95 %
intervals.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from jaxtyping import Float
from matplotlib.figure import Figure
from numpy import ndarray

from jmat.capture.activations import check_examples
from jmat.capture.moments import Pair
from jmat.capture.shared import SharedActivations
from jmat.data.batches import Batch
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Examples
from jmat.models.family import Transformer
from jmat.models.sites import SUBMODULES
from jmat.report.results import Results
from jmat.report.rows import Row
from jmat.report.tables import format_table
from jmat.runtime.annotations import Keywords
from jmat.runtime.checks import check_choice, check_same_kind, check_sklearn
from jmat.studies.fitting import TOKENS, ReadingSettings, as_read, sentence_batches, snapshots
from jmat.studies.linearity import plots
from jmat.studies.linearity import rows as rows_of
from jmat.studies.linearity.measure import Labels, Measured, measure, part_pairs, step_pairs
from jmat.studies.settings import Say, Subject, read_subject, report


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ReadingSettings):
    """Holds the settings of the study.

    Attributes:
      parts: also measure ln_1, attn, ln_2 and ffn of every block.
      all_pairs: measure all pairs of layers, not only neighbours.
      tokens: read `all` tokens of the sentences, or the `sampled` positions.
      intrinsic_dimension: also estimate that of every layer; needs scikit-learn.
    """

    parts: bool = True
    all_pairs: bool = False
    tokens: str = "all"
    intrinsic_dimension: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that is not valid."""
        super().__post_init__()
        check_choice("tokens", self.tokens, TOKENS)
        if self.intrinsic_dimension:
            check_sklearn("--intrinsic_dimension")


def run(
    model: Transformer,
    examples: Examples | Sequence[str],
    options: Options = Options(),
    *,
    against: Transformer | None = None,
    revisions: Mapping[str, Transformer] | None = None,
    tokenizer: Tokenizer | None = None,
    say: Say | None = None,
    shared: SharedActivations | None = None,
) -> Results:
    """Fits an affine map for every pair of sites on one text, and measures what it
    explains there and on another.

    Args:
      model: as `jmat.load` returns it.
      examples: examples, or texts, of which three quarters are fitted on.
      options: the settings.
      against: another model of this shape and tokenizer, whose figures are subtracted.
      revisions: earlier checkpoints of the model by name, in order.
      tokenizer: the model's; texts and masked models need it.
      say: prints what happens now, beside progress bars; None: quiet.
      shared: activations that other studies of the model read, too; None: this one
        reads its own.

    Returns:
      Rows for every pair of sites, for checkpoints (`checkpoint`), and for the other
      model and the difference to it (`against`). With checkpoints there is also the
      mean `angle` of neighbouring layers, in degrees: the strength of a block's jump.

    Raises:
      ValueError: as `jmat.studies.settings.read_subject`; a model of another shape.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"Entry {i} holds a list of {i % 7} values." for i in range(40)]
      >>> results = jmat.studies.linearity.run(model, texts, tokenizer=tokenizer)
      >>> figure, table = results.plot(), results.table()
    """
    subject = read_subject(
        model, examples, tokenizer, options, needs_head=False, say=say, shared=shared
    )
    others = {
        f"revision-{k}": (name, other) for k, (name, other) in enumerate((revisions or {}).items())
    }
    if against is not None:
        others["against"] = (against.name or "the other model", against)
    for name, other in others.values():
        check_comparable(model, name, other)
        check_examples(subject.examples, other.config)
    L, texts = model.config.layers, as_read(subject, options.tokens)
    fit, held_out = texts.fit, texts.eval
    labels: Labels = step_pairs(L, all_pairs=options.all_pairs) | (
        part_pairs(L) if options.parts else {}
    )
    batches = (
        sentence_batches(subject, fit, options.tokens, options),
        sentence_batches(subject, held_out, options.tokens, options),
    )
    subject.announce(
        f"{_tokens_in(batches[0])} tokens to fit on, {_tokens_in(batches[1])} to evaluate on"
    )

    def measured(
        kept: str, words: str, other: Transformer
    ) -> tuple[Measured, dict[tuple[Pair, str], Float[ndarray, " S"]]]:
        own = snapshots(subject, options, kept, None if other is model else other)
        found = measure(other, *batches, labels, snapshots=own, progress=subject.bar(words))
        asked: Keywords = {"angles": bool(revisions), "seed": options.seed}
        return found, rows_of.resampled(found, held_out, labels, **asked)

    found, figures = measured("fit", "", model)
    _announce_ranks(subject, found)
    rows = rows_of.linearity_rows(found, labels, figures) + rows_of.error_rows(found, labels)
    rows += rows_of.token_rows(found, held_out, labels, _decoder(tokenizer))
    if options.intrinsic_dimension:
        rows += rows_of.dimension_rows(subject.streams("eval"))
    for kept, (name, other) in others.items():
        found, values = measured(kept, f"{name}: ", other)
        key = "against" if kept == "against" else "checkpoint"
        theirs = rows_of.linearity_rows(found, labels, values)
        if key == "against":
            theirs += rows_of.difference_rows(labels, figures, values, len(found.tokens))
        rows += [{**row, key: name} for row in theirs]
    drawn = _figures(options, bool(revisions), "against" in others)
    return report("linearity", subject, options, rows, tables=table, figures=drawn)


def check_comparable(model: Transformer, name: str, other: Transformer) -> None:
    """Raises ValueError for a model whose kind or shape is not that of the model to
    compare it with.
    """
    check_same_kind(name, other.config.causal, model.name, model.config.causal)
    mine, theirs = ((m.config.layers, m.config.width, m.config.vocab_size) for m in (model, other))
    if mine != theirs:
        raise ValueError(
            f"{name} has (blocks, width, vocabulary) = {theirs}, {model.name} {mine}: only models "
            "of one shape and tokenizer can be compared layer by layer."
        )


def figure_names(*, revisions: bool, against: bool, all_pairs: bool) -> list[str]:
    """Returns the names of the figures that a run draws."""
    asked = {
        "checkpoints.png": revisions,
        "jump_strength.png": revisions,
        "difference.png": against,
        "pairs.png": all_pairs,
    }
    return ["linearity.png", "geometry.png", "errors.png", *(name for name in asked if asked[name])]


def table(rows: Sequence[Row]) -> str:
    """Returns the scores by layer, sub-modules, geometry, and the tokens at either end."""
    own, steps = rows_of.own_rows(rows), rows_of.step_rows(rows)
    kinds = {"": "in sample", "_adjusted": "adjusted", "_held_out": "held out"}
    names = {"linearity": "with the residual", "linearity_without_residual": "without"}
    look = {
        f"{score}{kind}": {"score": names[score], "kind": kinds[kind]}
        for score in names
        for kind in kinds
    }
    shown = [{**row, **look[row["metric"]]} for row in steps if row["metric"] in look]
    parts = [
        row for row in own if row["map"] in SUBMODULES and row["metric"] == "linearity_held_out"
    ]
    streams = [row for row in own if row["map"] == "stream"]
    metrics = (*rows_of.GEOMETRY, *rows_of.DIMENSIONS.values())
    lines = [
        "\nlinearity of the step from layer l to l + 1",
        format_table(shown, columns=("score", "kind")),
        "\nheld out, of sub-module inputs → outputs",
        format_table(parts, columns=("map",)),
        "\nwhat the block adds against the stream, cosine between neighbours, anisotropy",
        format_table(steps + streams, columns=("metric",), metrics=metrics),
    ]
    angles = [
        {**row, "checkpoint": row.get("checkpoint", "end")}
        for row in rows_of.next_steps(rows)
        if row["metric"] == rows_of.ANGLE and "against" not in row
    ]
    if angles:
        last = max(row["target"] for row in angles)
        order = sorted(angles, key=lambda row: row["checkpoint"] == "end")
        lines.append(
            f"\nangle between h_l and h_(l+1) in degrees; layer {last - 1} jumps to the last"
        )
        lines.append(format_table(order, index="checkpoint", columns=("metric", "layer")))
    for extreme in ("least_linear", "most_linear"):
        found = [row for row in own if row.get("extreme") == extreme][:8]
        words = ", ".join(f"{row['token']!r} {row['value']:.2g}" for row in found)
        lines.append(f"\n{extreme.replace('_', ' ')} tokens, and their mean error: {words}")
    compared = [
        row for row in rows_of.next_steps(rows) if row["metric"].endswith("held_out_difference")
    ]
    if compared:
        lines.append(f"\nheld-out linearity of the step, less that of {compared[0]['against']}")
        lines.append(format_table(compared, columns=("metric",), intervals=True))
    return "\n".join(lines)


def _figures(options: Options, revisions: bool, against: bool) -> dict[str, Callable[..., Figure]]:
    """Returns the figures by file name."""
    draws: dict[str, Callable[..., Figure]] = {
        "linearity.png": plots.plot_linearity,
        "geometry.png": plots.plot_geometry,
        "errors.png": plots.plot_errors,
        "checkpoints.png": plots.plot_checkpoints,
        "jump_strength.png": plots.plot_jump_strength,
        "difference.png": plots.plot_difference,
        "pairs.png": plots.plot_pairs,
    }
    names = figure_names(revisions=revisions, against=against, all_pairs=options.all_pairs)
    return {name: draws[name] for name in names}


def _tokens_in(batches: Sequence[Batch]) -> int:
    """Returns the number of tokens that are read."""
    return sum(int((batch.examples >= 0).sum()) for batch in batches)


def _decoder(tokenizer: Tokenizer | None) -> Callable[[int], str]:
    """Returns a function from a token's id to its text; the id itself where there is no
    tokenizer.
    """
    decode = getattr(tokenizer, "decode", None)
    return (lambda token: f"#{token}") if decode is None else (lambda token: decode([token]))


def _announce_ranks(subject: Subject, measured: Measured) -> None:
    """Prints where fewer dimensions than D vary, or fewer tokens were read; a norm's
    output always lacks one.
    """
    short = {
        source: rank
        for source, rank in measured.rank.items()
        if rank < subject.model.config.width - 1
    }
    if short:
        source, rank = min(short.items(), key=lambda item: item[1])
        subject.announce(
            f"{len(short)} of {len(measured.rank)} sources have less than full rank; least "
            f"{source}: {rank}"
        )
