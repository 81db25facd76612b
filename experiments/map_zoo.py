"""Compares kinds of maps between layers: their predictions and their memory.

    python -m experiments.map_zoo --model=gpt2-docs
    python -m experiments.map_zoo --kinds=mat,rank:64,rank:64+int8 --layers=2,4,6

Fits every kind of map from every layer to the final one, all from one set of
statistics, and evaluates each on held-out sentences against the full model:
precision@k, recall@k, surprisal and KL (nats), perplexity of the text's own tokens, and
r2, with 95 % intervals; the difference of each kind from `mat` is paired. Beside them
stand the parameters and bytes of each kind, and its work against that of a block.
Writes results.json, map_zoo.png (by layer), map_zoo_bytes.png (KL against bytes) and
the maps. Expect `affine` to be best, its int8 form to lose nothing at a quarter of the
bytes, and low ranks to lose much. Some three minutes on two CPU cores with the bundled
model. --fit_tokens and --route are as for layer_jump.

--pairs names other jumps than those to the final layer, and --site the maps of a part of
every block, from its input to its output. r2 and the linearity of arXiv 2405.12250
(with the residual and without) are there for all of them. Predictions are there for
maps to the final layer, which the head reads; for all others with --then_run: the map
stands in, and the blocks behind it run.

--models names several models. Each is run as if it were alone, in OUT/NAME; a model that is
finished is not run again when the same command is started again. OUT has the rows of
all of them, tables family by family, and figures of all models.

Kinds that begin with `jacobian` read the sentences to fit on as prompts, until the
relative error of every layer is small enough: some ten minutes more with the bundled
model. Their rows have this error, with its interval.
"""

from absl import flags

from experiments import cli, common, figure_flags, fit_flags, several_models
from experiments.file_flags import define_files
from jmat.maps.files import MAPS_FILES
from jmat.maps.weighting import EQUAL, WEIGHTS
from jmat.studies import map_zoo
from jmat.studies.map_zoo.jumps import SITES, STREAM

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(figure_flags)
flags.adopt_module_key_flags(fit_flags)
flags.DEFINE_list(
    "kinds", map_zoo.KINDS, "Kinds of maps, such as mat,ridge:1e-2,rank:64,rank:64+int8."
)
flags.DEFINE_enum(
    "weights",
    EQUAL,
    WEIGHTS,
    "Weights of the tokens in closed forms. norms: 1 / (|x| |y|), which keeps a few large "
    "activations from ruling the fit. cosine: those of the largest mean cosine with the target, "
    "found in three rounds. Both store activations.",
)
flags.DEFINE_list("layers", [], "Source layers, such as 0,4,8, or blocks of --site; default: all.")
flags.DEFINE_list(
    "pairs",
    [],
    "Layers that maps lead from and to, such as 0-4,2-6, or all. Default: from every layer to the "
    "final one.",
)
flags.DEFINE_enum(
    "site",
    STREAM,
    SITES,
    "stream: maps lead from layer to layer. Else from the input of a part to its output, before "
    "the residual add, in every block.",
)
flags.DEFINE_bool(
    "then_run",
    False,
    "With --pairs or --site: also what the model predicts when a map stands in and the blocks "
    "behind it run. Each map takes part of a forward pass over the held-out sentences.",
)
flags.DEFINE_bool(
    "clock", False, "Also time the fit of each kind; then two runs differ in these rows."
)
_MODELS = define_files(
    "models",
    "Several models, as --model takes one: each is run in a folder of its own in --out, and all "
    "are compared. Default: --model alone.",
)
WRITES = (map_zoo.LAYERS, map_zoo.BYTES, map_zoo.PAIRS, *MAPS_FILES, common.SNAPSHOTS)


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    if _MODELS.value:
        several_models.run_models(_MODELS.value, WRITES)
        return
    job = common.start("map_zoo", writes=WRITES, options=map_zoo.Options)
    job.publish(map_zoo.run(job.model, job.examples, job.options(map_zoo.Options), **job.context))


if __name__ == "__main__":
    cli.run(main)
