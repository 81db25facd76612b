"""Do linear shortcuts travel to other text, and how many sentences does it take to fit them?

    python -m experiments.cross_corpus --model=gpt2 --corpora=docs,my_mails.txt --layers=2,4,6,8,10
    python -m experiments.cross_corpus --model=gpt2-docs --sizes=250,1000,4000

Fits `mat` from each layer to the final one on every corpus, from some hundred to all of its fit sentences, and
evaluates each on the held-out sentences of every corpus: precision@1, @5, @10 and surprisal (nats) against the full
model, and r2; `id` beside it. A corpus is all that --corpus takes, or prepared examples (.npz). Writes results.json,
pairs.png (a heat map of all pairs) and learning_curve.png. Expect some points lost on foreign text, and curves that
flatten where there are a few times as many examples as dimensions. With one corpus, a few minutes on two CPU cores with
the bundled models; time grows with the square of the number of corpora.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from absl import flags

from experiments import cli, common
from experiments.file_flags import define_files
from jmat.data.corpus import named_corpus
from jmat.models.sites import stream_sites
from jmat.report.tables import format_table
from jmat.runtime import hosts
from jmat.runtime.checks import chosen_layers
from jmat.studies.cross_corpus import check_sizes, cross_rows, fit_sizes, over_layers, plot_learning_curve, plot_pairs

flags.adopt_module_key_flags(common)
_CORPORA = define_files(
    "corpora",
    "Corpora, such as docs,mails.txt,news.npz: each is fitted on and evaluated on. Default: --corpus alone.",
)
_SIZES = flags.DEFINE_list(
    "sizes", [], "Numbers of examples to fit on, such as 250,500,1000. Default: doubling from 250, and all of them."
)
_LAYERS = flags.DEFINE_list("layers", [], "Source layers, such as 0,4,8; default: all.")
WRITES = ("pairs.png", "learning_curve.png")


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    asked = whole_numbers(_SIZES.value)
    jobs = one_job_each(_CORPORA.value or [common.FLAGS.examples or common.FLAGS.corpus])
    job = next(iter(jobs.values()))
    L, seed = job.model.config.layers, job.config["seed"]
    layers = [*(layer for layer in chosen_layers(_LAYERS.value, L) if layer < L), L]
    if layers == [L]:
        raise ValueError(f"--layers={L} is the final layer, to which every map leads: name one of 0 .. {L - 1}.")
    smallest = min(each.examples.fit.num_examples for each in jobs.values())
    sizes = check_sizes(asked, smallest)
    sites = {layer: stream_sites(L)[layer] for layer in layers}
    fits, held_out = [], {}
    for corpus, each in jobs.items():
        cli.say(f"corpus {corpus}")
        fit, evaluation = each.capture(tuple(sites.values()))
        streams = {layer: fit[site] for layer, site in sites.items()}
        fits += fit_sizes(corpus, streams, sizes, intercept=job.config["intercept"], seed=seed, progress="fit")
        held_out[corpus] = {layer: evaluation[site] for layer, site in sites.items()}
    for found in fits:
        if found.problem:
            cli.say(f"{found.n} examples of {found.corpus}, {found.problem}")
    rows: list[dict[str, Any]] = []
    for corpus, streams in held_out.items():
        sentences = jobs[corpus].examples.eval.rows
        rows += cross_rows(
            job.model, fits, corpus, streams, groups=sentences, seed=seed, progress=f"evaluate on {corpus}"
        )
    if not hosts.is_first():
        return
    results = job.finish(rows, text={corpus: each.text() for corpus, each in jobs.items()})
    name = job.config["model"]
    title = f"{name}: mat fitted on one corpus, evaluated on another"
    figures = cli.drawn(job.path("pairs.png"), plot_pairs, results, title=title)
    title = f"{name}: mat over the examples it is fitted on"
    figures += cli.drawn(job.path("learning_curve.png"), plot_learning_curve, results, title=title)
    print_tables(rows)
    cli.print_notes(rows)
    print(f"wrote {job.out}/results.json{figures}")


def one_job_each(corpora: Sequence[str]) -> dict[str, common.Job]:
    """The run, with the examples of each corpus in turn; the model is loaded once."""
    if len({named_corpus(corpus) or os.path.realpath(corpus) for corpus in corpora}) < len(corpora):
        raise ValueError(f"--corpora={','.join(corpora)} names a corpus twice.")
    job = common.start("cross_corpus", writes=WRITES, reads=("corpora",), many_hosts=True)
    return {corpus: dataclasses.replace(job, source=corpus) for corpus in corpora}


def whole_numbers(texts: Sequence[str]) -> list[int]:
    """The numbers of --sizes."""
    if wrong := [text for text in texts if not text.isdecimal() or int(text) < 1]:
        raise ValueError(f"--sizes has {wrong[0]!r}; expected whole numbers above 0, such as 250,500,1000.")
    return [int(text) for text in texts]


def print_tables(rows: Sequence[dict[str, Any]]) -> None:
    """Means over the layers: all pairs with the most examples, then the learning curve."""
    means = [{**row, "fit_corpus": row["fit_corpus"] or "id"} for row in over_layers(rows)]
    most = max(row["n_fit"] for row in means)
    print(f"\nmean over layers; fitted on {most} examples of the corpora down, evaluated on those across")
    pairs = [row for row in means if row["n_fit"] in (0, most)]
    print(format_table(pairs, index="fit_corpus", columns=("metric", "eval_corpus"), metrics=("precision@1", "r2")))
    print("\nprecision@1, mean over layers, over the examples fitted on (0: id); fit corpus, evaluation corpus")
    print(format_table(means, index="n_fit", columns=("fit_corpus", "eval_corpus"), metrics=("precision@1",)))


if __name__ == "__main__":
    cli.run(main)
