"""Compares a model of jmat with that of transformers, site by site.

    python -m experiments.verify --model=gpt2-docs

Runs a checkpoint here and in transformers on PyTorch (eager attention; needs the `test`
extra) on the same tokens, padded on the right, on the left and not at all, and compares
every site. Prints a table and a verdict: MATCH, PRECISION (the difference is no more
than rounding explains; expected with --dtype=bfloat16) or WRONG, with the first site
that differs. The exit code is 1 for WRONG. Seconds for a small model; memory for the
model twice, or four times if its rounding has to be measured. With --out, writes
results.json there too.
"""

import dataclasses
import sys

import transformers
from absl import flags

from experiments import cli, common
from jmat.checkpoint import load_model
from jmat.checkpoint.load import find
from jmat.checkpoint.tokenizer import check_tokenizer, load_tokenizer
from jmat.data.encoding import check_text
from jmat.runtime.folders import output_path
from jmat.studies import verify

flags.DEFINE_string(
    "text", None, "Text to run the model on, instead of built-in English sentences."
)
for name in ("model", "revision", "dtype", "ignore_config", "out", "overwrite", "track"):
    flags.declare_key_flag(name)

FLAGS = common.FLAGS


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    if FLAGS.text is not None:
        check_text(FLAGS.text, "--text")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if FLAGS.track is not None and FLAGS.out is None:
        raise ValueError(f"--track={FLAGS.track} sends what a run writes: give --out, too.")
    if FLAGS.out is not None:
        out = output_path(FLAGS.out)
        cli.claim_folder(
            out, "verify", cli.own_flags(), reads=("model",), overwrite=FLAGS.overwrite
        )
    folder = find(FLAGS.model, revision=FLAGS.revision)
    cli.say(f"loading {FLAGS.model}")
    model = load_model(folder, dtype=FLAGS.dtype, ignore_config=tuple(FLAGS.ignore_config))
    tokenizer = load_tokenizer(folder)
    check_tokenizer(tokenizer, model.config, FLAGS.model)
    model.name, options = FLAGS.model, verify.Options(dtype=FLAGS.dtype)
    results = verify.run(
        model, FLAGS.text, options, tokenizer=tokenizer, folder=folder, say=cli.say
    )
    print(results.table())
    if FLAGS.out is not None:
        dataclasses.replace(results, config=cli.own_flags()).save(out)
        print(f"wrote {out}/results.json")
    if results.verdict == "WRONG":
        sys.exit(1)


if __name__ == "__main__":
    cli.run(main)
