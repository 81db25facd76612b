"""How much of a later layer does a linear map of an earlier one explain?

    python -m experiments.r2 --model=gpt2-docs

Held-out coefficient of determination of `mat` (least squares) and `id` (the earlier layer itself) for all pairs of
layers i < j. `r2` is the paper's: uniform mean over the coordinates. Beside it, `r2_weighted` (by variance),
`r2_no_first` (first positions left out) and `r2_no_outliers` (outlier coordinates left out), each with a 95 % interval.
Writes results.json, r2.png (heat maps side by side) and the maps. About a minute on two CPU cores with the bundled
model. --fit_tokens and --route are as for layer_jump.
"""

from absl import flags

from experiments import cli, common, fitting
from jmat.models.sites import stream_sites
from jmat.report.plots import plot_r2
from jmat.report.results import format_table
from jmat.runtime import hosts
from jmat.studies.r2 import r2_rows, resamples

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(fitting)
WRITES = ("r2.png", *common.MAPS_FILES, fitting.SNAPSHOTS)


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    job = common.start("r2", writes=WRITES, needs_head=False, many_hosts=True)
    statistics = fitting.read(job)
    streams = list(job.capture_eval(stream_sites(job.model.config.layers)).values())
    if not hosts.is_first():
        return
    maps, n = fitting.fit_maps(job, statistics)
    drawn = resamples(job.examples.eval.positions, job.examples.eval.rows, seed=job.config["seed"])
    rows = r2_rows(streams, maps, drawn, progress="evaluate")
    job.save_maps({f"mat.{i}.{j}": linear for (i, j), linear in maps.items()}, n)
    results = job.finish(rows)
    title = f"{job.config['model']}: r2 of layer j from layer i"
    figure = cli.drawn(job.path("r2.png"), plot_r2, results, title=title)
    for name in ("mat", "id"):
        print(f"\nr2 of {name}: layer i (down) to target j (across)")
        shown = [row for row in rows if row["map"] == name and row["metric"] == "r2"]
        print(format_table(shown, index="layer", columns=("target",), metrics=("r2",)))
    cli.print_notes(rows)
    print(f"wrote {job.out}/results.json{figure}, maps.safetensors, maps.json")


if __name__ == "__main__":
    cli.run(main)
