"""Jumps from layer to layer, fitted without stored activations; and when that is worth while."""

import dataclasses

import jax

from jmat.capture.activations import stream_sites
from jmat.capture.moments import Moments, Pair
from jmat.maps.files import Linear
from jmat.maps.from_moments import fit
from jmat.maps.least_squares import MOST_AT_ONCE, Solution
from jmat.models.cost import bytes_in_words
from jmat.runtime.progress import track
from jmat.studies.layer_jump import jump_targets

# So many bytes are always fine for activations.
FINE = 4e9


def jump_pairs(layers: int, *, targets: str = "all") -> list[Pair]:
    """The pairs of streams whose moments give the maps: from every layer to all later ones, or to the final one."""
    streams = stream_sites(layers)
    return [(streams[i], streams[j]) for i in range(layers) for j in jump_targets(i, layers, targets)]


def fit_jumps_to_moments(
    moments: Moments, layers: int, *, targets: str = "all", intercept: bool = False, progress: str | None = None
) -> tuple[dict[tuple[int, int], Linear], dict[int, Solution]]:
    """As `jmat.studies.layer_jump.fit_jumps`, from the moments of `jump_pairs`, in float64."""
    streams = stream_sites(layers)
    maps: dict[tuple[int, int], Linear] = {}
    solutions: dict[int, Solution] = {}
    for i in track(range(layers), progress):
        to = {j: streams[j] for j in jump_targets(i, layers, targets)}
        found, solution = fit(moments, streams[i], list(to.values()), intercept=intercept)
        maps |= {(i, j): found[site] for j, site in to.items()}
        shape = jax.ShapeDtypeStruct(solution.weights.shape, solution.weights.dtype)
        solutions[i] = dataclasses.replace(solution, weights=shape)
    return maps, solutions


def memory_of_activations(tokens: int, width: int, layers: int) -> int:
    """Bytes that `jmat.studies.layer_jump.fit_jumps` needs, float32.

    They hold h_0 .. h_L on the host; on the device, the sources that are factorised at a time, their Q, and one target.
    """
    return 4 * tokens * width * (layers + 1 + 2 * min(MOST_AT_ONCE, layers) + 1)


def choose_route(activations: int, moments: int) -> tuple[str, str]:
    """(`memory` or `streaming`, why), by the bytes that each needs."""
    stored, summed = bytes_in_words(activations), bytes_in_words(moments)
    if activations <= moments:
        return "memory", f"activations take {stored}, not more than the {summed} of their statistics"
    if activations <= FINE:
        return (
            "memory",
            f"activations take {stored}, their statistics {summed}: up to {bytes_in_words(FINE)} are stored",
        )
    return "streaming", f"activations take {stored}, their statistics {summed}, however long the text is"
