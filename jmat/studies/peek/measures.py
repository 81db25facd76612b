"""Measures how far a reading of a layer is from the full model's prediction, position
by position.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpy import ndarray

from jmat.capture.sweep import stored_rows, sweep
from jmat.forward import logits
from jmat.metrics.predictions import compare_distributions, confidences_of, distribution, rank
from jmat.models.family import Transformer
from jmat.models.sites import Site
from jmat.runtime.mesh import local_mesh, place, replicate

# Name → what it says. Entropy and KL are in nats.
MEASURES = {
    "entropy": "how unsure the reading is",
    "kl": "KL from the full model's prediction to the reading",
    "rank": "place of the full model's token in the reading, 1 the first",
}
_POSITIONS_AT_ONCE = 256  # bounds the memory of logits


def measure(
    model: Transformer,
    shortcut: Site,
    stream: Float[ndarray, "N D"],
    final: Float[ndarray, "N D"],
) -> dict[str, Float[ndarray, " N"]]:
    """Returns the measures of a layer's stream through a map, beside the final stream."""
    mesh = local_mesh()
    model, shortcut = place(model, mesh), replicate(mesh, shortcut)

    def read(streams: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
        x, full = streams
        return _measures(logits(model, _apply(shortcut, x)), logits(model, full))

    plan = stored_rows(len(stream), _POSITIONS_AT_ONCE, mesh=mesh)
    return sweep(plan, read, inputs=lambda rows: (rows.take(stream), rows.take(final)), mesh=mesh)


@jax.jit
def _apply(shortcut: Site, x: jax.Array) -> jax.Array:
    return shortcut(x)


@jax.jit
def _measures(
    short: Float[Array, "N V"], full: Float[Array, "N V"]
) -> dict[str, Float[Array, " N"]]:
    reading, whole = distribution(short), distribution(full)
    return {
        "entropy": confidences_of(reading)["entropy"],
        "kl": compare_distributions(whole, reading)["kl"],
        "rank": 1 + rank(short, whole.top[:, 0]).astype(jnp.float32),
    }
