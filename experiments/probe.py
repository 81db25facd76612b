"""What can a linear classifier read off each layer?

    python -m experiments.probe --model=gpt2-docs
    python -m experiments.probe --model=gpt2 --labels=reviews.jsonl --against=my-finetuned-gpt2

Fits a linear classifier (ridge, or --classifier=logistic; scikit-learn) to the stream at every layer, and reports its
accuracy on held-out examples, with intervals, beside that of always saying the most frequent label. --labels is a file
of JSON lines, `{"text": "…", "label": "…"}`: three quarters of them, drawn by --seed, to fit on, the others to evaluate
on (--num_fit and --num_eval count sentences of a corpus). A causal model is read at a text's last token, a masked one
at [CLS]. Without a file, probes predict the class of the next token (of the masked one) at the corpus's positions:
word, piece of a word, number, punctuation, or end. --against gives a second model, such as the same one after
fine-tuning or pruning. Writes results.json and probe.png. About two minutes on two CPU cores with the bundled models.
Expect accuracy to rise over the first layers and to flatten.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import flags

from experiments import cli, common
from jmat.capture.activations import check_examples
from jmat.checkpoint.load import load
from jmat.data.corpus import sentences_fingerprint
from jmat.data.examples import Examples, target_tokens
from jmat.models.sites import stream_sites
from jmat.report.plots import plot_by_layer
from jmat.report.tables import format_table
from jmat.studies.probe import CLASSIFIERS, check_labels, labelled_examples, probe_rows, read_labelled, token_classes
from jmat.studies.settings import Subject

flags.adopt_module_key_flags(common)
_LABELS = flags.DEFINE_string("labels", None, "Labelled texts, JSON lines; default: the class of the next token.")
_CLASSIFIER = flags.DEFINE_enum("classifier", "ridge", CLASSIFIERS, "Classifier that is fitted to each layer.")
_AGAINST = flags.DEFINE_string("against", None, "A second model to probe: a bundled name, hub id or folder.")


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    common.check_sklearn("probe")
    labelled = read_labelled(_LABELS.value) if _LABELS.value else None
    job = common.start("probe", writes=("probe.png",), reads=("labels", "against"))
    other = None
    if _AGAINST.value:
        cli.say(f"loading {_AGAINST.value}")
        other = load(_AGAINST.value, dtype=job.config["dtype"])
        if labelled is None:
            common.check_same_kind(_AGAINST.value, job.model, other[0])
    inputs = labelled_inputs(job, job.config["model"], job.model, job.tokenizer, labelled)
    others = None if other is None else labelled_inputs(job, str(_AGAINST.value), *other, labelled)
    rows = probe(job, job.model, *inputs)
    if other is not None and others is not None:
        rows += [{**row, "map": f"{row['map']} (against)"} for row in probe(job, other[0], *others)]
    texts = [f"{text} {label}" for text, label in zip(*labelled, strict=True)] if labelled else []
    read = {"source": _LABELS.value, "texts": sentences_fingerprint(texts)} if labelled else job.text()
    results = job.finish(rows, text=read)
    by_layer = [{**row, "target": row["layer"]} for row in rows if "layer" in row]
    layers = dict.fromkeys(row["layer"] for row in by_layer)
    level = [{**row, "layer": l, "target": l} for row in rows if "layer" not in row for l in layers]
    shown = {**results, "rows": [*by_layer, *level]}
    figure = cli.drawn(
        job.path("probe.png"), plot_by_layer, shown, ("accuracy",), title=f"{job.config['model']}: probes"
    )
    print(format_table(by_layer, index="layer", columns=("metric", "map"), metrics=("accuracy",)))
    for row in rows:
        if "layer" not in row:
            print(f"{row['map']}: {row['value']:.3f}")
    cli.print_notes(rows)
    print(f"wrote {job.out}/results.json{figure}")


Inputs = tuple[Examples, Mapping[str, np.ndarray], int | None]


def labelled_inputs(
    job: common.Job, name: str, model: Any, tokenizer: Any, labelled: tuple[list[str], list[str]] | None
) -> Inputs:
    """Returns the examples of one model, their labels, and the token that masks what is predicted, if one does."""
    if tokenizer is None:
        raise ValueError(f"{name} has no tokenizer, which it takes to read texts and to tell words from punctuation.")
    masked = not model.config.causal
    if labelled:
        size: dict[str, Any] = {"max_length": model.config.num_positions, "masked": masked, "seed": job.config["seed"]}
        examples, labels = labelled_examples(labelled[0], labelled[1], tokenizer, **size)
        cli.say(f"{examples.fit.num_examples} labelled texts to fit on, {examples.eval.num_examples} to evaluate on")
    else:
        examples = job.examples if model is job.model else common.prepare_examples(model, tokenizer, job.source)
        splits = {"fit": examples.fit, "eval": examples.eval}
        labels = {name: token_classes(target_tokens(split, masked=masked), tokenizer) for name, split in splits.items()}
    check_labels(labels["fit"])
    check_examples(examples, model.config)
    return examples, labels, tokenizer.mask_token_id if masked and not labelled else None


def probe(
    job: common.Job, model: Any, examples: Examples, labels: Mapping[str, np.ndarray], mask_token: int | None
) -> list[dict[str, Any]]:
    """Returns the rows of one model."""
    subject = Subject(model, examples, mask_token=mask_token, say=cli.say)
    both = common.capture_both(subject, stream_sites(model.config.layers))
    fit, held_out = (dict(enumerate(acts.values())) for acts in both)
    return probe_rows(
        fit,
        held_out,
        labels,
        classifier=_CLASSIFIER.value,
        groups=examples.eval.rows,
        seed=job.config["seed"],
        progress="probe",
    )


if __name__ == "__main__":
    cli.run(main)
