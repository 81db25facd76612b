"""Does jmat compute what transformers computes?

    python -m experiments.verify --model=gpt2-docs

Runs a checkpoint here and in transformers on PyTorch (eager attention; needs the `test` extra) on the same tokens,
padded on the right, on the left and not at all, and compares every site. Prints a table and a verdict: MATCH, PRECISION
(the difference is no more than rounding explains; expected with --dtype=bfloat16) or WRONG, with the first site that
differs. The exit code is 1 for WRONG. Seconds for a small model; memory for the model twice, or four times if its
rounding has to be measured. With --out, writes results.json there too.
"""

import sys

import transformers
from absl import flags

from experiments import cli, common
from jmat.checkpoint import load_model, parameters
from jmat.checkpoint.load import find
from jmat.checkpoint.tokenizer import check_tokenizer, load_tokenizer
from jmat.data.corpus import sentences_fingerprint
from jmat.data.encoding import check_text
from jmat.report.results import write_results
from jmat.runtime.digests import model_hash
from jmat.runtime.folders import output_path
from jmat.studies.verify.report import SENTENCES, format_report, report_rows, verify

flags.DEFINE_string("text", None, "Text to run the model on, instead of built-in English sentences.")
for name in ("model", "revision", "dtype", "ignore_config", "out", "overwrite"):
    flags.declare_key_flag(name)

FLAGS = flags.FLAGS


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    if FLAGS.text is not None:
        check_text(FLAGS.text, "--text")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if FLAGS.out is not None:
        out = output_path(FLAGS.out)
        cli.claim_folder(out, "verify", common.own_flags(), reads=("model",), overwrite=FLAGS.overwrite)
    folder = find(FLAGS.model, revision=FLAGS.revision)
    cli.say(f"loading {FLAGS.model}")
    model = load_model(folder, dtype=FLAGS.dtype, ignore_config=tuple(FLAGS.ignore_config))
    tokenizer = load_tokenizer(folder)
    check_tokenizer(tokenizer, model.config, FLAGS.model)
    if FLAGS.text is not None and tokenizer is None:
        raise ValueError(f"{FLAGS.model} has no tokenizer, so --text cannot be read; leave it out for random tokens.")
    cli.say("comparing with transformers on PyTorch")
    report = verify(folder, model, tokenizer, dtype=FLAGS.dtype, text=FLAGS.text)
    print(format_report(report))
    if FLAGS.out is not None:
        text = SENTENCES if FLAGS.text is None else [FLAGS.text]
        source = {"source": "built-in sentences" if FLAGS.text is None else "--text"}
        read = source | {"eval": sentences_fingerprint(text)}
        rows, weights = report_rows(report), model_hash(parameters(model))
        write_results(out, "verify", common.own_flags(), rows, model_hash=weights, text=read)
        print(f"wrote {out}/results.json")
    sys.exit(1 if report.verdict == "WRONG" else 0)


if __name__ == "__main__":
    cli.run(main)
