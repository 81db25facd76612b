"""Runs all studies of one model: one page, with a verdict on each claim of the papers.

    python -m experiments.report --model=gpt2-docs

Runs layer_jump, r2, submodule_ablation, early_exit, linearity, prune, peek and, where
scikit-learn is installed, probe, with the settings of their own scripts; activations at
the examples are read once for all of them. Writes report.html, a page for the browser
with figures, tables and intervals, and a verdict on each claim of the two papers: it
holds, does not hold, or is not tested, with the figures and the rule that decide.
Beside it report.json has all rows, by study, and OUT/STUDY what the study's own script
would write.

A study that is finished is not run again: a run that was killed goes on with the next
one when it is started again with the same flags. Blocks are removed in the order of
--score=linearity, as arXiv 2405.12250 does, and not by `kl`, the default of prune.
Three minutes on two CPU cores with the bundled model, half an hour with one of 135
million parameters.
"""

from absl import flags

from experiments import cli, common, snapshot_flags
from jmat.report.results import Results
from jmat.runtime.annotations import Keywords
from jmat.studies import overview
from jmat.studies.prune.scores import SCORES
from jmat.studies.prune.stand_ins import METHODS

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(snapshot_flags)
_STUDIES = list(overview.STUDIES)
flags.DEFINE_list("studies", _STUDIES, f"Studies to run, of {', '.join(_STUDIES)}.")
flags.DEFINE_list(
    "method", ["delete", "map"], f"prune: treatment of removed blocks: {', '.join(METHODS)}."
)
flags.DEFINE_integer("remove", 1, "prune: remove 1, 2, … so many blocks.", lower_bound=1)
flags.DEFINE_enum("score", "linearity", SCORES, "prune: score that orders the blocks.")
WRITES = (*overview.STUDIES, *overview.FILES, common.SNAPSHOTS)

# Flags of the studies' own scripts that are no settings, at their defaults.
_NOT_GIVEN: dict[str, Keywords] = {
    "linearity": {"revisions": [], "against": None},
    "probe": {"labels": None, "against": None},
    "peek": {"sentences": None, "maps": None},
}


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    job = common.start("report", writes=WRITES, options=overview.Options, needs_head=False)

    def described(results: Results) -> Results:
        settings = {
            **results.config,
            **cli.own_flags(common.__name__),
            **_NOT_GIVEN.get(results.experiment, {}),
        }
        return job.described(
            results, config={k: v for k, v in settings.items() if not k.startswith("snapshot_")}
        )

    given: Keywords = {
        "folder": job.out,
        "before": job.path,
        "described": described,
        **job.context,
    }
    report = overview.run(job.model, job.examples, job.options(overview.Options), **given)
    written = report.save(job.out, before=job.path)
    print(report.table())
    print(f"wrote {job.out}/{', '.join(written)}; open {job.out}/{written[0]} in a browser")
    if report.failures:
        raise ValueError(
            f"{'; '.join(report.failures.values())} All else is in {job.out}/{written[0]}."
        )


if __name__ == "__main__":
    cli.run(main)
