"""Linear stand-ins for sub-modules: `ln_1`, `attn`, `ln_2`, `ffn` of every block (Din et al. 2023, section 5).

A part's map goes from the part's input to its output, before the residual add, whatever the wiring: in a post-norm
block (BERT) `attn` reads the block's input and `ln_1` the sum after attention.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from jmat.capture.activations import capture, reading_batches
from jmat.capture.sweep import on_devices, own_share, sweep
from jmat.data.batches import Batch
from jmat.data.examples import Examples, Split
from jmat.forward import run
from jmat.maps.least_squares import factorise_each, lstsq
from jmat.maps.types import Constant, Linear
from jmat.models.family import Transformer
from jmat.models.sites import SUBMODULES, gather, stream_sites
from jmat.runtime.mesh import local_mesh, place, replicate
from jmat.runtime.progress import track
from jmat.studies.r2 import Resamples, pair_rows

# What the paper replaces together, by the name of the resulting shortcut.
ABLATIONS: dict[str, tuple[str, ...]] = {
    "mat_attn": ("attn",),
    "mat_ffn": ("ffn",),
    "mat_ln1_ln2": ("ln_1", "ln_2"),
}

PartMaps = Mapping[tuple[str, int], Any]  # (part, block) → map


def part_sites(parts: Sequence[str], blocks: Sequence[int]) -> tuple[str, ...]:
    """Inputs and outputs of the parts."""
    return tuple(f"block.{i}.{part}{end}" for i in blocks for part in parts for end in (".in", ""))


def fit_parts(
    acts: Mapping[str, Float[ndarray, "N D"]],
    parts: Sequence[str] = SUBMODULES,
    blocks: Sequence[int] = (),
    *,
    intercept: bool = False,
    progress: str | None = None,
) -> dict[tuple[str, int], Linear]:
    """One map a part and block, input → output, fitted on the unmodified model's activations (`part_sites`)."""
    sites = {f"block.{i}.{part}": (part, i) for i in blocks for part in parts}
    sources = factorise_each([acts[f"{site}.in"] for site in sites], intercept=intercept)
    maps = {}
    for (site, key), source in zip(sites.items(), track(sources, progress, total=len(sites)), strict=True):
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
    """Returns h_L at the examples' positions when the parts of all blocks from a source layer on are replaced.

    Attention is the only part that lets positions see each other: without it the sampled position runs alone. With it
    the whole sentence runs.

    Args:
      model: as `jmat.load` returns it.
      split: sentences and positions, as for `jmat.capture.activations.capture`.
      maps: shortcut's name → source layer l → maps for every block l .. L − 1 of the parts that it replaces.
      tokens_per_batch: padded tokens in one forward pass.
      progress: label of the progress bar; by default none is shown.

    Returns:
      (shortcut's name, source layer) → stand-in for h_L.
    """
    mesh = local_mesh()
    model = place(model, mesh)
    plain = {name: {l: dict(parts) for l, parts in sources.items()} for name, sources in maps.items()}
    placed = replicate(mesh, plain)
    stand_ins = {
        (name, l): {f"block.{i}.{part}": linear for (part, i), linear in placed[name][l].items()}
        for name, sources in maps.items()
        for l in sources
    }

    def finals(batch: Batch) -> list[jax.Array]:
        streams = _streams(model, batch)
        return [run_from(model, streams[l], l, sites, batch) for (_, l), sites in stand_ins.items()]

    plan = _sentences(model, split, tokens_per_batch)
    return dict(zip(stand_ins, sweep(plan, finals, mesh=mesh, progress=progress), strict=True))


def ablate_heads(
    model: Transformer,
    examples: Examples,
    *,
    tokens_per_batch: int = 4096,
    intercept: bool = False,
    progress: str | None = None,
) -> dict[tuple[str, int], Float[ndarray, "N D"]]:
    """Returns h_L with one attention head of one block replaced by its map (`mat_head.{h}`) or removed (`no_head.{h}`).

    A head's map goes from the input of `attn` to the head's output, before the output projection. The other heads'
    outputs do not change, so each block's are computed once, and one program serves all heads of all blocks.
    """
    L, H = model.config.layers, model.config.heads
    mesh = local_mesh()
    model = place(model, mesh)
    keep = [(f"block.{i}.attn.in", *(f"block.{i}.attn.head.{h}" for h in range(H))) for i in range(L)]
    maps: list[Linear] = []
    for sites in track(keep, None if progress is None else f"fit {progress}"):
        acts = capture(model, examples.fit, sites, stop=len(maps) + 1, tokens_per_batch=tokens_per_batch)
        outputs = np.concatenate([acts[head] for head in sites[1:]], axis=1)
        solution = lstsq(acts[sites[0]], outputs, intercept=intercept)
        maps.append(Linear(solution.weights, solution.bias))
    maps = replicate(mesh, maps)
    kinds = [(kind, h) for kind in ("mat", "no") for h in range(H)]

    def finals(batch: Batch) -> list[jax.Array]:
        streams, values = _streams(model, batch), []
        for i in range(L):
            read, *parts = run(model, streams[i], start=i, stop=i + 1, keep=keep[i], **batch.where)[1].values()
            heads = jnp.concatenate(parts, axis=-1)
            stand_ins = {"mat": maps[i](read), "no": jnp.zeros_like(heads)}
            for kind, h in kinds:
                attn = _with_head(model.blocks[i].attn.o, heads, stand_ins[kind], h, width=model.config.head_width)
                attn = gather(attn, batch.read_at) if i == L - 1 else attn  # the last block runs on these alone
                values.append(run_from(model, streams[i], i, {f"block.{i}.attn": Constant(attn)}, batch))
        return values

    names = [(f"{kind}_head.{h}", i) for i in range(L) for kind, h in kinds]
    plan = _sentences(model, examples.eval, tokens_per_batch)
    return dict(zip(names, sweep(plan, finals, mesh=mesh, progress=progress), strict=True))


@functools.partial(jax.jit, static_argnames=("width",))
def _with_head(project: Any, heads: jax.Array, stand_ins: jax.Array, h: Any, *, width: int) -> jax.Array:
    """Returns the output of attention where head h is as in `stand_ins`; all heads' outputs lie side by side."""
    ours = jnp.arange(heads.shape[-1]) // width == h
    return project(jnp.where(ours, stand_ins.astype(heads.dtype), heads))


def part_r2_rows(acts: Mapping[str, Float[ndarray, "N D"]], maps: PartMaps, drawn: Resamples) -> list[dict[str, Any]]:
    """Held-out r2 of each part's map alone; `layer` and `target` are the 0-based block."""
    rows = []
    for (part, i), linear in maps.items():
        site = f"block.{i}.{part}"
        predicted = np.asarray(linear(acts[f"{site}.in"]))
        rows += pair_rows({"map": part, "layer": i, "target": i}, acts[site], predicted, drawn)
    return rows


def run_from(
    model: Transformer, stream: Float[jax.Array, "B T D"], start: int, sites: Mapping[str, Any], batch: Batch
) -> Float[jax.Array, "B P D"]:
    """Returns h_L where the batch is read, from h_start; only these positions run if no block looks at others."""
    L = model.config.layers
    if start == L:
        return gather(stream, batch.read_at)
    if all(f"block.{i}.attn" in sites or f"block.{i}" in sites for i in range(start, L)):
        return run(model, gather(stream, batch.read_at), start=start, sites=sites)[0]
    last = f"block.{L - 1}"
    return run(model, stream, start=start, sites=sites, keep=(last,), read_at=batch.read_at, **batch.where)[1][last]


@dataclasses.dataclass
class _Held:
    """A batch, and its stream [B, T, D] (or [B, P, D] at the examples), which stays on the devices."""

    batch: Batch
    stream: Any = None

    @property
    def examples(self) -> Int[jax.Array | ndarray, "B P"]:
        return self.batch.examples

    def inputs(self) -> tuple[Batch, Any]:
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
    """Returns maps for the parts of blocks `source` .. L − 1, each fitted on the stream as the maps before left it.

    The target is the part's output in the unmodified model (`acts`), so a map also learns to undo the drift of those
    before. The paper fits all maps on the unmodified model. Holds the stream of all sentences in memory.
    """
    L, D = model.config.layers, model.config.width
    mesh = local_mesh()
    model = place(model, mesh)
    contextual = "attn" not in parts  # else each position runs alone, and only the examples' are held
    plan = [_Held(batch) for batch in _sentences(model, split, tokens_per_batch)]

    def one_block(batch: Batch, stream: Any, i: int, sites: Mapping[str, Any], keep: tuple[str, ...] = ()) -> Any:
        where: dict[str, Any] = {}
        if contextual:
            where = batch.where | {"read_at": batch.read_at if keep else None}
        return run(model, stream, start=i, stop=i + 1, sites=sites, keep=keep, **where)

    def advance(i: int, sites: Mapping[str, Any]) -> None:
        for held, (batch, stream) in on_devices(own_share(plan), inputs=_Held.inputs, mesh=mesh):
            held.stream = one_block(batch, stream, i, sites)[0]

    for held, batch in on_devices(own_share(plan), inputs=lambda held: held.batch, mesh=mesh):
        stream = run(model, batch.tokens, stop=source, **batch.where)[0]
        held.stream = stream if contextual else gather(stream, batch.read_at)
    maps: dict[tuple[str, int], Linear] = {}
    # A part that is not fitted yet: the placeholder keeps it from being computed, only its input is read.
    placeholder = replicate(mesh, Linear(np.zeros((D, D), np.float32)))
    for i in range(source, L):
        fitted: dict[str, Linear] = {}
        for part in (part for part in SUBMODULES if part in parts):
            site = f"block.{i}.{part}"
            sites, keep = fitted | {site: placeholder}, (f"{site}.in",)

            def read(given: tuple[Batch, Any], i: int = i, sites: Any = sites, keep: tuple[str, ...] = keep) -> Any:
                return one_block(*given, i, sites, keep)[1]

            inputs = sweep(plan, read, inputs=_Held.inputs, mesh=mesh)[f"{site}.in"]
            solution = lstsq(inputs, acts[site], intercept=intercept)
            maps[part, i] = Linear(solution.weights, solution.bias)
            fitted |= {site: replicate(mesh, maps[part, i])}
        advance(i, fitted)
    return maps


def _sentences(model: Transformer, split: Split, tokens_per_batch: int) -> list[Batch]:
    """Returns batches with one sentence a row: what stands in for attention might look at all tokens of a row."""
    return reading_batches(model.config, split, tokens_per_batch, row_multiple=local_mesh().size, alone=True)


def _streams(model: Transformer, batch: Batch) -> list[jax.Array]:
    return list(run(model, batch.tokens, keep=stream_sites(model.config.layers), **batch.where)[1].values())
