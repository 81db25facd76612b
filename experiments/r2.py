"""Measures how much of a later layer a linear map of an earlier one explains.

    python -m experiments.r2 --model=gpt2-docs

Held-out coefficient of determination of `mat` (least squares) and `id` (the earlier
layer itself) for all pairs of layers i < j. `r2` is the paper's: uniform mean over the
coordinates. Beside it, `r2_weighted` (by variance), `r2_no_first` (first positions left
out) and `r2_no_outliers` (outlier coordinates left out), each with a 95 % interval.
Writes results.json, r2.png (heat maps side by side) and the maps. About a minute on two
CPU cores with the bundled model. --fit_tokens and --route are as for layer_jump.
"""

from absl import flags

from experiments import cli, common, figure_flags, fit_flags
from jmat.maps.files import MAPS_FILES
from jmat.studies import r2

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(figure_flags)
flags.adopt_module_key_flags(fit_flags)
WRITES = (r2.FIGURE, *MAPS_FILES, common.SNAPSHOTS)


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    job = common.start("r2", writes=WRITES, options=r2.Options, needs_head=False, many_hosts=True)
    job.publish(r2.run(job.model, job.examples, job.options(r2.Options), **job.context))


if __name__ == "__main__":
    cli.run(main)
