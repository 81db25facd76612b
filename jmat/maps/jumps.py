"""Linear maps from layer to layer (`mat`): fitted to stored activations, or to their
moments (Din et al. 2023).
"""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpy import ndarray

from jmat.capture.moments import Moments, Pair
from jmat.maps.from_moments import fit
from jmat.maps.least_squares import Factors, checked, factorise_each
from jmat.maps.plain import plain_lstsq
from jmat.maps.solution import Solution
from jmat.maps.types import Linear
from jmat.models.sites import stream_sites
from jmat.runtime.progress import track


def fit_jumps(
    streams: Sequence[Float[ndarray, "N D"]],
    *,
    targets: str = "all",
    intercept: bool = False,
    solver: str = "qr",
    progress: str | None = None,
) -> tuple[dict[tuple[int, int], Linear], dict[int, Solution]]:
    """Fits `mat_{i→j}` by least squares from every source layer i to its targets j > i;
    one factorisation a source.

    Args:
      streams: h_0 .. h_L at the same examples.
      targets: `all` layers after the source, or only the `final` one.
      intercept: fit `y = x @ W + b` instead of the paper's `y = x @ W`.
      solver: `qr`, or `lstsq` for one call of `jnp.linalg.lstsq` a pair.
      progress: what the progress bar says; None shows none.

    Returns:
      Maps by (i, j), and the solution of each source, targets stacked in the order of
      j: its statistics without the residual, and the shape of its weights in place of
      the weights, which the maps hold.
    """
    L, D = len(streams) - 1, streams[0].shape[1]
    held = [checked("X" if l < L else "Y", stream) for l, stream in enumerate(streams)]
    maps: dict[tuple[int, int], Linear] = {}
    solutions: dict[int, Solution] = {}
    sources: Iterable[Factors | Array] = held[:L]
    if solver == "qr":
        sources = factorise_each(held[:L], intercept=intercept)
    for i, source in enumerate(track(sources, progress, total=L)):
        to = jump_targets(i, L, targets)
        if isinstance(source, Factors):
            solved = [source.solve(held[j], residual=False) for j in to]
        else:
            solved = [plain_lstsq(source, held[j], intercept=intercept) for j in to]
        maps |= {
            (i, j): Linear(solution.weights, solution.bias)
            for j, solution in zip(to, solved, strict=True)
        }
        shape = jax.ShapeDtypeStruct((D, D * len(to)), solved[0].weights.dtype)
        biases = [solution.bias for solution in solved if solution.bias is not None]
        bias = jnp.concatenate(biases) if biases else None
        solutions[i] = dataclasses.replace(solved[0], weights=shape, bias=bias)  # type: ignore[arg-type]
    return maps, solutions


def jump_targets(source: int, layers: int, targets: str) -> Sequence[int]:
    """Returns the layers that a source has maps to: `all` after it, or only the `final`
    one.
    """
    return range(source + 1, layers + 1) if targets == "all" else [layers]


def jump_pairs(layers: int, *, targets: str = "all") -> list[Pair]:
    """Returns the pairs of streams whose moments give the maps: from every layer to all
    later ones, or to the final one.
    """
    streams = stream_sites(layers)
    return [
        (streams[i], streams[j]) for i in range(layers) for j in jump_targets(i, layers, targets)
    ]


def fit_jumps_to_moments(
    moments: Moments,
    layers: int,
    *,
    targets: str = "all",
    intercept: bool = False,
    progress: str | None = None,
) -> tuple[dict[tuple[int, int], Linear], dict[int, Solution]]:
    """Fits the maps of `jmat.maps.jumps.fit_jumps` from the moments of `jump_pairs`, in
    float64.
    """
    streams = stream_sites(layers)
    maps: dict[tuple[int, int], Linear] = {}
    solutions: dict[int, Solution] = {}
    for i in track(range(layers), progress):
        to = {j: streams[j] for j in jump_targets(i, layers, targets)}
        by_site, solution = fit(moments, streams[i], list(to.values()), intercept=intercept)
        maps |= {(i, j): by_site[site] for j, site in to.items()}
        shape = jax.ShapeDtypeStruct(solution.weights.shape, solution.weights.dtype)
        solutions[i] = dataclasses.replace(solution, weights=shape)  # type: ignore[arg-type]
    return maps, solutions
