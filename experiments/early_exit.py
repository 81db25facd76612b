"""Measures the blocks and the time that early exit saves, and its cost in accuracy.

    python -m experiments.early_exit --model=gpt2-docs

Dynamic exit with `mat` and `id` by the paper's rule: leave before block l + 1 when the
gap between the two largest probabilities is above `0.9 lambda + 0.1 exp(-4 t / N)`, for
the token at position t of texts of mean length N. Beside it other confidences
(max_probability, entropy, patience), the fixed exit at one layer for all, and what the
paper leaves out: FLOPs with every check's map and head counted, and the wall clock of a
forward pass that truly stops, against the full pass in the same run. `flops_ratio` is
of a whole sentence up to the position that is read, none of it computed before: blocks
over all its tokens, one check a layer. `flops_ratio_token` is of one generated token,
for which the keys and values of the earlier ones are there: the same checks beside
blocks over a single token, so they weigh much more (gpt2-docs, exit at layer 1: 0.29,
not 0.145). Filling in the keys and values that a token leaves out by its early exit is
not counted.

The wall clock is that of the machine (`cpu` in results.json), not the method's. A check
that may stop the loop must be waited for: starting its program and copying the answer
to the host are added up, where the full pass hides them behind the blocks. With small
blocks that counts more than FLOPs: of one sentence of 16 tokens, a block of gpt2-docs
took 0.27 ms on an AMD EPYC (0.1 ms to start it), a check 0.12 ms, four times as long as
its FLOPs at the block's rate, and the cheap check 0.06 ms. One sentence at a time,
expect 1.1 to 1.9 times the full pass with a check at every layer, and 0.9 to 1.2 times
with the cheap check; two quiet machines differed by so much.

--check_every (look at every so many layers) and --short_list (read only the likeliest
words of the vocabulary) make the checks cheap. `layers_saved@0.95` is read off the line
between the two neighbouring lambdas. Ends with a lambda calibrated to keep disagreement
with the full model under --delta with confidence 1 - --epsilon, verified on other
sentences; null where none does. All thresholds come from one pass over the model. The
table has no `mat` at the lambdas that the paper's code tries for `id` alone. Writes
results.json, early_exit.png and the maps. A minute or two on two CPU cores with the
bundled model.
"""

from absl import flags

from experiments import cli, common, figure_flags
from jmat.maps.files import MAPS_FILES
from jmat.studies import early_exit
from jmat.studies.early_exit.study import FIGURE

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(figure_flags)
flags.DEFINE_integer(
    "check_every", 2, "The cheap check looks at every so many layers.", lower_bound=1
)
flags.DEFINE_integer(
    "short_list", 512, "The cheap check reads so many words of the head.", lower_bound=2
)
flags.DEFINE_float("delta", 0.1, "Disagreement with the full model to stay under.", 0.0, 1.0)
flags.DEFINE_float("epsilon", 0.05, "Chance that the bound on disagreement fails.", 0.0, 1.0)
flags.DEFINE_integer(
    "timing_examples", 64, "Examples timed, if there are as many; 0 times nothing.", lower_bound=0
)
WRITES = (FIGURE, *MAPS_FILES)


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    job = common.start("early_exit", writes=WRITES, options=early_exit.Options, many_hosts=True)
    job.publish(
        early_exit.run(job.model, job.examples, job.options(early_exit.Options), **job.context)
    )


if __name__ == "__main__":
    cli.run(main)
