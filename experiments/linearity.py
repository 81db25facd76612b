"""Measures how linear a transformer is, from layer to layer and inside its blocks.

    python -m experiments.linearity --model=gpt2-docs

The scores of "Your Transformer is Secretly Linear" (arXiv 2405.12250), for every step
h_l → h_{l+1}, the last one included, and for every sub-module's input → output: the
share of the target's variance that an affine map explains (`linearity`), and the same
for what is added to the stream, Y − X (`linearity_without_residual`; of attention and
feed-forward, whose outputs are added, `linearity` itself has no residual in it). Both
in sample, as in the paper, where pure noise scores D/(n − 1); adjusted for that; and
held out on other sentences, with 95 % intervals over sentences. Beside them the norm of
what a block adds against the stream, the cosine between neighbours, anisotropy, a
histogram of the tokens' errors, and which tokens are the least and the most linear.

All tokens of all sentences are used, in two passes that store no activations. The
paper's text is 128 pieces of 512 characters of enwik8: --corpus=enwik8
--piece_length=512 --num_fit=128 --num_eval=64, with the file of that name.
--protocol=jmat leaves out the first position (--skip_first) or, for masked models,
special tokens; --tokens=sampled reads only the sampled positions. --all_pairs adds
every pair of layers, --intrinsic_dimension that of every layer's activations by several
estimators of TwoNN, which differ (`pip install 'jmat[probe]'`), --revisions curves over
training (of a hub id's revisions, or of folders such as `pretrain --keep_every=100`
leaves in OUT/steps; with the angle between neighbouring layers, the strength of a
block's jump), --against the difference to another model. A run that was killed
goes on in the middle of the first pass when it is started again with the same flags.

Writes results.json, linearity.png, geometry.png and errors.png. About two minutes on
two CPU cores with the bundled model. Expect above 0.9 with the residual in the middle
layers and much less without it.
"""

import pathlib

from absl import flags

from experiments import cli, common, figure_flags, snapshot_flags
from jmat.capture.activations import check_examples
from jmat.checkpoint import parameters
from jmat.checkpoint.load import find, load
from jmat.models import fields_among
from jmat.models.family import Transformer
from jmat.runtime.annotations import Keywords
from jmat.runtime.digests import model_hash
from jmat.studies import linearity
from jmat.studies.fitting import TOKENS

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(figure_flags)
flags.adopt_module_key_flags(snapshot_flags)
flags.DEFINE_bool("parts", True, "Also ln_1, attn, ln_2 and ffn of every block.")
flags.DEFINE_bool("all_pairs", False, "All pairs of layers, not only neighbours.")
flags.DEFINE_enum("tokens", "all", TOKENS, "Tokens to read: all, or the sampled positions.")
flags.DEFINE_bool(
    "intrinsic_dimension", False, "Also the intrinsic dimension of every layer (scikit-learn)."
)
flags.DEFINE_list(
    "revisions",
    [],
    "Earlier checkpoints, in order: local folders, or revisions of the hub id --model.",
)
flags.DEFINE_string(
    "against",
    None,
    "Another model of this shape and tokenizer; its figures are subtracted from --model's.",
)

FLAGS = flags.FLAGS


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    asked = {
        "revisions": bool(FLAGS.revisions),
        "against": bool(FLAGS.against),
        "all_pairs": FLAGS.all_pairs,
    }
    writes = [*linearity.figure_names(**asked), common.SNAPSHOTS]
    several: Keywords = {
        "reads": ("revisions", "against"),
        "needs_head": False,
        "many_hosts": True,
    }
    job = common.start("linearity", writes=writes, options=linearity.Options, **several)
    others = {name: load_other(job, name, revision=True) for name in FLAGS.revisions}
    other = load_other(job, FLAGS.against, revision=False) if FLAGS.against else None
    models: Keywords = {"against": other, "revisions": others}
    job.publish(
        linearity.run(
            job.model, job.examples, job.options(linearity.Options), **models, **job.context
        )
    )


def load_other(job: common.Job, name: str, *, revision: bool) -> Transformer:
    """Loads another checkpoint. Raises ValueError where its shape is not that of
    --model, or it reads other tokens.
    """
    is_folder = not revision or pathlib.Path(name).expanduser().is_dir()
    cli.say(f"loading {name}")
    given: Keywords = {"dtype": FLAGS.dtype, "shard_parameters": FLAGS.shard_parameters}
    source, given["revision"] = (name, None) if is_folder else (FLAGS.model, name)
    if FLAGS.ignore_config:  # fields of --model, which this one need not have
        given["ignore_config"] = fields_among(
            find(source, revision=given["revision"]), FLAGS.ignore_config
        )
    model, _ = load(source, **given)
    common.check_same_weights(name, lambda: model_hash(parameters(model)))
    linearity.check_comparable(job.model, name, model)
    check_examples(job.examples, model.config)
    return model


if __name__ == "__main__":
    cli.run(main)
