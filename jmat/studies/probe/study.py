"""Fits a linear classifier to the stream at every layer, and measures its accuracy on
other examples.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Unpack

from jaxtyping import Shaped
from matplotlib.figure import Figure
from numpy import ndarray

from jmat.capture.activations import check_examples
from jmat.capture.shared import SharedActivations
from jmat.data.corpus import sentences_fingerprint
from jmat.data.encoding import Tokenizer
from jmat.data.examples import Examples, target_tokens
from jmat.data.reading import check_texts
from jmat.models.config import ModelConfig
from jmat.models.family import Transformer
from jmat.models.sites import stream_sites
from jmat.report.drawing import Drawing, titled
from jmat.report.names import PROBES, model_name
from jmat.report.plots import plot_by_layer
from jmat.report.results import Results
from jmat.report.rows import Content, Row
from jmat.report.tables import format_table
from jmat.runtime.annotations import Keywords
from jmat.runtime.checks import check_choice, check_same_kind, check_sklearn
from jmat.studies.probe.classifiers import CLASSIFIERS, check_labels, probe_rows
from jmat.studies.probe.labels import labelled_examples, token_classes
from jmat.studies.settings import Say, Settings, Subject, read_subject, report

FIGURE = "probe.png"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Holds the settings of the study.

    Attributes:
      classifier: `ridge` or `logistic`.
    """

    classifier: str = "ridge"

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that is not valid."""
        super().__post_init__()
        check_choice("classifier", self.classifier, CLASSIFIERS)

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError where scikit-learn, which fits the classifiers, is not
        installed.
        """
        check_sklearn("probe")


class Other(NamedTuple):
    """Holds a second model to probe.

    Attributes:
      model: as `jmat.load` returns it.
      tokenizer: its own.
      examples: what it reads where there are no labelled texts; None: the texts that
        the first model reads.
    """

    model: Transformer
    tokenizer: Tokenizer | None
    examples: Examples | Sequence[str] | None = None


def run(
    model: Transformer,
    examples: Examples | Sequence[str],
    options: Options = Options(),
    *,
    tokenizer: Tokenizer | None = None,
    labels: Sequence[str] | None = None,
    against: Other | None = None,
    say: Say | None = None,
    shared: SharedActivations | None = None,
) -> Results:
    """Fits a linear classifier to each layer of a model, and of a second one.

    Args:
      model: as `jmat.load` returns it.
      examples: examples, or texts, of which three quarters are fitted on.
      options: the settings.
      tokenizer: the model's.
      labels: the label of each text; default: the class of the token that the model
        predicts (word, piece of a word, number, punctuation, or end).
      against: a second model; its rows are named `… (against)`.
      say: prints what happens now, beside progress bars; None: quiet.
      shared: activations that other studies of the model read, too; None: this one
        reads its own.

    Returns:
      Rows of the accuracy at every layer, and of saying the most frequent label
      (`majority`).

    Raises:
      ValueError: as `jmat.studies.settings.read_subject`; no tokenizer; fewer than two
        labels; a second model that predicts in another way.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> texts = [f"Entry {i} holds a list of {i % 7} values." for i in range(40)]
      >>> results = jmat.studies.probe.run(model, texts, tokenizer=tokenizer)
      >>> figure, table = results.plot(), results.table()
    """
    options.check(model.config)
    if against is not None and labels is None:
        check_same_kind(
            against.model.name, against.model.config.causal, model.name, model.config.causal
        )
    subject, kinds = _read(Other(model, tokenizer, examples), examples, labels, options, say)
    inputs = {"": (dataclasses.replace(subject, shared=shared), kinds)}
    if against is not None:
        inputs[" (against)"] = _read(against, examples, labels, options, say)
    rows: list[Row] = []
    for name, (subject, kinds) in inputs.items():
        rows += [{**row, "map": row["map"] + name} for row in _probe(subject, kinds, options)]
    subject, _ = inputs[""]
    text = None
    if labels is not None:
        read = [f"{text} {label}" for text, label in zip(examples, labels, strict=True)]  # type: ignore[arg-type]
        text = {"source": "labels", "texts": sentences_fingerprint(read)}
    return report("probe", subject, options, rows, text=text, tables=table, figures={FIGURE: plot})


# of the examples to fit on (`fit`) and to evaluate on (`eval`)
Labels = Mapping[str, Shaped[ndarray, " _"]]


def _read(
    of: Other,
    shared: Examples | Sequence[str],
    labels: Sequence[str] | None,
    options: Options,
    say: Say | None,
) -> tuple[Subject, Labels]:
    """Returns what one model reads, and the labels of its examples."""
    model, tokenizer, examples = of
    masked = not model.config.causal
    if tokenizer is None:
        name = model.name or "the model"
        raise ValueError(
            f"{name} has no tokenizer, which it takes to read texts and to tell words from "
            "punctuation."
        )
    if labels is not None:
        if isinstance(shared, Examples) or len(shared) != len(labels):
            raise ValueError(f"there are {len(labels)} labels; expected a list of as many texts.")
        check_texts(shared, tokenizer)
        size: Keywords = {
            "max_length": model.config.num_positions,
            "masked": masked,
            "seed": options.seed,
        }
        examples, kinds = labelled_examples(shared, labels, tokenizer, **size)
        check_examples(examples, model.config)
        subject = Subject(
            model, examples, tokenizer, say=say, tokens_per_batch=options.tokens_per_batch
        )  # without a mask: nothing is predicted, [CLS] is read
        fit, held_out = (split.num_examples for _, split in subject.splits)
        subject.announce(f"{fit} labelled texts to fit on, {held_out} to evaluate on")
    else:
        examples = shared if examples is None else examples
        subject = read_subject(model, examples, tokenizer, options, needs_head=False, say=say)
        splits = dict(subject.splits)
        kinds = {
            name: token_classes(target_tokens(split, masked=masked), tokenizer)
            for name, split in splits.items()
        }
    check_labels(kinds["fit"])
    return subject, kinds


def _probe(subject: Subject, labels: Labels, options: Options) -> list[Row]:
    """Returns the rows of one model."""
    sites = stream_sites(subject.model.config.layers)
    fit, held_out = (dict(enumerate(acts.values())) for acts in subject.capture_both(sites))
    fitting: Keywords = {
        "classifier": options.classifier,
        "seed": options.seed,
        "progress": subject.bar("probe"),
    }
    return probe_rows(fit, held_out, labels, groups=subject.examples.eval.rows, **fitting)


def table(rows: Sequence[Row]) -> str:
    """Returns the table of accuracies by layer, and below it that of the most frequent
    label.
    """
    by_layer = [{**row, "target": row["layer"]} for row in rows if "layer" in row]
    lines = [
        format_table(by_layer, index="layer", columns=("metric", "map"), metrics=("accuracy",))
    ]
    return "\n".join(
        [*lines, *(f"{row['map']}: {row['value']:.3f}" for row in rows if "layer" not in row)]
    )


def plot(results: Content, **drawing: Unpack[Drawing]) -> Figure:
    """Draws accuracy by layer, that of the most frequent label as a level line."""
    rows = results["rows"]
    by_layer = [{**row, "target": row["layer"]} for row in rows if "layer" in row]
    layers = dict.fromkeys(row["layer"] for row in by_layer)
    level = [{**row, "layer": l, "target": l} for row in rows if "layer" not in row for l in layers]
    shown: Content = {**results, "rows": [*by_layer, *level]}
    drawing = titled(drawing, f"{model_name(results)}: probes")
    return plot_by_layer(shown, ("accuracy",), names=PROBES, **drawing)
