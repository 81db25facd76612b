"""Reads layers through maps, and measures how far each reading is from the full model's
prediction, position by position.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int
from numpy import ndarray

from jmat.capture.sweep import stored_rows, sweep
from jmat.forward import logits
from jmat.metrics.predictions import (
    Distribution,
    compare_distributions,
    confidences_of,
    distribution,
    rank,
)
from jmat.models.family import Transformer
from jmat.models.sites import Site
from jmat.runtime.mesh import local_mesh, place, replicate, row_by_row

# Name → what it says. Entropy and KL are in nats.
MEASURES = {
    "entropy": "how unsure the reading is",
    "kl": "KL from the full model's prediction to the reading",
    "rank": "place of the full model's token in the reading, 1 the first",
}
_POSITIONS_AT_ONCE = 256  # bounds the memory of logits


class Reading(NamedTuple):
    """Holds what is read of a layer at each position; NaN where its logits are no
    distribution.

    Attributes:
      ids: of the K most probable tokens, the most probable first; of equally probable
        ones, lower ids come first.
      probabilities: of these tokens.
      measures: by the names of `MEASURES`.
    """

    ids: Int[Array | ndarray, "N K"]
    probabilities: Float[Array | ndarray, "N K"]
    measures: dict[str, Float[Array | ndarray, " N"]]


def read_layers(
    model: Transformer,
    shortcuts: Mapping[str, Mapping[int, Site]],
    streams: Sequence[Float[ndarray, "N D"]],
    top: int,
) -> dict[str, dict[int, Reading]]:
    """Returns the readings of layers through maps, by map's name and layer.

    Args:
      model: its final norm and head read out predictions.
      shortcuts: map's name → layer → map to the final stream. The final layer is read
        as it is.
      streams: h_0 .. h_L.
      top: how many tokens to name, K.
    """
    mesh, L = local_mesh(), len(streams) - 1
    model = place(model, mesh)
    placed = {
        kind: {layer: replicate(mesh, shortcut) for layer, shortcut in maps.items()}
        for kind, maps in shortcuts.items()
    }
    best = row_by_row(lambda scores: tuple(jax.lax.top_k(jax.nn.softmax(scores), top)[::-1]), mesh)
    layers = sorted({L, *(layer for maps in shortcuts.values() for layer in maps)})

    def read(batch: dict[int, jax.Array]) -> dict[str, dict[int, Reading]]:
        full = distribution(logits(model, batch[L]))

        def reading(shortcut: Site, layer: int) -> Reading:
            own = full
            if layer != L:
                own = distribution(logits(model, _apply(shortcut, batch[layer])))
            ids, probabilities = best(own.logits)
            return Reading(ids, probabilities, _measures(full, own))

        return {
            kind: {layer: reading(shortcut, layer) for layer, shortcut in maps.items()}
            for kind, maps in placed.items()
        }

    plan = stored_rows(len(streams[L]), _POSITIONS_AT_ONCE, mesh=mesh)
    inputs = lambda rows: {layer: rows.take(streams[layer]) for layer in layers}  # noqa: E731
    return sweep(plan, read, inputs=inputs, mesh=mesh)


@jax.jit
def _apply(shortcut: Site, x: jax.Array) -> jax.Array:
    return shortcut(x)


@jax.jit
def _measures(full: Distribution, reading: Distribution) -> dict[str, Float[Array, " N"]]:
    return {
        "entropy": confidences_of(reading)["entropy"],
        "kl": compare_distributions(full, reading)["kl"],
        "rank": 1 + rank(full, reading),
    }
