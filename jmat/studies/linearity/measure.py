"""Measures how linear a model is, step by step and part by part (Razzhigaev et al.
2024, arXiv 2405.12250).

Two passes over text and nothing stored but sums: the first adds up the moments from
which every affine map and its in-sample score follow, the second applies the maps to
other sentences and keeps a few numbers a token.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy import ndarray

from jmat.capture.moments import Moments, Pair, mean
from jmat.capture.snapshots import Snapshots
from jmat.capture.stream import block_by_block, stream_moments, token_inputs
from jmat.capture.sweep import example_numbers, sweep
from jmat.data.batches import Batch
from jmat.maps.centring import centre, energy
from jmat.maps.from_moments import Linearity, anisotropy, fit, linearity
from jmat.maps.least_squares import factorise_each
from jmat.maps.solution import Solution
from jmat.models.family import Transformer
from jmat.models.sites import SUBMODULES, stream_sites
from jmat.report.rows import Row
from jmat.runtime import hosts
from jmat.runtime.annotations import Leaf
from jmat.runtime.mesh import local_mesh, place, replicate
from jmat.runtime.precision import float64
from jmat.runtime.pytrees import register_dataclass

# a pair of sites, and what its rows of results.json say: map, layer, target
Labels = dict[Pair, Row]


def step_pairs(layers: int, *, all_pairs: bool = False) -> Labels:
    """Returns the pairs of `mat`: from every layer to the next, h_i → h_{i+1}, the last
    one included; or to all later ones.
    """
    streams = stream_sites(layers)
    return {
        (streams[i], streams[j]): {"map": "mat", "layer": i, "target": j}
        for i in range(layers)
        for j in range(i + 1, layers + 1 if all_pairs else i + 2)
    }


def part_pairs(layers: int) -> Labels:
    """Returns the pairs of `ln_1`, `attn`, `ln_2`, `ffn`: from every sub-module's input
    to its output, before the residual add.

    `layer` is the block, from 0.
    """
    return {
        (f"block.{i}.{part}.in", f"block.{i}.{part}"): {"map": part, "layer": i}
        for i in range(layers)
        for part in SUBMODULES
    }


@dataclasses.dataclass(frozen=True, eq=False)
class PerToken:
    """Holds the figures of one pair on the evaluation text: numbers per token, in the
    order of `Measured.tokens`.

    Attributes:
      error: `||y − ŷ||²` for the affine map fitted on other text.
      total: `||y − ȳ||²`.
      change: `||(y − x) − mean||²`, what is added to the stream.
      ratio: `||y − x|| / ||x||`, the norm of what is added against that of the stream.
      cosine: of x and y.

    The means in `total` and `change` are the fit text's; `off_total` and `off_change`
    are what the evaluation text's own would take off their sums.
    """

    error: Float[ndarray, " N"]
    total: Float[ndarray, " N"]
    change: Float[ndarray, " N"]
    ratio: Float[ndarray, " N"]
    cosine: Float[ndarray, " N"]
    off_total: float
    off_change: float


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """Holds the measurements of one model.

    Attributes:
      in_sample: both scores of each pair, on the fit text.
      rank: of each source.
      per_token: of each pair, on the evaluation text.
      tokens: index in the evaluation split of each token read, rising.
      anisotropy: of h_0 .. h_L, on the fit text.
    """

    in_sample: dict[Pair, Linearity]
    rank: dict[str, int]
    per_token: dict[Pair, PerToken]
    tokens: Int[ndarray, " N"]
    anisotropy: list[float]


def measure(
    model: Transformer,
    fit_batches: Sequence[Batch],
    eval_batches: Sequence[Batch],
    labels: Labels,
    *,
    devices: Sequence[jax.Device] | None = None,
    snapshots: Snapshots | None = None,
    progress: str | None = None,
) -> Measured:
    """Fits an affine map for every pair on one text, and applies it to the other
    (`packed_batches`).

    Each host goes through its share of the batches; all hosts get all results. A first
    pass that was killed goes on from its `snapshots`.

    Memory: `Moments` for the pairs, and 20 bytes a pair for each evaluation token.

    Raises:
      ValueError: as `stream_moments`.
    """
    streams = stream_sites(model.config.layers)
    pairs = [*labels, *((stream, stream) for stream in streams)]
    say = None if progress is None else f"{progress}fit"
    moments = stream_moments(
        model, fit_batches, pairs, devices=devices, snapshots=snapshots, progress=say
    )
    in_sample: dict[Pair, Linearity] = {}
    rank: dict[str, int] = {}
    maps: dict[Pair, _Affine] = {}
    for source in dict.fromkeys(source for source, _ in labels):
        targets = [target for start, target in labels if start == source]
        _, solution = fit(moments, source, targets, intercept=True)
        rank[source] = int(solution.rank)
        in_sample |= {
            (source, t): found for t, found in linearity(moments, source, targets, solution).items()
        }
        D = len(solution.weights)
        for k, target in enumerate(targets):
            columns = slice(k * D, (k + 1) * D)
            maps[source, target] = _affine(moments, (source, target), solution, columns)
    spread = [anisotropy(moments, stream) for stream in streams]
    del moments
    say = None if progress is None else f"{progress}evaluate"
    per_token, tokens = _apply(model, eval_batches, maps, devices, say)
    return Measured(in_sample, rank, per_token, tokens, spread)


def stored_linearity(streams: Sequence[Float[ndarray, "N D"]]) -> dict[tuple[int, int], float]:
    """Returns the in-sample linearity of h_j in h_i for all i < j, from stored
    activations h_0 .. h_L; within 1e-6 of float64.

    One factorisation for every i, and one product of matrices for every pair. 1 where
    h_j does not vary.

    Raises ValueError for NaN and infinity.
    """
    centred = [centre(stream) for stream in streams]
    totals = [float(energy(stream)) for stream in centred]
    if not np.isfinite(totals).all():
        raise ValueError(
            f"stream {int(np.argmin(np.isfinite(totals)))} holds NaN or infinity for some example."
        )
    sources = factorise_each(centred[:-1], condition=False)
    found = {
        (i, j): X.projected(centred[j])
        for i, X in enumerate(sources)
        for j in range(i + 1, len(streams))
    }
    return {
        (i, j): float(part) / totals[j] if totals[j] > 0 else 1.0 for (i, j), part in found.items()
    }


@functools.partial(
    register_dataclass, data_fields=["W", "bias", "x_mean", "y_mean"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True, eq=False)
class _Affine:
    W: Leaf[Array | ndarray]
    bias: Leaf[Array | ndarray]
    x_mean: Leaf[Array | ndarray]
    y_mean: Leaf[Array | ndarray]


def _affine(moments: Moments, pair: Pair, solution: Solution, columns: slice) -> _Affine:
    x_mean, y_mean = (np.asarray(mean(moments, site)) for site in pair)
    assert solution.bias is not None
    return _Affine(solution.weights[:, columns], solution.bias[columns], x_mean, y_mean)


def _apply(
    model: Transformer,
    batches: Sequence[Batch],
    maps: Mapping[Pair, _Affine],
    devices: Sequence[jax.Device] | None,
    progress: str | None,
) -> tuple[dict[Pair, PerToken], Int[ndarray, " N"]]:
    """Returns the numbers of every token that is read, in the order of the text, and
    its index in the split.
    """
    mesh, pairs = local_mesh(devices), list(maps)
    with float64():
        placed = dict(zip(pairs, replicate(mesh, [maps[pair] for pair in pairs]), strict=True))
    parts = block_by_block(place(model, mesh), pairs)
    # [B, 2, D], over the batches of this process
    sums: dict[Pair, jax.Array | int] = dict.fromkeys(pairs, 0)

    def compute(inputs: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> list[jax.Array]:
        *where, weights = inputs
        values = {}
        for acts in parts(*where):
            with float64():
                for pair in pairs:
                    if acts.keys() >= set(pair):
                        values[pair], off = _scalars(
                            placed[pair], *(acts[site] for site in pair), weights
                        )
                        sums[pair] = sums[pair] + off
        return [values[pair] for pair in pairs]

    values = sweep(batches, compute, inputs=token_inputs, mesh=mesh, progress=progress)
    per_token, tokens = {}, example_numbers(batches)
    # a process without a batch has computed another's
    counts = 1.0 if hosts.share(batches) else 0.0
    for pair, columns in zip(pairs, values, strict=True):
        if not np.isfinite(columns).all():
            raise ValueError(
                f"the activations of {pair} are not finite for some evaluation token: try "
                "--dtype=float32."
            )
        mine = counts * np.asarray(sums[pair]).sum(0)
        off_total, off_change = (
            functools.reduce(np.add, hosts.gather(mine)).reshape(2, -1) ** 2
        ).sum(-1) / len(tokens)
        error, total, change, ratio, cosine = np.ascontiguousarray(columns.T)
        per_token[pair] = PerToken(
            error, total, change, ratio, cosine, float(off_total), float(off_change)
        )
    return per_token, tokens


@jax.jit
def _scalars(affine, x, y, weights):
    """Returns [B, T, 5], float32 once computed, and two sums of vectors a row, [B, 2,
    D]: devices need not meet.
    """
    x, y, w = x.astype(jnp.float64), y.astype(jnp.float64), weights.astype(jnp.float64)[..., None]
    predicted = jnp.matmul(x, affine.W, precision=jax.lax.Precision.HIGHEST) + affine.bias
    centred = y - affine.y_mean
    change = centred - (x - affine.x_mean)
    square = lambda v: jnp.sum(v * v, axis=-1)  # noqa: E731
    norms = jnp.sqrt(square(x)), jnp.sqrt(square(y))
    tiny = jnp.finfo(jnp.float64).tiny
    ratio = jnp.sqrt(square(y - x)) / jnp.maximum(norms[0], tiny)
    cosine = jnp.sum(x * y, axis=-1) / jnp.maximum(norms[0] * norms[1], tiny)
    each = jnp.stack(
        [square(y - predicted), square(centred), square(change), ratio, cosine], axis=-1
    )
    off = jnp.stack([jnp.sum(jnp.where(w > 0, v, 0), axis=1) for v in (centred, change)], axis=1)
    return each.astype(jnp.float32), off
