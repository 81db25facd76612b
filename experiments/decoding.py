"""Compares ways to write text: plain, with drafts that are checked, and with exits.

    python -m experiments.decoding --model=gpt2-docs
    python -m experiments.decoding --model=gpt2-docs --layers=6,7 --draft_tokens=1,2,3,4
    python -m experiments.decoding --model=gpt2-docs --prompts=prompts.txt --turns=0

Fits maps to the last layer, and writes texts behind the same prompts in every way. A
draft takes its tokens from an early layer through a map and the head, or copies them
from the text; the model checks several of them in one pass, so that the text stays its
own. With an exit, each token is that of the first layer that is sure enough, and the
text changes (docs/generation.md). For each way: the share of the plain text's tokens
that stand at the same place, tokens before the first difference, the share of drafted
tokens that were accepted, tokens a check, the layer at which tokens left, tokens a
second, and how many times as fast as plain text that is. Writes results.json,
decoding.png, the maps, and decoding.json with all tokens and times. Expect later layers
to be accepted more often, and most drafts to take longer than plain text where the head
costs as much as a few blocks. Some two minutes on two CPU cores with the bundled model.
"""

from absl import flags

from experiments import cli, common, figure_flags, fit_flags
from jmat.data.corpus import text_sentences
from jmat.maps.files import MAPS_FILES
from jmat.maps.kinds import AFFINE
from jmat.studies import decoding

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(figure_flags)
flags.adopt_module_key_flags(fit_flags)
_PROMPTS = flags.DEFINE_string(
    "prompts",
    None,
    "Text file with a prompt in each line; default: the first --prompt_tokens tokens of sentences "
    "to evaluate on.",
)
flags.DEFINE_list(
    "ways",
    list(decoding.WAYS),
    "Ways to write beside plain text: draft (by an early layer), carry (a draft that sees the "
    "token before, too), lookup (a draft that is copied from the text), exit (tokens leave early).",
)
flags.DEFINE_list(
    "kinds", [AFFINE], "Kinds of maps that draft, and at which tokens leave, such as mat,affine."
)
flags.DEFINE_list(
    "layers",
    [],
    "Layers that draft, and at which tokens leave, such as 4,6; default: half and three quarters "
    "of the blocks, and all but one.",
)
flags.DEFINE_list("draft_tokens", [], "Lengths of drafts, in tokens; default: 1,2.")
flags.DEFINE_integer(
    "short_list",
    0,
    "Number of frequent words that are drafted, at less work; 0: all words.",
    lower_bound=0,
)
flags.DEFINE_list(
    "fills",
    list(decoding.FILLS),
    "Where keys and values of skipped blocks come from: recompute, copy, map, direct.",
)
flags.DEFINE_enum("confidence", "gap", decoding.CONFIDENCES, "By which a token leaves early.")
flags.DEFINE_list(
    "thresholds",
    [],
    "Confidence above which a token leaves, such as 0.5,0.9, which is the default.",
)
flags.DEFINE_integer(
    "num_prompts", 16, "Number of texts, which are written at once.", lower_bound=1
)
flags.DEFINE_integer("prompt_tokens", 8, "Length of prompts from the corpus.", lower_bound=1)
flags.DEFINE_integer(
    "new_tokens", 64, "Length of each new text; no stop token ends it.", lower_bound=2
)
flags.DEFINE_float(
    "temperature", 0.0, "0: the most likely token; above it, tokens are drawn.", lower_bound=0
)
flags.DEFINE_integer(
    "turns",
    3,
    "Number of times that each way is timed; 0: none, and two runs leave the same files.",
    lower_bound=0,
)
WRITES = (decoding.FIGURE, decoding.TEXTS, *MAPS_FILES, common.SNAPSHOTS)


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    path = _PROMPTS.value
    prompts = None if path is None else text_sentences(path)
    job = common.start("decoding", writes=WRITES, options=decoding.Options, reads=("prompts",))
    options = job.options(decoding.Options)
    job.publish(decoding.run(job.model, job.examples, options, prompts=prompts, **job.context))


if __name__ == "__main__":
    cli.run(main)
