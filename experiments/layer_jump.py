"""Measures each layer's predictions, through a linear map (`mat`) and directly (`id`).

    python -m experiments.layer_jump --model=gpt2-docs

For every layer l = 0..L, against the full model on held-out sentences, with 95 %
intervals: precision@k (the shortcut's top token is among the model's top k; k = 1, 5,
10), recall@k (the model's top token is among the shortcut's top k), surprisal (of the
shortcut's top token, under the model, in nats) and KL (model ‖ shortcut, nats). Writes
results.json, layer_jump.png and the maps. Expect `mat` far above `id` in the first half
of the layers. Takes a minute or two on two CPU cores with the bundled model; gpt2 takes
some ten minutes there.

With --fit_tokens=all maps are fitted on every token of the fit sentences. Where
activations of so many would not fit (--route), statistics of constant size take their
place; such a run goes on where it was killed when it is started again with the same
flags.
"""

from absl import flags

from experiments import cli, common, figure_flags, fit_flags
from jmat.maps.files import MAPS_FILES
from jmat.studies import layer_jump

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(figure_flags)
flags.adopt_module_key_flags(fit_flags)
flags.DEFINE_enum(
    "targets",
    "all",
    layer_jump.TARGETS,
    "Fit and save maps to all later layers, or only to the final one (less memory).",
)
flags.DEFINE_bool(
    "then_run",
    False,
    "Also evaluate jumps from every layer to every layer but the last, behind which the other "
    "blocks run. The time grows with the cube of the number of layers.",
)
WRITES = (layer_jump.FIGURE, layer_jump.PAIRS, *MAPS_FILES, common.SNAPSHOTS)


def main(argv: list[str]) -> None:
    """Runs the experiment."""
    del argv
    job = common.start("layer_jump", writes=WRITES, options=layer_jump.Options, many_hosts=True)
    job.publish(
        layer_jump.run(job.model, job.examples, job.options(layer_jump.Options), **job.context)
    )


if __name__ == "__main__":
    cli.run(main)
