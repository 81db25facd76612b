"""Measures how well linear shortcuts travel to other text, and how much text they take.

    python -m experiments.cross_corpus --model=gpt2 --corpora=docs,my_mails.txt --layers=2,4,6,8,10
    python -m experiments.cross_corpus --model=gpt2-docs --sizes=250,1000,4000
    python -m experiments.cross_corpus --maps=mat,affine,ridge,rank:32 --sizes=300,1000,3000

Fits `mat` from each layer to the final one on every corpus, from some hundred to all of
its fit sentences, and evaluates each on the held-out sentences of every corpus:
precision@1, @5, @10 and surprisal (nats) against the full model, and r2; `id` beside
it. A corpus is all that --corpus takes, or prepared examples (.npz). Writes
results.json, pairs.png (a heat map of all pairs) and learning_curve.png. Expect some
points lost on foreign text, and curves that flatten where there are a few times as many
examples as dimensions. With one corpus, a few minutes on two CPU cores with the bundled
models; time grows with the square of the number of corpora.

--maps names kinds of maps, as map_zoo takes them. Then there is KL, too, and every mean
over layers has an interval, and a paired difference from the map of its kind that was
fitted on the evaluation corpus. The figures have a panel a kind (pairs.png) and a line a
kind (learning_curve.png). `experiments.installed_text` makes corpora of other domains
and languages out of installed packages.
"""

import dataclasses
import os

from absl import flags

from experiments import cli, common, figure_flags
from experiments.file_flags import define_files
from jmat.data.corpus import named_corpus
from jmat.studies import cross_corpus

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(figure_flags)
_CORPORA = define_files(
    "corpora",
    "Corpora, such as docs,mails.txt,news.npz: each is fitted on and evaluated on. Default: "
    "--corpus alone.",
)
flags.DEFINE_list(
    "sizes",
    [],
    "Numbers of examples to fit on, such as 250,500,1000. Default: doubling from 250, and all of "
    "them.",
)
flags.DEFINE_list("layers", [], "Source layers, such as 0,4,8; default: all.")
flags.DEFINE_list(
    "maps", ["mat"], "Kinds of maps that are fitted, such as mat,ridge,rank:64,rank:64+int8."
)
WRITES = (cross_corpus.PAIRS, cross_corpus.CURVES)


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    corpora = _CORPORA.value or [common.FLAGS.examples or common.FLAGS.corpus]
    if len({named_corpus(corpus) or os.path.realpath(corpus) for corpus in corpora}) < len(corpora):
        raise ValueError(f"--corpora={','.join(corpora)} names a corpus twice.")
    options = cross_corpus.Options
    job = common.start(
        "cross_corpus", writes=WRITES, options=options, reads=("corpora",), many_hosts=True
    )
    jobs = {corpus: dataclasses.replace(job, source=corpus) for corpus in corpora}
    examples = {corpus: each.examples for corpus, each in jobs.items()}
    results = cross_corpus.run(job.model, examples, job.options(options), **job.context)
    job.publish(results, text={corpus: each.text() for corpus, each in jobs.items()})


if __name__ == "__main__":
    cli.run(main)
