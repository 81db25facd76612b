"""Measures the cost of each block's removal, or of a linear map in its place.

    python -m experiments.prune --model=gpt2-docs --method=delete,map,merge --remove=4

Orders the blocks by --score, removes 1, 2, … --remove of them, and holds each pruned
model against the whole one on every prediction of the held-out sentences' tokens (but
the first ones, which nothing predicts): perplexity, KL (nats) and top-1 agreement
(`precision@1`), with intervals over sentences; parameters, FLOPs and measured time a
token.

--score is `kl` by default, the KL that the removal of a block costs, measured on
--score_sentences of the fit sentences. The others are read from the stream at the fit
examples' positions (`experiments.linearity` reads all tokens instead): `linearity` is
the order of arXiv 2405.12250, `linearity_without_residual` ours. A table has all of
them for every block. --piece_length=512 cuts a text file into pieces, as that paper
does with enwik8.

--method says what happens to a removed block: `delete` leaves it out, `map` replaces it
by a map fitted at the examples' positions, `distil` trains these maps on, `merge` folds
a map into the feed-forward part before it, so that an ordinary smaller checkpoint
remains (pre-norm models). Give several to compare them. With --save, OUT/model is the
pruned model: a Hugging Face folder, or for `map` and `distil` the whole model with its
maps, which `jmat.studies.prune.surgery.load_pruned` and `experiments.tasks` read.

Writes results.json, prune.png and the maps of the most pruned model. Two minutes on two
CPU cores with the bundled model, and some minutes more for each model that is
distilled; a model of 30 blocks and 135 million parameters takes ten minutes with
--num_fit=2000 --num_eval=200 --remove=4. Expect `map` to lose less than `delete`, and
`distil` less than `map`. `merge` lies between `delete` and `map` where there are many
times as many examples as the feed-forward part is wide, and else above both
(--merge_from=output needs fewer). It never takes block 0, so by a score that names
block 0 first the methods remove different blocks: compare rows of the same `blocks`,
which share a tick of the figure. `linearity_without_residual` can name blocks that a
model cannot do without: of gpt2-docs it removes block 0 first (perplexity 45 → 8,000),
`linearity` block 7 (45 → 57), `block_influence` block 6 (45 → 52), and `kl` block 4, 5
or 6, whichever the sentences make the cheapest (45 → 51).
"""

from absl import flags

from experiments import cli, common, figure_flags
from jmat.checkpoint.load import find
from jmat.maps.files import MAPS_FILES
from jmat.studies import prune
from jmat.studies.prune.heal import LOSSES
from jmat.studies.prune.merge import FEATURES
from jmat.studies.prune.options import REFITS
from jmat.studies.prune.scores import SCORES
from jmat.studies.prune.stand_ins import METHODS

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(figure_flags)
flags.DEFINE_list(
    "method", ["delete", "map"], f"Treatment of removed blocks: {', '.join(METHODS)}."
)
flags.DEFINE_integer("remove", 1, "Remove 1, 2, … so many blocks.", lower_bound=1)
flags.DEFINE_bool("save", False, "Write the most pruned model to OUT/model; takes one --method.")
flags.DEFINE_enum(
    "score",
    "kl",
    SCORES,
    "Score that orders the blocks: the KL that removing one costs "
    "(kl), or one of what a block does to the stream (jmat.studies.prune.scores).",
)
flags.DEFINE_bool("rescore", False, "Compute the scores anew after each removal, on what is left.")
flags.DEFINE_bool("spans", False, "Remove the best span of k neighbouring blocks, for each k.")
flags.DEFINE_enum(
    "refit",
    "original",
    REFITS,
    "Maps from the whole model's stream, or one after another from what the maps before left.",
)
flags.DEFINE_float("ridge", 0.0, "Penalty on the maps, on the scale of a sum over examples.", 0.0)
flags.DEFINE_enum(
    "merge_from",
    "hidden",
    FEATURES,
    "merge: map the FFN's hidden activations (F x D) or its output (D x D; for few examples).",
)
flags.DEFINE_integer("score_sentences", 256, "--score=kl: sentences to measure it on.", 1)
flags.DEFINE_integer("distil_steps", 300, "distil: steps for each pruned model.", 1)
flags.DEFINE_float("learning_rate", 3e-3, "distil: Adam's, at the start.", 0.0)
flags.DEFINE_float("kl_weight", 0.0, "distil: weight of the KL on the predictions.", 0.0)
flags.DEFINE_enum(
    "distil_loss",
    "relative",
    LOSSES,
    "distil: squared error of the streams, relative to each token's stream, or the paper's plain "
    "mean.",
)

FLAGS = flags.FLAGS


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    writes = [prune.FIGURE, *MAPS_FILES, *([prune.MODEL] if FLAGS.save else [])]
    job = common.start("prune", writes=writes, options=prune.Options)
    options = job.options(prune.Options)
    source = find(FLAGS.model, revision=FLAGS.revision)
    results = prune.run(job.model, job.examples, options, source=source, **job.context)
    job.publish(results)
    if results.failures:
        raise ValueError(f"{' '.join(results.failures)} All else is in {job.out}/results.json.")


if __name__ == "__main__":
    cli.run(main)
