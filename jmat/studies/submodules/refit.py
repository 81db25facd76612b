"""Fits maps of sub-modules one after another, each on the stream as the maps before it
left it.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from jmat.capture.sweep import on_devices, own_share, sweep
from jmat.data.batches import Batch
from jmat.data.examples import Split
from jmat.forward import run
from jmat.maps.least_squares import lstsq
from jmat.maps.types import Linear
from jmat.models.family import Transformer
from jmat.models.sites import SUBMODULES, Site, gather
from jmat.runtime.annotations import Keywords
from jmat.runtime.mesh import local_mesh, place, replicate
from jmat.studies.submodules.ablation import sentence_rows

Kept = dict[str, jax.Array]  # values by site


@dataclasses.dataclass
class _Held:
    """Holds a batch, and its stream [B, T, D] (or [B, P, D] at the examples), which
    stays on the devices.
    """

    batch: Batch
    stream: jax.Array | None = None

    @property
    def examples(self) -> Int[jax.Array | ndarray, "B P"]:
        return self.batch.examples

    def inputs(self) -> tuple[Batch, jax.Array | None]:
        return self.batch, self.stream


def refit_sequentially(
    model: Transformer,
    split: Split,
    acts: Mapping[str, Float[ndarray, "N D"]],
    parts: Sequence[str],
    source: int,
    *,
    tokens_per_batch: int = 4096,
    intercept: bool = False,
) -> dict[tuple[str, int], Linear]:
    """Returns maps for the parts of blocks `source` .. L − 1, each fitted on the stream
    as the maps before left it.

    The target is the part's output in the unmodified model (`acts`), so a map also
    learns to undo the drift of those before. The paper fits all maps on the unmodified
    model. Holds the stream of all sentences in memory.
    """
    L, D = model.config.layers, model.config.width
    mesh = local_mesh()
    model = place(model, mesh)
    # else each position runs alone, and only the examples' are held
    contextual = "attn" not in parts
    plan = [_Held(batch) for batch in sentence_rows(model, split, tokens_per_batch)]

    def one_block(
        batch: Batch,
        stream: jax.Array,
        i: int,
        sites: Mapping[str, Site],
        keep: tuple[str, ...] = (),
    ) -> tuple[jax.Array, Kept]:
        where: Keywords = {}
        if contextual:
            where = batch.where | {"read_at": batch.read_at if keep else None}
        return run(model, stream, start=i, stop=i + 1, sites=sites, keep=keep, **where)

    def advance(i: int, sites: Mapping[str, Site]) -> None:
        for held, (batch, stream) in on_devices(own_share(plan), inputs=_Held.inputs, mesh=mesh):
            held.stream = one_block(batch, stream, i, sites)[0]

    for held, batch in on_devices(own_share(plan), inputs=lambda held: held.batch, mesh=mesh):
        stream = run(model, batch.tokens, stop=source, **batch.where)[0]
        held.stream = stream if contextual else gather(stream, batch.read_at)
    maps: dict[tuple[str, int], Linear] = {}
    # A part that is not fitted yet: the placeholder keeps it from being computed, only its input is
    # read.
    placeholder = replicate(mesh, Linear(np.zeros((D, D), np.float32)))
    for i in range(source, L):
        fitted: dict[str, Linear] = {}
        for part in (part for part in SUBMODULES if part in parts):
            site = f"block.{i}.{part}"
            sites, keep = fitted | {site: placeholder}, (f"{site}.in",)

            def read(
                given: tuple[Batch, jax.Array],
                i: int = i,
                sites: Mapping[str, Site] = sites,
                keep: tuple[str, ...] = keep,
            ) -> Kept:
                return one_block(*given, i, sites, keep)[1]

            inputs = sweep(plan, read, inputs=_Held.inputs, mesh=mesh)[f"{site}.in"]
            solution = lstsq(inputs, acts[site], intercept=intercept)
            maps[part, i] = Linear(solution.weights, solution.bias)
            fitted |= {site: replicate(mesh, maps[part, i])}
        advance(i, fitted)
    return maps
