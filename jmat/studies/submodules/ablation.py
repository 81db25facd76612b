"""Linear stand-ins for sub-modules: `ln_1`, `attn`, `ln_2`, `ffn` of every block (Din
et al. 2023, section 5).

A part's map goes from the part's input to its output, before the residual add, whatever
the wiring: in a post-norm block (BERT) `attn` reads the block's input and `ln_1` the
sum after attention.
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Float
from numpy import ndarray

from jmat.capture.activations import reading_batches
from jmat.capture.sweep import sweep
from jmat.data.batches import Batch
from jmat.data.examples import Split
from jmat.forward import run
from jmat.maps.least_squares import factorise_each
from jmat.maps.types import Linear
from jmat.models.family import Transformer
from jmat.models.sites import SUBMODULES, Site, gather, stream_sites
from jmat.report.rows import Row
from jmat.runtime.mesh import local_mesh, place, replicate
from jmat.runtime.progress import track
from jmat.studies.r2 import Resamples, Target

# What the paper replaces together, by the name of the resulting shortcut.
ABLATIONS: dict[str, tuple[str, ...]] = {
    "mat_attn": ("attn",),
    "mat_ffn": ("ffn",),
    "mat_ln1_ln2": ("ln_1", "ln_2"),
}

PartMaps = Mapping[tuple[str, int], Site]  # (part, block) → map


def part_sites(parts: Sequence[str], blocks: Sequence[int]) -> tuple[str, ...]:
    """Returns the inputs and outputs of the parts."""
    return tuple(f"block.{i}.{part}{end}" for i in blocks for part in parts for end in (".in", ""))


def fit_parts(
    acts: Mapping[str, Float[ndarray, "N D"]],
    parts: Sequence[str] = SUBMODULES,
    blocks: Sequence[int] = (),
    *,
    intercept: bool = False,
    progress: str | None = None,
) -> dict[tuple[str, int], Linear]:
    """Fits one map a part and block, input → output, on the unmodified model's
    activations (`part_sites`).
    """
    sites = {f"block.{i}.{part}": (part, i) for i in blocks for part in parts}
    sources = factorise_each([acts[f"{site}.in"] for site in sites], intercept=intercept)
    maps = {}
    for (site, key), source in zip(
        sites.items(), track(sources, progress, total=len(sites)), strict=True
    ):
        solution = source.solve(acts[site], residual=False)
        maps[key] = Linear(solution.weights, solution.bias)
    return maps


def ablate(
    model: Transformer,
    split: Split,
    maps: Mapping[str, Mapping[int, PartMaps]],
    *,
    tokens_per_batch: int = 4096,
    progress: str | None = None,
) -> dict[tuple[str, int], Float[ndarray, "N D"]]:
    """Returns h_L at the examples' positions when the parts of all blocks from a source
    layer on are replaced.

    Attention is the only part that lets positions see each other: without it the
    sampled position runs alone. With it the whole sentence runs.

    Args:
      model: as `jmat.load` returns it.
      split: sentences and positions, as for `jmat.capture.activations.capture`.
      maps: shortcut's name → source layer l → maps for every block l .. L − 1 of the
        parts that it replaces.
      tokens_per_batch: padded tokens in one forward pass.
      progress: label of the progress bar; by default none is shown.

    Returns:
      (shortcut's name, source layer) → stand-in for h_L.
    """
    mesh = local_mesh()
    model = place(model, mesh)
    plain = {
        name: {l: dict(parts) for l, parts in sources.items()} for name, sources in maps.items()
    }
    placed = replicate(mesh, plain)
    stand_ins = {
        (name, l): {f"block.{i}.{part}": linear for (part, i), linear in placed[name][l].items()}
        for name, sources in maps.items()
        for l in sources
    }

    def finals(batch: Batch) -> list[jax.Array]:
        streams = streams_of(model, batch)
        return [run_from(model, streams[l], l, sites, batch) for (_, l), sites in stand_ins.items()]

    plan = sentence_rows(model, split, tokens_per_batch)
    return dict(zip(stand_ins, sweep(plan, finals, mesh=mesh, progress=progress), strict=True))


def part_r2_rows(
    acts: Mapping[str, Float[ndarray, "N D"]], maps: PartMaps, drawn: Resamples
) -> list[Row]:
    """Returns held-out r2 of each part's map alone; `layer` and `target` are the
    0-based block.
    """
    rows = []
    for (part, i), linear in maps.items():
        site = f"block.{i}.{part}"
        predicted = np.asarray(linear(acts[f"{site}.in"]))
        label: Row = {"map": part, "layer": i, "target": i}
        rows += Target(acts[site], drawn).rows(label, predicted)
    return rows


def run_from(
    model: Transformer,
    stream: Float[jax.Array, "B T D"],
    start: int,
    sites: Mapping[str, Site],
    batch: Batch,
) -> Float[jax.Array, "B P D"]:
    """Returns h_L where the batch is read, from h_start; only these positions run if no
    block looks at others.
    """
    L = model.config.layers
    if start == L:
        return gather(stream, batch.read_at)
    if all(f"block.{i}.attn" in sites or f"block.{i}" in sites for i in range(start, L)):
        return run(model, gather(stream, batch.read_at), start=start, sites=sites)[0]
    last = f"block.{L - 1}"
    return run(
        model, stream, start=start, sites=sites, keep=(last,), read_at=batch.read_at, **batch.where
    )[1][last]


def sentence_rows(model: Transformer, split: Split, tokens_per_batch: int) -> list[Batch]:
    """Returns batches with one sentence a row: what stands in for attention might look
    at all tokens of a row.
    """
    return reading_batches(
        model.config, split, tokens_per_batch, row_multiple=local_mesh().size, alone=True
    )


def streams_of(model: Transformer, batch: Batch, last: int | None = None) -> list[jax.Array]:
    """Returns h_0 .. h_last [B, T, D] of a batch, by default up to h_L."""
    last = model.config.layers if last is None else last
    kept = run(model, batch.tokens, keep=stream_sites(last), stop=last, **batch.where)[1]
    return list(kept.values())
