"""Checks whether an experiment can use the text that its flags name.

    python -m experiments.check_text layer_jump --corpus=mails.txt --num_fit=2000

Reads the text and draws the sentences, which takes a second, and ends with exit code 1
and a sentence where there are too few, or where the experiment does not take these
flags. No model is needed: `experiments.regularizer_study` calls this before it trains
one. A data set of the hub is not downloaded.
"""

import importlib
import sys

from absl import flags

from experiments import cli, command, common, text_flags
from jmat.data import hub_corpora
from jmat.data.corpus import named_corpus
from jmat.data.examples import load_examples

FLAGS = common.FLAGS


def main(argv: list[str]) -> None:
    """Checks the text."""
    del argv
    text_flags.check_text_flags()
    source = FLAGS.examples or FLAGS.corpus
    if text_flags.is_prepared(source):
        examples = load_examples(source)
        counts = examples.fit.num_examples, examples.eval.num_examples
    elif named_corpus(source) not in hub_corpora.SOURCES:
        fit, held_out = text_flags.draw_sentences(source)
        counts = len(fit), len(held_out)
    else:
        print(f"{source} is on the hub: its sentences are counted when the experiment runs")
        return
    print(f"{source} will do: {counts[0]} sentences to fit on, {counts[1]} to evaluate on")


if __name__ == "__main__":
    named = "".join(sys.argv[1:2])
    if named in command.experiments():
        try:  # defines the flags of the experiment
            importlib.import_module(f"experiments.{sys.argv.pop(1)}")
        except flags.DuplicateFlagError:
            sys.exit(
                f"error: {named} reads text by flags of its own, which it checks itself; "
                "check_text is for experiments with the flags of layer_jump."
            )
    elif not named.startswith("--help"):
        sys.exit(
            "error: expected an experiment first, such as `jmat check_text layer_jump "
            f"--corpus=mails.txt`; got {named or 'none'}."
        )
    cli.run(main)
