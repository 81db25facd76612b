"""Maps from layer to layer: on which tokens they are fitted, and whether activations are stored for it."""

from typing import Any

import numpy as np
from absl import flags
from jax import local_device_count

from experiments import cli, common, passes
from jmat.capture.moments import Moments
from jmat.capture.stream import stream_moments
from jmat.maps.jumps import fit_jumps, fit_jumps_to_moments, jump_pairs
from jmat.maps.types import Linear
from jmat.models.cost import statistics_bytes
from jmat.models.sites import stream_sites
from jmat.studies.routes import choose_route, memory_of_activations

flags.adopt_module_key_flags(passes)
flags.DEFINE_enum(
    "fit_tokens",
    "sampled",
    passes.TOKENS,
    "Tokens of the fit sentences that maps are fitted on: the sampled positions, or all (which masked models read "
    "unmasked; --protocol=jmat leaves out the same as when it samples). Evaluation is on sampled positions always.",
)
flags.DEFINE_enum(
    "route",
    "auto",
    ["auto", "memory", "streaming"],
    "memory: activations are stored, and maps fitted to them (QR, float32). streaming: nothing is stored but second "
    "moments (float64), whose size does not depend on the text; such a run goes on where it was killed. auto: memory "
    "where it is the smaller one, or small.",
)

FLAGS = flags.FLAGS
SNAPSHOTS = passes.SNAPSHOTS


def read(job: common.Job, *, targets: str = "all") -> Moments | list[np.ndarray]:
    """Returns the activations h_0 .. h_L of the fit tokens, or their moments, for maps. All hosts take part."""
    tokens, sites, split = FLAGS.fit_tokens, stream_sites(job.model.config.layers), job.examples.fit
    if _route(job, targets) == "streaming":
        batches = passes.packed(job, passes.as_read(job, split, tokens), tokens)
        pairs = jump_pairs(job.model.config.layers, targets=targets)
        return stream_moments(job.model, batches, pairs, snapshots=passes.snapshots(job), progress="read fit")
    if tokens == "sampled":
        return list(common.capture_one(job.model, split, sites, job.mask_token, "fit").values())
    every_token = split.with_examples(passes.tokens_read(job, split, tokens))  # which masked models read unmasked
    return list(common.capture_one(job.model, every_token, sites, None, "fit").values())


def fit_maps(
    job: common.Job, statistics: Moments | list[np.ndarray], *, targets: str = "all"
) -> tuple[dict[tuple[int, int], Linear], int]:
    """`mat` of (source layer, target layer), to `all` later layers or the `final` one; and the number of tokens."""
    how: dict[str, Any] = {"targets": targets, "intercept": FLAGS.intercept, "progress": "fit"}
    if isinstance(statistics, Moments):
        maps, solutions = fit_jumps_to_moments(statistics, job.model.config.layers, **how)
    else:
        maps, solutions = fit_jumps(statistics, **how)
    common.say_ranks(solutions)
    return maps, solutions[0].n


def _route(job: common.Job, targets: str) -> str:
    """Returns the route of --route, or for `auto` the better one, and prints it with the reason."""
    if FLAGS.route != "auto":
        cli.say(f"route {FLAGS.route}, as --route says")
        return FLAGS.route
    split, config = job.examples.fit, job.model.config
    sampled = FLAGS.fit_tokens == "sampled"
    count = split.num_examples if sampled else int(passes.tokens_read(job, split, "all").sum())
    activations = memory_of_activations(count, config.width, config.layers)
    moments = local_device_count() * statistics_bytes(config, targets)  # every device has sums of its own
    route, why = choose_route(activations, moments)
    cli.say(f"route {route}: {why}")
    return route
