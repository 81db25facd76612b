"""Replaces and removes attention heads, one at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from numpy import ndarray

from jmat.capture.activations import capture
from jmat.capture.sweep import sweep
from jmat.data.batches import Batch
from jmat.data.examples import Examples
from jmat.forward import run
from jmat.maps.least_squares import lstsq
from jmat.maps.types import Constant, Linear
from jmat.models.family import Transformer
from jmat.models.layers import Dense
from jmat.models.sites import gather
from jmat.runtime.mesh import local_mesh, place, replicate
from jmat.runtime.progress import track
from jmat.studies.submodules.ablation import run_from, sentence_rows, streams_of


def ablate_heads(
    model: Transformer,
    examples: Examples,
    *,
    tokens_per_batch: int = 4096,
    intercept: bool = False,
    progress: str | None = None,
) -> dict[tuple[str, int], Float[ndarray, "N D"]]:
    """Returns h_L with one attention head of one block replaced by its map
    (`mat_head.{h}`) or removed (`no_head.{h}`).

    A head's map goes from the input of `attn` to the head's output, before the output
    projection. The other heads' outputs do not change, so each block's are computed
    once, and one program serves all heads of all blocks.
    """
    L, H = model.config.layers, model.config.heads
    mesh = local_mesh()
    model = place(model, mesh)
    keep = [
        (f"block.{i}.attn.in", *(f"block.{i}.attn.head.{h}" for h in range(H))) for i in range(L)
    ]
    maps: list[Linear] = []
    for sites in track(keep, None if progress is None else f"fit {progress}"):
        acts = capture(
            model, examples.fit, sites, stop=len(maps) + 1, tokens_per_batch=tokens_per_batch
        )
        outputs = np.concatenate([acts[head] for head in sites[1:]], axis=1)
        solution = lstsq(acts[sites[0]], outputs, intercept=intercept)
        maps.append(Linear(solution.weights, solution.bias))
    maps = replicate(mesh, maps)
    kinds = [(kind, h) for kind in ("mat", "no") for h in range(H)]

    def finals(batch: Batch) -> list[jax.Array]:
        streams, values = streams_of(model, batch), []
        for i in range(L):
            read, *parts = run(model, streams[i], start=i, stop=i + 1, keep=keep[i], **batch.where)[
                1
            ].values()
            heads = jnp.concatenate(parts, axis=-1)
            stand_ins = {"mat": maps[i](read), "no": jnp.zeros_like(heads)}
            for kind, h in kinds:
                attn = _with_head(
                    model.blocks[i].attn.o, heads, stand_ins[kind], h, width=model.config.head_width
                )
                # the last block runs on these alone
                attn = gather(attn, batch.read_at) if i == L - 1 else attn
                values.append(
                    run_from(model, streams[i], i, {f"block.{i}.attn": Constant(attn)}, batch)
                )
        return values

    names = [(f"{kind}_head.{h}", i) for i in range(L) for kind, h in kinds]
    plan = sentence_rows(model, examples.eval, tokens_per_batch)
    return dict(zip(names, sweep(plan, finals, mesh=mesh, progress=progress), strict=True))


@functools.partial(jax.jit, static_argnames=("width",))
def _with_head(
    project: Dense, heads: jax.Array, stand_ins: jax.Array, h: int | jax.Array, *, width: int
) -> jax.Array:
    """Returns the output of attention where head h is as in `stand_ins`; all heads'
    outputs lie side by side.
    """
    ours = jnp.arange(heads.shape[-1]) // width == h
    return project(jnp.where(ours, stand_ins.astype(heads.dtype), heads))
