"""Sums of Jacobians over prompts: one pass over texts, sharded over devices and hosts,
with snapshots.

Prompts are independent of one another. So the squared norms and sketches of theirs,
which are kept beside the sums, say how far the mean is from that of endless text
(`jmat.maps.jacobian`).
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy import ndarray

from jmat.capture.prompts import PromptBatch, prompt_batches
from jmat.capture.pullback import SKETCH, Pulled, check_sites, independent, pull_back
from jmat.capture.snapshots import Snapshots, go_on
from jmat.capture.sweep import on_devices
from jmat.data.examples import Split, check_tokens
from jmat.models.family import Transformer
from jmat.models.site_names import site_of
from jmat.models.sites import width
from jmat.runtime import hosts
from jmat.runtime.annotations import Leaf
from jmat.runtime.checks import check_number, check_whole
from jmat.runtime.digests import short_hash
from jmat.runtime.mesh import local_mesh, place, shard_batch
from jmat.runtime.precision import float64
from jmat.runtime.pytrees import register_dataclass

MAX_TOKENS, SKIP_FIRST = 128, 16
_FEWEST = 8  # prompts of a process, before their errors are believed
_ROWS = {"cpu": 2048}  # in one product: so many stay in its caches
_ROWS_ELSEWHERE = 8192

BySite = dict[str, Array]


@functools.partial(
    register_dataclass,
    data_fields=["batches", "total", "squares", "sketches", "means"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, eq=False)
class _State:
    """Holds what a pass has summed up, float64; a part or a row for each device.

    Attributes:
      batches: done so far, [parts].
      total: by source, [parts, E, W].
      squares: by source, [B, batches].
      sketches: by source, [B, batches, SKETCH].
      means: by site, [parts, W].
    """

    batches: Leaf[Array]
    total: Leaf[BySite]
    squares: Leaf[BySite]
    sketches: Leaf[BySite]
    means: Leaf[BySite]


class Pass(TypedDict, total=False):
    """Holds the settings of a pass, as `jacobian_sums` explains them."""

    max_tokens: int
    skip_first: int
    rows: int | None
    fewest: int
    seed: int
    devices: Sequence[jax.Device] | None
    snapshots: Snapshots | None
    progress: str | None


@dataclasses.dataclass(frozen=True, eq=False)
class JacobianSums:
    """Holds sums over prompts, of all hosts, float64.

    Attributes:
      total: source → sum of the prompts' Jacobians [E, W].
      squares: source → squared norm of each prompt's Jacobian [n].
      sketches: source → sketch of each [n, SKETCH].
      means: site → sum of the prompts' means [W].
      prompts: n.
    """

    total: dict[str, Float[ndarray, "E W"]]
    squares: dict[str, Float[ndarray, " n"]]
    sketches: dict[str, Float[ndarray, "n m"]]
    means: dict[str, Float[ndarray, " W"]]
    prompts: int


def jacobian_sums(
    model: Transformer,
    split: Split,
    sources: Sequence[str],
    target: str,
    *,
    error: float | int = 0.0,
    max_tokens: int = MAX_TOKENS,
    skip_first: int = SKIP_FIRST,
    rows: int | None = None,
    fewest: int = 2,
    seed: int = 0,
    devices: Sequence[jax.Device] | None = None,
    snapshots: Snapshots | None = None,
    progress: str | None = None,
) -> JacobianSums:
    """Adds up the Jacobians of a target by several sources, prompt by prompt.

    Args:
      model: as `jmat.load` returns it.
      split: the texts, each of which is a prompt; its examples do not matter.
      sources: sites that come before the target: `embed`, streams, parts of blocks.
      target: such a site.
      error: ends the pass where the relative error (`relative_error`) of every source
        is at most this; 0: at the end of the text.
      max_tokens: tokens at which a text is cut; no more than the model's positions.
      skip_first: first positions of a text that do not count. Its last one never does.
      rows: about so many rows are in each product; None: 2,048 on a CPU, else 8,192.
      fewest: prompts that are needed; one alone has no error.
      seed: order of the texts.
      devices: default, all local ones.
      snapshots: from which a pass that was killed goes on; it ends with the same bits.
      progress: label of the progress bar; by default none is shown.

    Raises:
      ValueError: sites that the model does not have, or in the wrong order; too few
        texts that are long enough; NaN or infinity in what was summed up.
      Terminated, OSError: as `jmat.capture.snapshots.go_on`.
    """
    names = {name: site_of(name, model.config) for name in (*sources, target)}
    sources, target = list(dict.fromkeys(names[name] for name in sources)), names[target]
    check_sites(model.config, sources, target)
    check_number("error", error, 0)
    check_whole("skip_first", skip_first, 0)
    check_whole("max_tokens", max_tokens, 1)
    if rows is not None:
        check_whole("rows", rows, 1)
    check_tokens(split.tokens, model.config.vocab_size)
    mesh = local_mesh(devices)
    rows = rows or _ROWS.get(mesh.devices.flat[0].platform, _ROWS_ELSEWHERE)
    T, E = min(max_tokens, model.config.num_positions), width(target, model.config)
    longest = min(T, int(split.lengths.max(initial=1)))
    each = max(min(rows // (longest * E), split.num_sentences // mesh.size), 1)
    plan = prompt_batches(
        split,
        max_tokens=T,
        skip_first=skip_first,
        rows=each * mesh.size,
        fewest=fewest,
        seed=seed,
    )
    mine = hosts.share(plan)
    sites: dict[str, int] = {site: width(site, model.config) for site in (*sources, target)}
    with float64():
        start = shard_batch(mesh, _zeros(sites, target, mesh.size, each * mesh.size, len(mine)))
    model = place(model, mesh)
    unseen = skip_first if model.config.causal else 0
    work = functools.partial(
        pull_back,
        model,
        sources=tuple(sources),
        target=target,
        rows=rows,
        mesh=mesh,
        unseen=unseen,
    )

    def states(done: int, state: _State) -> Iterator[_State]:
        inputs = lambda batch: batch.inputs  # noqa: E731
        for k, (_, given) in enumerate(
            on_devices(mine[done:], inputs=inputs, mesh=mesh, progress=progress), start=done
        ):
            if error and _is_exact(state, mine[:k], error):
                return
            state = _add(state, work(given), np.int32(k))
            jax.block_until_ready(state.batches)
            if k == 0:
                _check_dependence(state, target)
            yield state

    if snapshots is None:
        state = functools.reduce(lambda _, after: after, states(0, start), start)
    else:
        settings = (tuple(sources), target, error, max_tokens, skip_first, rows)
        owner = {
            **snapshots.owner,
            "number of devices": mesh.size,
            "text": short_hash(*(field.data for batch in mine for field in batch)),
            "settings of the Jacobians": short_hash(repr(settings).encode()),
        }
        kept = dataclasses.replace(snapshots, owner=owner)
        state = go_on(states, start, len(mine), kept)
    return _named(_together(state, mine), names)


def _named(sums: JacobianSums, names: Mapping[str, str]) -> JacobianSums:
    """Returns the sums by the names that sites were given, which may be those of other
    libraries.
    """

    def named(by_site: Mapping[str, ndarray]) -> dict[str, ndarray]:
        return {name: by_site[site] for name, site in names.items() if site in by_site}

    total, squares, sketches = (named(part) for part in (sums.total, sums.squares, sums.sketches))
    return JacobianSums(total, squares, sketches, named(sums.means), sums.prompts)


def _check_dependence(state: _State, target: str) -> None:
    """Raises ValueError where the target's derivative was zero in the first batch."""
    for site, values in state.squares.items():
        if not np.asarray(values)[:, 0].any():
            raise ValueError(independent(site, target))


def relative_error(total: Float[ndarray, ""] | float, squares: Float[ndarray, " n"]) -> float:
    """Returns `√(V / n) / ‖J̄‖`: the distance of the mean of n Jacobians from that of
    endless text, over its norm.

    Args:
      total: squared norm of their sum.
      squares: squared norm of each; V is their variance. Infinite for one prompt alone.
    """
    n = len(squares)
    mean = float(total) / n**2
    if n < 2 or mean == 0:
        return math.inf
    variance = max(float(np.mean(squares)) - mean, 0.0) * n / (n - 1)
    return math.sqrt(variance / n / mean)


def _zeros(sites: dict[str, int], target: str, parts: int, rows: int, batches: int) -> _State:
    make = functools.partial(jnp.zeros, dtype=jnp.float64)
    sources = [site for site in sites if site != target]
    return _State(
        make(parts),
        {site: make((parts, sites[target], sites[site])) for site in sources},
        {site: make((rows, batches)) for site in sources},
        {site: make((rows, batches, SKETCH)) for site in sources},
        {site: make((parts, size)) for site, size in sites.items()},
    )


@float64()
def _add(state: _State, pulled: Pulled, k: np.int32) -> _State:
    return _added(state, pulled, k)


@functools.partial(jax.jit, donate_argnums=0)
def _added(state: _State, pulled: Pulled, k: Int[Array, ""]) -> _State:
    def plus(sums: BySite, values: BySite) -> BySite:
        return {site: sums[site] + values[site].astype(jnp.float64) for site in sums}

    def put(kept: BySite, values: BySite) -> BySite:
        return {site: kept[site].at[:, k].set(values[site].astype(jnp.float64)) for site in kept}

    return _State(
        state.batches + 1,
        plus(state.total, pulled.total),
        put(state.squares, pulled.squares),
        put(state.sketches, pulled.sketches),
        plus(state.means, pulled.means),
    )


def _is_exact(state: _State, done: Sequence[PromptBatch], error: float | int) -> bool:
    """Returns whether the error of every source is small enough, with as many prompts
    from each of the other processes.
    """
    real = _real(done)
    if real.sum() < _FEWEST:
        return False
    with float64():
        totals = jax.device_get(_squared_norms(state.total))
    own = error * math.sqrt(hosts.count())
    return all(
        relative_error(totals[site], np.asarray(values)[:, : len(done)].T[real]) <= own
        for site, values in state.squares.items()
    )


@jax.jit
def _squared_norms(total: BySite) -> BySite:
    return {site: jnp.square(parts.sum(0)).sum() for site, parts in total.items()}


def _real(batches: Sequence[PromptBatch]) -> ndarray:
    """Returns which rows of batches hold a prompt, [batches, B]."""
    return np.array([batch.examples[:, 0] >= 0 for batch in batches], bool)


def _together(state: _State, plan: Sequence[PromptBatch]) -> JacobianSums:
    """Returns the sums of all devices and processes."""
    done = int(np.asarray(state.batches)[0])
    real = _real(plan[:done])

    def total(parts: Array) -> ndarray:
        own = np.asarray(parts).sum(0)
        return functools.reduce(np.add, hosts.gather(own)).reshape(own.shape)

    def each(rows: Array) -> ndarray:
        by_batch = np.moveaxis(np.asarray(rows)[:, :done], 1, 0)
        own = by_batch[real] if done else by_batch.reshape(0, *by_batch.shape[2:])
        return np.concatenate(hosts.gather(own)).reshape(-1, *own.shape[1:])

    squares = {site: each(values) for site, values in state.squares.items()}
    for site, values in squares.items():
        if not np.isfinite(values).all():
            raise ValueError(
                f"the Jacobian by site {site!r} is not finite for some prompt; the weights are "
                "damaged, or the dtype overflows: try --dtype=float32."
            )
    return JacobianSums(
        {site: total(parts) for site, parts in state.total.items()},
        squares,
        {site: each(values) for site, values in state.sketches.items()},
        {site: total(parts) for site, parts in state.means.items()},
        len(next(iter(squares.values()))),
    )
