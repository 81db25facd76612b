"""What is a model worth, whole or pruned, on text and on questions with given answers?

    python -m experiments.tasks --model=runs/prune-gpt2-docs/model --text=docs.txt --tasks=mine.jsonl
    python -m experiments.tasks --model=gpt2 --tasks=arc_easy,copa

Perplexity of every text file (one sentence or paragraph a line), and accuracy on every task: one of the hub by name
(arc_easy, arc_challenge, boolq, cb, copa, rte, hellaswag; needs the extra `hub`), or a JSONL file with one question a
line, `{"question" or "context": text, "choices": [texts], "answer": index}`, answered by the choice of highest
log-likelihood, as it is (`accuracy`) and per character (`accuracy_norm`). A question is asked as `Question: …`, and
`Answer:` on the next line; a context is simply continued; a space stands before each choice. Causal models only;
--model also takes what `experiments.prune --save` wrote, with maps or without. Prints a table and writes results.json.
Seconds for a small model and a few hundred lines. Chance is 1 / choices: a small model is hardly above it, and a pruned
one should not fall to it.
"""

from absl import flags

from experiments import cli, common
from experiments.file_flags import define_files
from jmat.checkpoint import parameters
from jmat.data.corpus import sentences_fingerprint, text_sentences
from jmat.report.results import write_results
from jmat.report.tables import format_table
from jmat.runtime.digests import model_hash
from jmat.runtime.folders import check_output_folder
from jmat.studies.prune.surgery import load_pruned
from jmat.studies.tasks import check_causal, check_choices, read_task, task_rows, text_rows

_TEXT = define_files("text", "Text files, one sentence or paragraph a line: perplexity.")
_TASKS = define_files("tasks", "JSONL files of multiple-choice questions, or names of the hub: accuracy.")
for name in ("model", "revision", "dtype", "ignore_config", "seed", "tokens_per_batch", "out", "overwrite"):
    flags.declare_key_flag(name)

FLAGS = flags.FLAGS


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    if "" in (*_TEXT.value, *_TASKS.value):
        raise ValueError("--text or --tasks holds an empty name; expected files, or names of the hub.")
    if not _TEXT.value and not _TASKS.value:
        raise ValueError("nothing to measure: give text files with --text, or tasks with --tasks.")
    check_output_folder(common.output_folder("tasks"))
    texts = {path: text_sentences(path) for path in _TEXT.value}
    tasks = {path: read_task(path) for path in _TASKS.value}
    if FLAGS.shard_parameters:
        raise ValueError("tasks runs on one device: leave out --shard_parameters.")
    config, out, _ = common.claim("tasks", reads=("text", "tasks"))
    cli.say(f"loading {FLAGS.model}")
    ignore = tuple(FLAGS.ignore_config)
    model, tokenizer, sites = load_pruned(FLAGS.model, dtype=FLAGS.dtype, revision=FLAGS.revision, ignore_config=ignore)
    check_causal(model, tokenizer, FLAGS.model)
    for questions in tasks.values():
        check_choices(model, tokenizer, questions)
    settings = {"seed": FLAGS.seed, "sites": sites, "tokens_per_batch": common.tokens_per_batch()}
    rows = []
    for path, lines in texts.items():
        rows += text_rows(model, tokenizer, path, lines, progress=path, **settings)
    for path, questions in tasks.items():
        rows += task_rows(model, tokenizer, path, questions, progress=path, **settings)
    read = {path: sentences_fingerprint(lines) for path, lines in texts.items()}
    read |= {path: sentences_fingerprint(map(repr, questions)) for path, questions in tasks.items()}
    write_results(out, "tasks", config, rows, model_hash=model_hash(parameters(model)), text=read)
    for index in ("text", "task"):
        if any(index in row for row in rows):
            print(format_table(rows, index=index, columns=("metric",), intervals=True))
    cli.print_notes(rows)
    print(f"wrote {out}/results.json")


if __name__ == "__main__":
    cli.run(main)
