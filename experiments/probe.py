"""Measures the accuracy of a linear classifier on each layer.

    python -m experiments.probe --model=gpt2-docs
    python -m experiments.probe --model=gpt2 --labels=reviews.jsonl --against=my-finetuned-gpt2

Fits a linear classifier (ridge, or --classifier=logistic; scikit-learn) to the stream
at every layer, and reports its accuracy on held-out examples, with intervals, beside
that of always saying the most frequent label. --labels is a file of JSON lines,
`{"text": "…", "label": "…"}`: three quarters of them, drawn by --seed, to fit on, the
others to evaluate on (--num_fit and --num_eval count sentences of a corpus). A causal
model is read at a text's last token, a masked one at [CLS]. Without a file, probes
predict the class of the next token (of the masked one) at the corpus's positions:
word, piece of a word, number, punctuation, or end. --against gives a second model, such
as the same one after fine-tuning or pruning. Writes results.json and probe.png. About
two minutes on two CPU cores with the bundled models. Expect accuracy to rise over the
first layers and to flatten.
"""

from absl import flags

from experiments import cli, common, figure_flags, text_flags
from jmat.checkpoint.load import load
from jmat.runtime.annotations import Keywords
from jmat.runtime.checks import check_same_kind
from jmat.studies import probe
from jmat.studies.probe.labels import read_labelled

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(figure_flags)
_LABELS = flags.DEFINE_string(
    "labels", None, "Labelled texts, JSON lines; default: the class of the next token."
)
flags.DEFINE_enum(
    "classifier", "ridge", probe.CLASSIFIERS, "Classifier that is fitted to each layer."
)
_AGAINST = flags.DEFINE_string(
    "against", None, "A second model to probe: a bundled name, hub id or folder."
)


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    texts, labels = read_labelled(_LABELS.value) if _LABELS.value else (None, None)
    job = common.start(
        "probe", writes=(probe.FIGURE,), options=probe.Options, reads=("labels", "against")
    )
    other = (
        None
        if _AGAINST.value is None
        else load_other(job, _AGAINST.value, reads_corpus=labels is None)
    )
    examples = texts or job.examples
    if other is not None and labels is None:
        other = other._replace(
            examples=text_flags.prepare_examples(other.model, other.tokenizer, job.source)
        )
    given: Keywords = {"labels": labels, "against": other, **job.context}
    results = probe.run(job.model, examples, job.options(probe.Options), **given)
    job.publish(
        results, text={**dict(results.text or {}), "source": _LABELS.value} if labels else None
    )


def load_other(job: common.Job, name: str, *, reads_corpus: bool) -> probe.Other:
    """Returns the model of --against. Raises ValueError for one that reads the corpus
    at other positions.
    """
    cli.say(f"loading {name}")
    model, tokenizer = load(name, dtype=job.config["dtype"])
    if reads_corpus:
        check_same_kind(name, model.config.causal, job.config["model"], job.model.config.causal)
    return probe.Other(model, tokenizer)


if __name__ == "__main__":
    cli.run(main)
