"""Measures the cost of linear maps in place of attention, feed-forward, norms, blocks.

    python -m experiments.submodule_ablation --model=gpt2-docs

From every layer l on, all attentions (`mat_attn`), all feed-forwards (`mat_ffn`), all
norms (`mat_ln1_ln2`) or everything (`mat`) are replaced by linear maps fitted at the
sampled positions of the unmodified model; or, with --refit=sequential, one after
another on the stream as the maps before left it. Reports precision@k, recall@k,
surprisal, KL (nats) and perplexity against the full model, and the held-out r2 of every
part's map alone; with --heads the same for every attention head, replaced by its map
(`mat_head`) or removed (`no_head`). In a post-norm model (BERT) `ln_1` is the norm
after attention, `ln_2` the one after the feed-forward. Writes results.json,
submodule_ablation.png and the maps. A few minutes on two CPU cores with the bundled
model; --refit=sequential and --heads take several times as long.
"""

from absl import flags

from experiments import cli, common, figure_flags
from jmat.maps.files import MAPS_FILES
from jmat.studies import submodules

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(figure_flags)
flags.DEFINE_list(
    "maps", list(submodules.MAPS), f"Maps to evaluate, of {', '.join(submodules.MAPS)}."
)
flags.DEFINE_list("layers", [], "Source layers l, of 0 .. L; default all.")
flags.DEFINE_enum(
    "refit",
    "none",
    submodules.REFITS,
    "none: maps are fitted on the unmodified model, as in the paper. "
    "sequential: each on the stream as the maps before it left it.",
)
flags.DEFINE_bool("heads", False, "Also replace and remove every attention head, one at a time.")
WRITES = (submodules.FIGURE, *MAPS_FILES)


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    job = common.start(
        "submodule_ablation", writes=WRITES, options=submodules.Options, many_hosts=True
    )
    job.publish(
        submodules.run(job.model, job.examples, job.options(submodules.Options), **job.context)
    )


if __name__ == "__main__":
    cli.run(main)
