"""Measures a model, whole or pruned, on text and on questions with given answers.

    python -m experiments.tasks --model=runs/pruned/model --text=docs.txt --tasks=mine.jsonl
    python -m experiments.tasks --model=gpt2 --tasks=arc_easy,copa

Perplexity of every text file (one sentence or paragraph a line), and accuracy on every
task: one of the hub by name (arc_easy, arc_challenge, boolq, cb, copa, rte, hellaswag;
needs the extra `hub`), or a JSONL file with one question a line, `{"question" or
"context": text, "choices": [texts], "answer": index}`, answered by the choice of
highest log-likelihood, as it is (`accuracy`) and per character (`accuracy_norm`). A
question is asked as `Question: …`, and `Answer:` on the next line; a context is simply
continued; a space stands before each choice. Causal models only; --model also takes
what `experiments.prune --save` wrote, with maps or without. Prints a table and writes
results.json. Seconds for a small model and a few hundred lines. Chance is 1 / choices:
a small model is hardly above it, and a pruned one should not fall to it.
"""

import dataclasses

from absl import flags

from experiments import cli, common
from experiments.file_flags import define_files
from jmat.data.corpus import text_sentences
from jmat.runtime.folders import check_output_folder
from jmat.studies import tasks
from jmat.studies.prune.surgery import load_pruned

_TEXT = define_files("text", "Text files, one sentence or paragraph a line: perplexity.")
_TASKS = define_files(
    "tasks", "JSONL files of multiple-choice questions, or names of the hub: accuracy."
)
for name in (
    "model",
    "revision",
    "dtype",
    "ignore_config",
    "seed",
    "tokens_per_batch",
    "out",
    "overwrite",
    "track",
):
    flags.declare_key_flag(name)

FLAGS = flags.FLAGS


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    if "" in (*_TEXT.value, *_TASKS.value):
        raise ValueError(
            "--text or --tasks holds an empty name; expected files, or names of the hub."
        )
    if not _TEXT.value and not _TASKS.value:
        raise ValueError("nothing to measure: give text files with --text, or tasks with --tasks.")
    check_output_folder(common.output_folder("tasks"))
    texts = {path: text_sentences(path) for path in _TEXT.value}
    questions = {path: tasks.read_task(path) for path in _TASKS.value}
    if FLAGS.shard_parameters:
        raise ValueError("tasks runs on one device: leave out --shard_parameters.")
    options = common.flag_options(tasks.Options)
    config, out, _ = common.claim("tasks", reads=("text", "tasks"))
    cli.say(f"loading {FLAGS.model}")
    ignore = tuple(FLAGS.ignore_config)
    model, tokenizer, sites = load_pruned(
        FLAGS.model, dtype=FLAGS.dtype, revision=FLAGS.revision, ignore_config=ignore
    )
    results = tasks.run(
        model, questions, options, tokenizer=tokenizer, texts=texts, sites=sites, say=cli.say
    )
    dataclasses.replace(results, config=config).save(out)
    print(results.table())
    print(f"wrote {out}/results.json")


if __name__ == "__main__":
    cli.run(main)
