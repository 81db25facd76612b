"""Which blocks of a model can go, and what does it cost to leave them out, or to put a linear map in their place?

    python -m experiments.prune --model=gpt2-docs --method=delete,map,merge --remove=4

Orders the blocks by --score, removes 1, 2, … --remove of them, and holds each pruned model against the whole one on
every prediction of the held-out sentences' tokens (but the first ones, which nothing predicts): perplexity, KL (nats)
and top-1 agreement (`precision@1`), with intervals over sentences; parameters, FLOPs and measured time a token.

--score is `kl` by default, the KL that the removal of a block costs, measured on --score_sentences of the fit
sentences. The others are read from the stream at the fit examples' positions (`experiments.linearity` reads all tokens
instead): `linearity` is the order of arXiv 2405.12250, `linearity_without_residual` ours. A table has all of them for
every block. --piece_length=512 cuts a text file into pieces, as that paper does with enwik8.

--method says what happens to a removed block: `delete` leaves it out, `map` replaces it by a map fitted at the
examples' positions, `distil` trains these maps on, `merge` folds a map into the feed-forward part before it, so that an
ordinary smaller checkpoint remains (pre-norm models). Give several to compare them. With --save, OUT/model is the
pruned model: a Hugging Face folder, or for `map` and `distil` the whole model with its maps, which
`jmat.studies.prune.surgery.load_pruned` and `experiments.tasks` read.

Writes results.json, prune.png and the maps of the most pruned model. Two minutes on two CPU cores with the bundled
model, and some minutes more for each model that is distilled; a model of 30 blocks and 135 million parameters takes ten
minutes with --num_fit=2000 --num_eval=200 --remove=4. Expect `map` to lose less than `delete`, and `distil` less than
`map`. `merge` lies between `delete` and `map` where there are many times as many examples as the feed-forward part is
wide, and else above both (--merge_from=output needs fewer). It never takes block 0, so by a score that names block 0
first the methods remove different blocks: compare rows of the same `blocks`, which share a tick of the figure.
`linearity_without_residual` can name blocks that a model cannot do without: of gpt2-docs it removes block 0 first
(perplexity 45 → 8,000), `linearity` block 7 (45 → 57), `block_influence` block 6 (45 → 52), and `kl` block 4, 5 or 6,
whichever the sentences make the cheapest (45 → 51).
"""

from collections.abc import Mapping

from absl import flags

from experiments import cli, common
from jmat.checkpoint.load import find
from jmat.data.text import whole_sentences
from jmat.maps.types import Linear
from jmat.report.tables import format_table
from jmat.runtime.checks import chosen
from jmat.studies.prune.heal import LOSSES
from jmat.studies.prune.merge import FEATURES
from jmat.studies.prune.plans import REFITS, How, Pruned, Scored, Teacher, block_scores, prune, teacher
from jmat.studies.prune.report import METRICS, block_score_rows, plot_prune, pruned_rows, score_rows
from jmat.studies.prune.scores import SCORES
from jmat.studies.prune.stand_ins import METHODS, Stretch
from jmat.studies.prune.surgery import map_name, save_pruned

flags.adopt_module_key_flags(common)
_METHOD = flags.DEFINE_list("method", ["delete", "map"], f"Treatment of removed blocks: {', '.join(METHODS)}.")
_REMOVE = flags.DEFINE_integer("remove", 1, "Remove 1, 2, … so many blocks.", lower_bound=1)
_SAVE = flags.DEFINE_bool("save", False, "Write the most pruned model to OUT/model; takes one --method.")
# The settings of jmat.studies.prune.plans.How, by name.
_HOW: dict[str, flags.FlagHolder] = {
    "score": flags.DEFINE_enum("score", "kl", SCORES, "Score that orders the blocks: the KL that removing one costs "
        "(kl), or one of what a block does to the stream (jmat.studies.prune.scores)."),
    "rescore": flags.DEFINE_bool("rescore", False, "Compute the scores anew after each removal, on what is left."),
    "spans": flags.DEFINE_bool("spans", False, "Remove the best span of k neighbouring blocks, for each k."),
    "refit": flags.DEFINE_enum("refit", "original", REFITS, "Maps from the whole model's stream, or one after another "
        "from what the maps before left."),
    "ridge": flags.DEFINE_float("ridge", 0.0, "Penalty on the maps, on the scale of a sum over examples.", 0.0),
    "merge_from": flags.DEFINE_enum("merge_from", "hidden", FEATURES, "merge: map the FFN's hidden activations (F x D) "
        "or its output (D x D; for few examples)."),
    "score_sentences": flags.DEFINE_integer("score_sentences", 256, "--score=kl: sentences to measure it on.", 1),
    "distil_steps": flags.DEFINE_integer("distil_steps", 300, "distil: steps for each pruned model.", 1),
    "learning_rate": flags.DEFINE_float("learning_rate", 3e-3, "distil: Adam's, at the start.", 0.0),
    "kl_weight": flags.DEFINE_float("kl_weight", 0.0, "distil: weight of the KL on the predictions.", 0.0),
    "distil_loss": flags.DEFINE_enum("distil_loss", "relative", LOSSES, "distil: squared error of the streams, "
        "relative to each token's stream, or the paper's plain mean."),
}  # fmt: skip


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    methods = chosen("method", _METHOD.value, METHODS)
    if _SAVE.value and len(methods) > 1:
        raise ValueError(f"--save writes one model: give one --method, not {', '.join(methods)}.")
    job = common.start("prune", writes=["prune.png", *common.MAPS_FILES, *(["model"] if _SAVE.value else [])])
    settings = {name: flag.value for name, flag in _HOW.items()}
    settings |= {name: job.config[name] for name in ("intercept", "seed")}
    hows = {method: How(method=method, **settings) for method in methods}
    for how in hows.values():
        how.check(job.model.config, _REMOVE.value)
    text = whole_sentences(job.examples.eval, job.mask_token)
    batch = {"tokens_per_batch": common.tokens_per_batch()}
    whole = teacher(job.model, job.examples.fit, mask_token=job.mask_token, progress="capture fit", **batch)
    scores = block_scores(whole, hows[methods[0]])
    pruned, rows = {}, block_score_rows(scores)
    maps: dict[str, Linear] = {}
    failures: list[str] = []
    for method, how in hows.items():
        steps, failure = prune_steps(whole, how, known=scores[how.score])
        failures += [failure] if failure else []
        pruned[method] = [model for model, _ in steps]
        rows += score_rows(method, how.score, [scored for _, scored in steps])
        for model in pruned[method][-1:]:
            maps |= {map_name(method, stretch): linear for stretch, linear in model.maps.items()}
    if not any(pruned.values()):
        raise ValueError(" ".join(failures))
    rows += pruned_rows(job.model, text, pruned, seed=job.config["seed"], progress="evaluate", **batch)
    wrote = []
    if maps:
        job.save_maps(maps)
        wrote += ["maps.safetensors", "maps.json"]
    if _SAVE.value and not failures:
        last = pruned[methods[0]][-1]
        source = {"source": find(job.config["model"], revision=job.config["revision"]), "tokenizer": job.tokenizer}
        save_pruned(job.path("model"), job.model, methods[0], last.removed, last.maps, job.maps_info(), **source)
        wrote.append("model")
    results = job.finish(rows)
    title = f"{job.config['model']}: blocks removed by {settings['score']}"
    figure = cli.drawn(job.path("prune.png"), plot_prune, results, title=title)
    print("scores of the whole model's blocks")
    print(format_table(rows, index="layer", columns=("score",), metrics=("block_score",)), end="\n\n")
    print(format_table(rows, index="blocks", columns=("metric", "method"), metrics=METRICS, intervals=False))
    cli.print_notes(rows)
    print(f"wrote {job.out}/{', '.join([f'results.json{figure}', *wrote])}")
    if failures:
        raise ValueError(f"{' '.join(failures)} All else is in {job.out}/results.json.")


def prune_steps(
    whole: Teacher, how: How, *, known: Mapping[Stretch, float]
) -> tuple[list[tuple[Pruned, Scored]], str | None]:
    """Returns what `jmat.studies.prune.plans.prune` yields, and a sentence where it fails on the way.

    A method that fails, such as a distillation that diverges, takes nothing from the other methods of the run.
    """
    steps = []
    try:
        for step in prune(whole, how, _REMOVE.value, known=known, log=cli.say):
            steps.append(step)
    except ValueError as error:
        failure = f"{how.method} failed at {len(steps) + 1} of {_REMOVE.value} blocks: {error}"
        cli.say(failure)
        return steps, failure
    return steps, None


if __name__ == "__main__":
    cli.run(main)
