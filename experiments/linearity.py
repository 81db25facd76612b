"""How linear is a transformer, from layer to layer and inside its blocks?

    python -m experiments.linearity --model=gpt2-docs

The scores of "Your Transformer is Secretly Linear" (arXiv 2405.12250), for every step h_l → h_{l+1}, the last one
included, and for every sub-module's input → output: the share of the target's variance that an affine map explains
(`linearity`), and the same for what is added to the stream, Y − X (`linearity_without_residual`; of attention and
feed-forward, whose outputs are added, `linearity` itself has no residual in it). Both in sample, as in the paper, where
pure noise scores D/(n − 1); adjusted for that; and held out on other sentences, with 95 % intervals over sentences.
Beside them the norm of what a block adds against the stream, the cosine between neighbours, anisotropy, a histogram of
the tokens' errors, and which tokens are the least and the most linear.

All tokens of all sentences are used, in two passes that store no activations. The paper's text is 128 pieces of 512
characters of enwik8: --corpus=enwik8 --piece_length=512 --num_fit=128 --num_eval=64, with the file of that name.
--protocol=jmat leaves out the first position (--skip_first) or, for masked models, special tokens; --tokens=sampled
reads only the sampled positions. --all_pairs adds every pair of layers, --intrinsic_dimension that of every layer's
activations by several estimators of TwoNN, which differ (`pip install 'jmat[probe]'`), --revisions curves over training
(of a hub id's revisions, or of folders such as `pretrain --keep_every=100` leaves in OUT/steps), --against the
difference to another model. A run that was killed goes on in the middle of the first pass when it is started again with
the same flags.

Writes results.json, linearity.png, geometry.png and errors.png. About two minutes on two CPU cores with the bundled
model. Expect above 0.9 with the residual in the middle layers and much less without it.
"""

import pathlib
from typing import Any

from absl import flags

from experiments import cli, common, snapshot_flags
from jmat.capture.activations import check_examples
from jmat.checkpoint import parameters
from jmat.checkpoint.load import find, load
from jmat.data.batches import Batch
from jmat.models import fields_among
from jmat.models.sites import SUBMODULES, stream_sites
from jmat.report.plots import plot_r2
from jmat.report.tables import format_table
from jmat.runtime import hosts
from jmat.runtime.checks import check_same_kind
from jmat.runtime.digests import model_hash
from jmat.studies.fitting import TOKENS, ReadingSettings, as_read, sentence_batches, snapshots
from jmat.studies.linearity import report
from jmat.studies.linearity.measure import Labels, Measured, measure, part_pairs, step_pairs

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(snapshot_flags)
flags.DEFINE_bool("parts", True, "Also ln_1, attn, ln_2 and ffn of every block.")
flags.DEFINE_bool("all_pairs", False, "All pairs of layers, not only neighbours.")
flags.DEFINE_enum("tokens", "all", TOKENS, "Tokens to read: all, or the sampled positions.")
flags.DEFINE_bool("intrinsic_dimension", False, "Also the intrinsic dimension of every layer (scikit-learn).")
flags.DEFINE_list("revisions", [], "Earlier checkpoints, in order: local folders, or revisions of the hub id --model.")
flags.DEFINE_string(
    "against", None, "Another model of this shape and tokenizer; its figures are subtracted from --model's."
)

FLAGS = flags.FLAGS


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    if FLAGS.intrinsic_dimension:
        common.check_sklearn("--intrinsic_dimension")
    job = common.start("linearity", writes=writes(), reads=("revisions", "against"), needs_head=False, many_hosts=True)
    others = {name: load_other(job, name, revision=True) for name in FLAGS.revisions}
    other = load_other(job, FLAGS.against, revision=False) if FLAGS.against else None
    L, seed, tokens = job.model.config.layers, FLAGS.seed, FLAGS.tokens
    subject, settings = job.subject, job.options(ReadingSettings)
    fit, held_out = (as_read(subject, split, tokens) for split in (job.examples.fit, job.examples.eval))
    labels: Labels = step_pairs(L, all_pairs=FLAGS.all_pairs) | (part_pairs(L) if FLAGS.parts else {})
    batches = (
        sentence_batches(subject, fit, tokens, settings),
        sentence_batches(subject, held_out, tokens, settings),
    )
    cli.say(f"{tokens_in(batches[0])} tokens to fit on, {tokens_in(batches[1])} to evaluate on")
    measured = measure(job.model, *batches, labels, snapshots=snapshots(subject, settings), progress="")
    say_ranks(measured, job.model.config.width)
    figures = report.resampled(measured, held_out, labels, seed=seed)
    rows = report.linearity_rows(measured, labels, figures)
    rows += report.error_rows(measured, labels)
    rows += report.token_rows(measured, held_out, labels, decoder(job))
    if FLAGS.intrinsic_dimension:
        rows += report.dimension_rows(job.capture_eval(stream_sites(L)).values())
    for k, (name, model) in enumerate(others.items()):
        kept = snapshots(subject, settings, f"revision-{k}", model)
        found = measure(model, *batches, labels, snapshots=kept, progress=f"{name}: ")
        theirs = report.resampled(found, held_out, labels, seed=seed)
        rows += [row | {"checkpoint": name} for row in report.linearity_rows(found, labels, theirs)]
    if other is not None:
        kept = snapshots(subject, settings, "against", other)
        found = measure(other, *batches, labels, snapshots=kept, progress=f"{FLAGS.against}: ")
        theirs = report.resampled(found, held_out, labels, seed=seed)
        difference = report.difference_rows(labels, figures, theirs, len(found.tokens))
        rows += [row | {"against": FLAGS.against} for row in report.linearity_rows(found, labels, theirs) + difference]
    if not hosts.is_first():
        return
    results = job.finish(rows)
    written = plot(job, results)
    print_tables(rows)
    cli.print_notes(rows)
    print(f"wrote {job.out}/results.json{written}")


def writes() -> list[str]:
    """Returns the names of the files and folders that the run writes, by its flags."""
    asked = {"checkpoints.png": FLAGS.revisions, "difference.png": FLAGS.against, "pairs.png": FLAGS.all_pairs}
    return ["linearity.png", "geometry.png", "errors.png", *(name for name in asked if asked[name]), common.SNAPSHOTS]


def load_other(job: common.Job, name: str, *, revision: bool) -> Any:
    """Another checkpoint that reads the same tokens. Raises ValueError where its shape is not that of --model."""
    is_folder = not revision or pathlib.Path(name).expanduser().is_dir()
    cli.say(f"loading {name}")
    how: dict[str, Any] = {"dtype": FLAGS.dtype, "shard_parameters": FLAGS.shard_parameters}
    source, how["revision"] = (name, None) if is_folder else (FLAGS.model, name)
    if FLAGS.ignore_config:  # fields of --model, which this one need not have
        how["ignore_config"] = fields_among(find(source, revision=how["revision"]), FLAGS.ignore_config)
    model, _ = load(source, **how)
    common.check_same_weights(name, lambda: model_hash(parameters(model)))
    check_same_kind(name, model.config.causal, FLAGS.model, job.model.config.causal)
    mine, theirs = ((m.config.layers, m.config.width, m.config.vocab_size) for m in (job.model, model))
    if mine != theirs:
        raise ValueError(
            f"{name} has (blocks, width, vocabulary) = {theirs}, {FLAGS.model} {mine}: only models of one shape and "
            "tokenizer can be compared layer by layer."
        )
    check_examples(job.examples, model.config)
    return model


def tokens_in(batches: list[Batch]) -> int:
    """Returns the number of tokens that are read."""
    return sum(int((batch.examples >= 0).sum()) for batch in batches)


def decoder(job: common.Job) -> Any:
    """Token id → text; the id itself where there is no tokenizer."""
    return (lambda token: f"#{token}") if job.tokenizer is None else (lambda token: job.tokenizer.decode([token]))


def say_ranks(measured: Measured, width: int) -> None:
    """Tells where fewer dimensions than D vary, or fewer tokens were read; a norm's output always lacks one."""
    short = {source: rank for source, rank in measured.rank.items() if rank < width - 1}
    if short:
        source, rank = min(short.items(), key=lambda item: item[1])
        cli.say(f"{len(short)} of {len(measured.rank)} sources have less than full rank; least {source}: {rank}")


def plot(job: common.Job, results: dict[str, Any]) -> str:
    """Draws what there is to draw; returns the files' names, for the list of what was written."""
    name, written = job.config["model"], ""
    figures = {"linearity.png": report.plot_linearity, "geometry.png": report.plot_geometry}
    figures["errors.png"] = report.plot_errors
    if FLAGS.revisions:
        figures["checkpoints.png"] = report.plot_checkpoints
    if FLAGS.against:
        figures["difference.png"] = report.plot_difference
    for file, draw in figures.items():
        title = name if file != "difference.png" else f"{name} − {FLAGS.against}"
        written += cli.drawn(job.path(file), draw, results, title=title)
    if FLAGS.all_pairs:
        own = {**results, "rows": report.own_rows(results["rows"])}
        title = f"{name}: linearity of all pairs"
        written += cli.drawn(job.path("pairs.png"), plot_r2, own, metric="linearity_held_out", title=title)
    return written


def print_tables(rows: list[dict[str, Any]]) -> None:
    """Scores by layer, sub-modules, geometry, and the tokens at either end."""
    own, steps = report.own_rows(rows), report.step_rows(rows)
    kinds = {"": "in sample", "_adjusted": "adjusted", "_held_out": "held out"}
    names = {"linearity": "with the residual", "linearity_without_residual": "without"}
    look = {f"{score}{kind}": (names[score], kinds[kind]) for score in names for kind in kinds}
    shown = [
        {**row, "score": look[row["metric"]][0], "kind": look[row["metric"]][1]}
        for row in steps
        if row["metric"] in look
    ]
    print("\nlinearity of the step from layer l to l + 1")
    print(format_table(shown, columns=("score", "kind")))
    print("\nheld out, of sub-module inputs → outputs")
    parts = [row for row in own if row["map"] in SUBMODULES and row["metric"] == "linearity_held_out"]
    print(format_table(parts, columns=("map",)))
    print("\nwhat the block adds against the stream, cosine between neighbours, anisotropy")
    streams = [row for row in own if row["map"] == "stream"]
    print(format_table(steps + streams, columns=("metric",), metrics=(*report.GEOMETRY, *report.DIMENSIONS.values())))
    for extreme in ("least_linear", "most_linear"):
        found = [row for row in own if row.get("extreme") == extreme][:8]
        words = ", ".join(f"{row['token']!r} {row['value']:.2g}" for row in found)
        print(f"\n{extreme.replace('_', ' ')} tokens, and their mean error: {words}")
    compared = [row for row in report.next_steps(rows) if row["metric"].endswith("held_out_difference")]
    if compared:
        print(f"\nheld-out linearity of the step, less that of {FLAGS.against}")
        print(format_table(compared, columns=("metric",), intervals=True))


if __name__ == "__main__":
    cli.run(main)
