"""Linear stand-ins for sub-modules: `ln_1`, `attn`, `ln_2`, `ffn` of every block (Din et al. 2023, section 5).

A part's map goes from the part's input to its output, before the residual add, whatever the wiring: in a post-norm
block (BERT) `attn` reads the block's input and `ln_1` the sum after attention.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from numpy import ndarray

from jmat.capture.activations import capture, reading_batches
from jmat.data.batches import Padded, examples_of, padding_mask
from jmat.data.examples import Examples, Split
from jmat.forward import run
from jmat.maps.least_squares import factorise_each, lstsq
from jmat.maps.types import Constant, Linear
from jmat.models.sites import SUBMODULES, gather, stream_sites
from jmat.runtime import hosts
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
    model: Any,
    split: Split,
    maps: Mapping[str, Mapping[int, PartMaps]],
    *,
    mask_token: int | None = None,
    tokens_per_batch: int = 4096,
    progress: str | None = None,
) -> dict[tuple[str, int], Float[ndarray, "N D"]]:
    """h_L at the examples' positions when the parts of all blocks from a source layer on are replaced.

    Attention is the only part that lets positions see each other: without it the sampled position runs alone. With it
    the whole sentence runs.

    Args:
      model: as `jmat.load` gives it.
      split: the sentences.
      maps: shortcut's name → source layer l → maps for every block l .. L − 1 of the parts that it replaces.
      mask_token: as for `jmat.capture.capture`.
      tokens_per_batch: padded tokens in one forward pass.
      progress: what the progress bar says; None shows none.

    Returns:
      (shortcut's name, source layer) → stand-in for h_L.
    """
    D = model.config.width
    finals = {
        (name, l): np.empty((split.num_examples, D), np.float32) for name, sources in maps.items() for l in sources
    }
    plan = hosts.share(reading_batches(model.config, split, mask_token, tokens_per_batch))
    for batch, mask, read_at in _with_masks(plan, progress):
        streams = _streams(model, batch.tokens, mask)
        real = batch.examples >= 0
        for (name, l), final in finals.items():
            stand_ins = {f"block.{i}.{part}": linear for (part, i), linear in maps[name][l].items()}
            value = run_from(model, streams[l], l, stand_ins, mask, read_at)
            final[batch.examples[real]] = np.asarray(value, np.float32)[real]
    for final in finals.values():
        hosts.fill_in(final, examples_of(plan))
    return finals


def ablate_heads(
    model: Any,
    examples: Examples,
    *,
    mask_token: int | None = None,
    tokens_per_batch: int = 4096,
    intercept: bool = False,
    progress: str | None = None,
) -> dict[tuple[str, int], Float[ndarray, "N D"]]:
    """h_L with one attention head of one block replaced by its map (`mat_head.{h}`) or removed (`no_head.{h}`).

    A head's map goes from the input of `attn` to the head's output, before the output projection. The other heads'
    outputs do not change, so each block's are computed once, and one program serves all heads of all blocks.
    """
    L, H, D = model.config.layers, model.config.heads, model.config.width
    settings: dict[str, Any] = {"mask_token": mask_token, "tokens_per_batch": tokens_per_batch}
    keep = [(f"block.{i}.attn.in", *(f"block.{i}.attn.head.{h}" for h in range(H))) for i in range(L)]
    maps: list[Linear] = []
    for sites in track(keep, None if progress is None else f"fit {progress}"):
        acts = capture(model, examples.fit, sites, stop=len(maps) + 1, **settings)
        outputs = np.concatenate([acts[head] for head in sites[1:]], axis=1)
        solution = lstsq(acts[sites[0]], outputs, intercept=intercept)
        maps.append(Linear(solution.weights, solution.bias))
    kinds = [(f"{kind}_head.{h}", kind, h) for kind in ("mat", "no") for h in range(H)]
    finals = {(name, i): np.empty((examples.eval.num_examples, D), np.float32) for name, *_ in kinds for i in range(L)}
    plan = hosts.share(reading_batches(model.config, examples.eval, mask_token, tokens_per_batch))
    for batch, mask, read_at in _with_masks(plan, progress):
        streams, real = _streams(model, batch.tokens, mask), batch.examples >= 0
        for i in range(L):
            read, *parts = run(model, streams[i], start=i, stop=i + 1, keep=keep[i], mask=mask)[1].values()
            heads = jnp.concatenate(parts, axis=-1)
            stand_ins = {"mat": maps[i](read), "no": jnp.zeros_like(heads)}
            for name, kind, h in kinds:
                attn = _with_head(model.blocks[i].attn.o, heads, stand_ins[kind], h, width=model.config.head_width)
                attn = gather(attn, read_at) if i == L - 1 else attn  # the last block runs on these positions alone
                value = run_from(model, streams[i], i, {f"block.{i}.attn": Constant(attn)}, mask, read_at)
                finals[name, i][batch.examples[real]] = np.asarray(value, np.float32)[real]
    for final in finals.values():
        hosts.fill_in(final, examples_of(plan))
    return finals


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
    model: Any,
    stream: Float[jax.Array, "B T D"],
    start: int,
    sites: Mapping[str, Any],
    mask: Any,
    read_at: Any,
) -> Float[jax.Array, "B P D"]:
    """h_L at some positions, from h_start; on these positions alone where no block looks at others."""
    L = model.config.layers
    if start == L:
        return gather(stream, read_at)
    if all(f"block.{i}.attn" in sites or f"block.{i}" in sites for i in range(start, L)):
        return run(model, gather(stream, read_at), start=start, sites=sites)[0]
    last = f"block.{L - 1}"
    return run(model, stream, start=start, sites=sites, mask=mask, keep=(last,), read_at=read_at)[1][last]


def refit_sequentially(
    model: Any,
    split: Split,
    acts: Mapping[str, Float[ndarray, "N D"]],
    parts: Sequence[str],
    source: int,
    *,
    mask_token: int | None = None,
    tokens_per_batch: int = 4096,
    intercept: bool = False,
) -> dict[tuple[str, int], Linear]:
    """Maps for the parts of blocks `source` .. L − 1, each fitted on the stream as the maps before it left it.

    The target is the part's output in the unmodified model (`acts`), so a map also learns to undo the drift of those
    before. The paper fits all maps on the unmodified model. Holds the stream of all sentences in memory.
    """
    L = model.config.layers
    contextual = "attn" not in parts
    held: list[tuple[Padded, Any, Any, Any]] = []
    for batch, mask, read_at in _with_masks(reading_batches(model.config, split, mask_token, tokens_per_batch), None):
        stream = run(model, batch.tokens, stop=source, mask=mask)[0]
        held.append((batch, mask, read_at, stream if contextual else gather(stream, read_at)))
    maps: dict[tuple[str, int], Linear] = {}
    for i in range(source, L):
        for part in (part for part in SUBMODULES if part in parts):
            site = f"block.{i}.{part}"
            stand_ins = {f"block.{i}.{done}": maps[done, i] for done in parts if (done, i) in maps}
            # The part is not fitted yet: a placeholder keeps it from being computed, only its input is read.
            stand_ins[site] = Linear(jnp.zeros((model.config.width, model.config.width), jnp.float32))
            inputs = np.empty_like(acts[site])
            for batch, mask, read_at, stream in held:
                where = {"mask": mask, "read_at": read_at} if contextual else {}
                kept = run(model, stream, start=i, stop=i + 1, sites=stand_ins, keep=(f"{site}.in",), **where)[1]
                real = batch.examples >= 0
                inputs[batch.examples[real]] = np.asarray(kept[f"{site}.in"], np.float32)[real]
            solution = lstsq(inputs, acts[site], intercept=intercept)
            maps[part, i] = Linear(solution.weights, solution.bias)
        stand_ins = {f"block.{i}.{part}": maps[part, i] for part in parts}
        for k, (batch, mask, read_at, stream) in enumerate(held):
            where = {"mask": mask} if contextual else {}
            held[k] = (batch, mask, read_at, run(model, stream, start=i, stop=i + 1, sites=stand_ins, **where)[0])
    return maps


def _streams(model: Any, tokens: Any, mask: Any) -> list[jax.Array]:
    return list(run(model, tokens, keep=stream_sites(model.config.layers), mask=mask)[1].values())


def _with_masks(plan: list[Padded], progress: str | None) -> Iterator[tuple[Padded, ndarray, jax.Array]]:
    """Batches with their mask and positions."""
    for batch in track(plan, progress):
        yield batch, padding_mask(batch), jnp.asarray(batch.positions)
