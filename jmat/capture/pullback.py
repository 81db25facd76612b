"""Pulls the axes of one site back to others, for many prompts in one program: the rows
of mean Jacobians.

For one prompt with the positions T that count, and a site s before the target y,

    J = 1/|T| Σ_{p ∈ T} Σ_{t ∈ T} ∂y_t / ∂s_p        [E, W].

J is the derivative of `Σ_t y_t` by one vector δ [W], zero, that is added to s at all of
T after division by |T|. So one vector-Jacobian product with one-hot vectors gives a row
of J for every source at once, and neither cotangents nor gradients of single positions
leave the program. In a causal model the sum is over t ≥ p.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jmat.forward import run
from jmat.models.cache import new_cache
from jmat.models.config import ModelConfig
from jmat.models.edits import Add
from jmat.models.family import Transformer
from jmat.models.sites import check_names, width
from jmat.runtime.annotations import Keywords
from jmat.runtime.compiling import batched_gradients
from jmat.runtime.mesh import DATA_AXIS

_GROUPS = 16  # of rows, and of columns
SKETCH = _GROUPS**2  # numbers that a prompt's Jacobian is summed up to, with random signs

Inputs = tuple[Int[Array, "B T"], Int[Array, "B T"], Int[Array, "B T"], Float[Array, "B T"]]


class Pulled(NamedTuple):
    """Holds what comes of a batch, float32, by source.

    Attributes:
      total: sum of the prompts' Jacobians, [parts, E, W]; one part a device.
      squares: squared norm of each prompt's Jacobian, [B].
      sketches: each prompt's Jacobian times random signs, summed up to `SKETCH`
        numbers; [B, SKETCH]. Their products estimate those of the Jacobians.
      means: of sources and target; sum over prompts of the mean over the positions that
        count, [parts, W].
    """

    total: dict[str, Array]
    squares: dict[str, Array]
    sketches: dict[str, Array]
    means: dict[str, Array]


def pull_back(
    model: Transformer,
    inputs: Inputs,
    *,
    sources: tuple[str, ...],
    target: str,
    rows: int,
    mesh: Mesh,
    unseen: int = 0,
) -> Pulled:
    """Returns the mean Jacobians of a batch of prompts, each device those of its own.

    Args:
      model: placed on the mesh.
      inputs: of a `PromptBatch`.
      sources: sites in blocks, or `embed`, before the target.
      target: a site in a block.
      rows: about so many rows are in each product: prompts of a device, times tokens of
        a row, times one-hot vectors at a time.
      mesh: the devices, over which the prompts are split.
      unseen: first tokens of every prompt that do not count. No derivative of a causal
        model leads through them, so only their keys and values are kept.
    """
    static = {"sources": sources, "target": target, "rows": rows, "mesh": mesh, "unseen": unseen}
    return _program()(model, inputs, **static)


@functools.cache
def _program() -> Callable[..., Pulled]:
    """Returns the compiled function; the compiler is asked for its options at the first
    use.
    """

    def work(
        model: Transformer,
        inputs: Inputs,
        *,
        sources: tuple[str, ...],
        target: str,
        rows: int,
        mesh: Mesh,
        unseen: int,
    ) -> Pulled:
        on_device = functools.partial(
            _on_device, sources=sources, target=target, rows=rows, unseen=unseen
        )
        split = PartitionSpec(DATA_AXIS)
        return jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(PartitionSpec(), split),
            out_specs=split,
            check_vma=False,
        )(model, inputs)

    return jax.jit(
        work,
        static_argnames=("sources", "target", "rows", "mesh", "unseen"),
        compiler_options=batched_gradients(),
    )


def _on_device(
    model: Transformer,
    inputs: Inputs,
    *,
    sources: tuple[str, ...],
    target: str,
    rows: int,
    unseen: int,
) -> Pulled:
    B, T = inputs[0].shape[0], inputs[0].shape[1] - unseen
    E, widths = width(target, model.config), {site: width(site, model.config) for site in sources}
    zero = {site: jnp.zeros((B, size), jnp.float32) for site, size in widths.items()}
    forward = functools.partial(_summed_target, model, inputs, sources, target, unseen)
    _, pull, means = jax.vjp(forward, zero, has_aux=True)
    chunks = -(-E // max(min(rows // (B * T), E), 1))
    chunk = -(-E // chunks)

    def some_rows(
        sums: tuple[dict[str, Array], dict[str, Array]], k: Array
    ) -> tuple[tuple[dict[str, Array], dict[str, Array]], dict[str, Array]]:
        axes = k * chunk + jnp.arange(chunk)
        # rows past the last one are zero
        one_hot = jnp.broadcast_to(
            jax.nn.one_hot(axes, E, dtype=jnp.float32)[:, None], (chunk, B, E)
        )
        (J,) = jax.vmap(pull)(one_hot)
        squares = {site: sums[0][site] + jnp.square(J[site]).sum((0, 2)) for site in sources}
        sketches = {site: sums[1][site] + _sketch(J[site], axes) for site in sources}
        return (squares, sketches), {site: J[site].sum(1) for site in sources}

    nothing = (
        {site: jnp.zeros(B) for site in sources},
        {site: jnp.zeros((B, SKETCH)) for site in sources},
    )
    (squares, sketches), parts = jax.lax.scan(some_rows, nothing, jnp.arange(chunks))
    total = {site: parts[site].reshape(1, chunks * chunk, -1)[:, :E] for site in sources}
    return Pulled(total, squares, sketches, {site: mean[None] for site, mean in means.items()})


def _summed_target(
    model: Transformer,
    inputs: Inputs,
    sources: tuple[str, ...],
    target: str,
    unseen: int,
    deltas: dict[str, Array],
) -> tuple[Float[Array, "B E"], dict[str, Array]]:
    """Returns the sum of the target over the positions that count, with vectors added
    to the sources; and the means of all sites, summed over the prompts.
    """
    tokens, segments, positions, counted = (field[:, unseen:] for field in inputs)
    where: Keywords = {"segments": segments}
    if unseen:
        cache = new_cache(model, *inputs[0].shape)
        before: Keywords = {"segments": inputs[1][:, :unseen], "stop": block_of(target) + 1}
        where["cache"] = run(model, inputs[0][:, :unseen], cache=cache, **before)[-1]
    else:
        where["positions"] = positions
    share = counted / jnp.maximum(counted.sum(1, keepdims=True), 1)
    names = (*sources, target)
    ours = {
        i: tuple(site for site in names if block_of(site) == i)
        for i in range(-1, block_of(target) + 1)
    }

    def stage(i: int, x: Array, deltas: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        changed = {
            site: Add(share[:, :, None] * delta[:, None, :]) for site, delta in deltas.items()
        }
        place: Keywords = {"start": max(i, 0), "stop": i + 1}
        x, kept, *_ = run(model, x, keep=ours[i], sites=changed, **place, **where)
        return x, kept

    x: Array = tokens
    means: dict[str, Array] = {}
    for i, here in ours.items():
        given = {site: deltas[site] for site in here if site in deltas}
        # a block's inner values are computed again on the way back, once for many one-hot vectors
        x, kept = jax.checkpoint(functools.partial(stage, i))(x, given)
        means |= {
            site: jnp.einsum("bt,btw->w", share, value.astype(jnp.float32))
            for site, value in kept.items()
        }
    summed = jnp.einsum("bt,bte->be", counted, kept[target].astype(jnp.float32))
    return summed, means


def _sketch(J: Float[Array, "rows B W"], axes: Int[Array, " rows"]) -> Float[Array, "B SKETCH"]:
    """Returns sums of the entries of some rows with random signs, by row and column
    modulo 16; signs depend on the row's number alone.
    """
    key, W = jax.random.key(0), J.shape[-1]
    signs = jax.vmap(
        lambda row: jax.random.rademacher(jax.random.fold_in(key, row), (W,), jnp.float32)
    )(axes)
    group = jax.nn.one_hot(axes % _GROUPS, _GROUPS, dtype=jnp.float32)
    by_row = jnp.einsum("rg,rbw->bgw", group, signs[:, None] * J)
    padded = jnp.pad(by_row, ((0, 0), (0, 0), (0, -W % _GROUPS)))
    by_both = padded.reshape(*padded.shape[:2], -1, _GROUPS).sum(2)
    return by_both.reshape(len(by_both), SKETCH)


def block_of(site: str) -> int:
    """Returns the block that holds a site; −1 for `embed`. Raises ValueError for a site
    behind the blocks.
    """
    kind, _, rest = site.partition(".")
    if kind == "block":
        return int(rest.partition(".")[0])
    if kind == "embed":
        return -1
    raise ValueError(
        f"site {site!r} lies behind the blocks; a mean Jacobian leads from and to streams and "
        "parts of blocks."
    )


def check_sites(config: ModelConfig, sources: Sequence[str], target: str) -> None:
    """Raises ValueError for sites between which there is no mean Jacobian."""
    check_names(sources, config, replace=True)
    check_names([target], config, replace=False)
    for site in (*sources, target):
        width(site, config)
    for site in sources:
        if site == target or _order(site) > _order(target):
            raise ValueError(independent(site, target))


def _order(site: str) -> tuple[int, bool]:
    """Returns the block that holds a site, and whether it is the block's output, which
    comes behind its parts. In which order these come depends on the wiring.
    """
    return block_of(site), site.count(".") == 1


def independent(source: str, target: str) -> str:
    """Returns the error of a target whose derivative by a source is zero."""
    return f"{target!r} does not depend on {source!r}: give a source that comes before the target."
