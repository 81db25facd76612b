"""What can a linear classifier read off each layer?

    python -m experiments.probe --model=gpt2-docs
    python -m experiments.probe --model=gpt2 --labels=reviews.jsonl --against=my-finetuned-gpt2

Fits a linear classifier (ridge, or --classifier=logistic; scikit-learn) to the stream at every layer, and reports its
accuracy on held-out examples, with intervals, beside that of always saying the most frequent label. --labels is a file
of JSON lines, `{"text": "…", "label": "…"}`: three quarters of them, drawn by --seed, to fit on, the others to evaluate
on (--num_fit and --num_eval are the corpus's); a causal model is read at a text's last token, a masked one at [CLS].
Without a file, probes predict the class of the next token (of the masked one) at the corpus's positions: word, piece of
a word, number, punctuation, or end. --against gives a second model, such as the same one after fine-tuning or pruning.
Writes results.json and probe.png. About two minutes on two CPU cores with the bundled models. Expect accuracy to rise
over the first layers and to flatten.
"""

from typing import Any

from absl import flags

from experiments import cli, common
from jmat.capture import check_examples, stream_sites, target_tokens
from jmat.checkpoint.load import load
from jmat.data.corpus import sentences_fingerprint
from jmat.plots import plot_by_layer
from jmat.probe import CLASSIFIERS, check_labels, labelled_examples, probe_rows, read_labelled, token_classes
from jmat.results import format_table

flags.adopt_module_key_flags(common)
_LABELS = flags.DEFINE_string("labels", None, "Labelled texts, JSON lines; default: the class of the next token.")
_CLASSIFIER = flags.DEFINE_enum("classifier", "ridge", CLASSIFIERS, "What is fitted to each layer.")
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
    rows = probe(job, job.model, job.tokenizer, labelled)
    if other is not None:
        rows += [{**row, "map": f"{row['map']} (against)"} for row in probe(job, *other, labelled)]
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


def probe(job: common.Job, model: Any, tokenizer: Any, labelled: Any) -> list[dict[str, Any]]:
    """Rows for one model."""
    masked = not model.config.causal
    mask_token = tokenizer.mask_token_id if masked and not labelled else None
    seed = job.config["seed"]
    if labelled:
        size: dict[str, Any] = {"max_length": model.config.num_positions, "masked": masked, "seed": seed}
        examples, labels = labelled_examples(labelled[0], labelled[1], tokenizer, **size)
        cli.say(f"{examples.fit.num_examples} labelled texts to fit on, {examples.eval.num_examples} to evaluate on")
    else:
        examples = job.examples if model is job.model else common.prepare_examples(model, tokenizer, job.source)
        splits = {"fit": examples.fit, "eval": examples.eval}
        labels = {name: token_classes(target_tokens(split, masked=masked), tokenizer) for name, split in splits.items()}
    check_labels(labels["fit"])
    check_examples(examples, model.config)
    sites = stream_sites(model.config.layers)
    both = common.capture_both(model, examples, sites, mask_token)
    fit, held_out = (dict(enumerate(acts.values())) for acts in both)
    return probe_rows(
        fit, held_out, labels, classifier=_CLASSIFIER.value, groups=examples.eval.rows, seed=seed, progress="probe"
    )


if __name__ == "__main__":
    cli.run(main)
