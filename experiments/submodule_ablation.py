"""Which sub-modules can a linear map stand in for: attention, the feed-forward part, the layer norms, or whole blocks?

    python -m experiments.submodule_ablation --model=gpt2-docs

From every layer l on, all attentions (`mat_attn`), all feed-forwards (`mat_ffn`), all norms (`mat_ln1_ln2`) or
everything (`mat`) are replaced by linear maps fitted at the sampled positions of the unmodified model; or, with
--refit=sequential, one after another on the stream as the maps before left it. Reports precision@k, recall@k,
surprisal, KL (nats) and perplexity against the full model, and the held-out r2 of every part's map alone; with --heads
the same for every attention head, replaced by its map (`mat_head`) or removed (`no_head`). In a post-norm model (BERT)
`ln_1` is the norm after attention, `ln_2` the one after the feed-forward. Writes results.json, submodule_ablation.png
and the maps. A few minutes on two CPU cores with the bundled model; --refit=sequential and --heads take several times
as long.
"""

from typing import Any

from absl import flags

from experiments import cli, common
from jmat.data.examples import Examples, mask_positions
from jmat.maps.jumps import fit_jumps
from jmat.maps.types import Identity
from jmat.metrics.predictions import Predictions
from jmat.models.sites import SUBMODULES, stream_sites
from jmat.report.notes import noted
from jmat.report.plots import plot_by_layer
from jmat.report.tables import format_table
from jmat.runtime import hosts
from jmat.runtime.progress import track
from jmat.studies.evaluation import evaluate, metric_rows
from jmat.studies.r2 import resamples
from jmat.studies.submodules import (
    ABLATIONS,
    ablate,
    ablate_heads,
    fit_parts,
    part_r2_rows,
    part_sites,
    refit_sequentially,
)

flags.adopt_module_key_flags(common)
_MAPS = flags.DEFINE_list("maps", ["mat", *ABLATIONS], f"Maps to evaluate, of mat, {', '.join(ABLATIONS)}.")
_LAYERS = flags.DEFINE_list("layers", [], "Source layers l, of 0 .. L; default all.")
_REFIT = flags.DEFINE_enum(
    "refit",
    "none",
    ["none", "sequential"],
    "none: maps are fitted on the unmodified model, as in the paper. "
    "sequential: each on the stream as the maps before it left it.",
)
_HEADS = flags.DEFINE_bool("heads", False, "Also replace and remove every attention head, one at a time.")
WRITES = ("submodule_ablation.png", *common.MAPS_FILES)
METRICS = ("precision@1", "precision@5", "precision@10", "surprisal")


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    names = common.choices("maps", _MAPS.value, ("mat", *ABLATIONS))
    job = common.start("submodule_ablation", writes=WRITES, many_hosts=True)
    L = job.model.config.layers
    layers = common.layer_choices(_LAYERS.value, L)
    streams = stream_sites(L)
    fit, held_out = job.capture(tuple(dict.fromkeys((*streams, *part_sites(SUBMODULES, range(L))))))
    intercept: bool = job.config["intercept"]
    part_maps = fit_parts(fit, blocks=range(L), intercept=intercept, progress="fit parts")
    settings: dict[str, Any] = {"tokens_per_batch": common.tokens_per_batch()}
    seen = Examples(*(mask_positions(split, job.mask_token) for split in (job.examples.fit, job.examples.eval)))
    fitting: dict[str, Any] = {**settings, "intercept": intercept}
    plans: dict[str, dict[int, dict[tuple[str, int], Any]]] = {name: {} for name in names if name != "mat"}
    sequential = _REFIT.value == "sequential"
    for name, sources in plans.items():
        for l in track(layers, f"refit {name}" if sequential else None):
            if sequential:
                sources[l] = refit_sequentially(job.model, seen.fit, fit, ABLATIONS[name], l, **fitting)
            else:
                sources[l] = {(p, i): m for (p, i), m in part_maps.items() if p in ABLATIONS[name] and i >= l}
    finals = ablate(job.model, seen.eval, plans, progress="replace", **settings)
    if _HEADS.value:
        finals |= ablate_heads(job.model, seen, progress="heads", **fitting)
    shortcuts: dict[tuple[str, int], tuple[Any, Any]] = {key: (Identity(), final) for key, final in finals.items()}
    jumps, _ = fit_jumps([fit[site] for site in streams], targets="final", intercept=intercept, progress="fit")
    if "mat" in names:
        shortcuts |= {("mat", l): (jumps[l, L] if l < L else Identity(), held_out[streams[l]]) for l in layers}
    predictions = Predictions()
    values = evaluate(
        job.model,
        held_out[streams[L]],
        shortcuts,
        targets=job.next_tokens(),
        predictions=predictions,
        progress="evaluate",
    )
    if not hosts.is_first():
        return
    sentences, seed = job.examples.eval.rows, job.config["seed"]
    rows = noted(metric_rows(values, L, groups=sentences, seed=seed), predictions.note())
    rows += part_r2_rows(held_out, part_maps, resamples(job.examples.eval.positions, sentences, seed=seed))
    tensors = {f"{part}.{i}": linear for (part, i), linear in part_maps.items()}
    job.save_maps(tensors | {f"mat.{i}.{j}": m for (i, j), m in jumps.items()})
    results = job.finish(rows)
    title = f"{job.config['model']}: sub-modules replaced from layer l on"
    figure = cli.drawn(job.path("submodule_ablation.png"), plot_by_layer, results, METRICS, title=title)
    print(format_table(rows, index="layer", columns=("metric", "map"), metrics=METRICS[:1]))
    cli.print_notes(rows)
    print(f"wrote {job.out}/results.json{figure}, maps.safetensors, maps.json")


if __name__ == "__main__":
    cli.run(main)
