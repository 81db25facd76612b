"""What does the model already predict at layer l, read through a linear map (`mat`) or directly (`id`)?

    python -m experiments.layer_jump --model=gpt2-docs

For every layer l = 0..L, against the full model on held-out sentences, with 95 % intervals: precision@k (the shortcut's
top token is among the model's top k; k = 1, 5, 10), recall@k (the model's top token is among the shortcut's top k),
surprisal (of the shortcut's top token, under the model, in nats) and KL (model ‖ shortcut, nats). Writes results.json,
layer_jump.png and the maps. Expect `mat` far above `id` in the first half of the layers. Takes a minute or two on two
CPU cores with the bundled model; gpt2 takes some ten minutes there.

With --fit_tokens=all maps are fitted on every token of the fit sentences. Where activations of so many would not fit
(--route), statistics of constant size take their place; such a run goes on where it was killed when it is started again
with the same flags.
"""

from absl import flags

from experiments import cli, common, fitting
from jmat.maps.types import Identity
from jmat.metrics.predictions import Predictions
from jmat.models.sites import stream_sites
from jmat.report.notes import noted
from jmat.report.plots import plot_by_layer
from jmat.report.results import format_table
from jmat.runtime import hosts
from jmat.studies.evaluation import evaluate, metric_rows

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(fitting)
_TARGETS = flags.DEFINE_enum(
    "targets", "all", ["all", "final"], "Fit and save maps to all later layers, or only to the final one (less memory)."
)
WRITES = ("layer_jump.png", *common.MAPS_FILES, fitting.SNAPSHOTS)
METRICS = ("precision@1", "precision@5", "precision@10", "surprisal")


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    job = common.start("layer_jump", writes=WRITES, many_hosts=True)
    L = job.model.config.layers
    statistics = fitting.read(job, targets=_TARGETS.value)
    streams = list(job.capture_eval(stream_sites(L)).values())
    maps, n = fitting.fit_maps(job, statistics, targets=_TARGETS.value)
    shortcuts = {("mat", i): (maps[i, L] if i < L else Identity(), streams[i]) for i in range(L + 1)}
    shortcuts |= {("id", i): (Identity(), streams[i]) for i in range(L + 1)}
    predictions = Predictions()
    values = evaluate(job.model, streams[L], shortcuts, predictions=predictions, progress="evaluate")
    if not hosts.is_first():
        return
    rows = metric_rows(values, L, groups=job.examples.eval.rows, seed=job.config["seed"])
    job.save_maps({f"mat.{i}.{j}": linear for (i, j), linear in maps.items()}, n)
    rows = noted(rows, predictions.note())
    results = job.finish(rows)
    title = f"{job.config['model']}: reading layer l"
    figure = cli.drawn(job.path("layer_jump.png"), plot_by_layer, results, METRICS, title=title)
    print(format_table(rows, index="layer", columns=("metric", "map"), metrics=METRICS))
    cli.print_notes(rows)
    print(f"wrote {job.out}/results.json{figure}, maps.safetensors, maps.json")


if __name__ == "__main__":
    cli.run(main)
