"""Second moments of activations, summed up while the text streams by: all that linear
maps and their scores need.

Sums of products lose the answer in float32: they square the condition number. Here the
activations, float32, are multiplied and added in float64, which has digits to spare.
Two choices keep them:

- Every site is shifted by its mean in the first batch before it is multiplied, so that
  the mean of an outlier coordinate does not drown its spread. Statistics with different
  shifts merge exactly.
- Only at the end, when maps are fitted (`jmat.maps.from_moments`), are the mean's
  products removed or put back.

GPUs multiply float64 at about their float32 rate or half of it, CPUs at half; TPUs
emulate it slowly.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy import ndarray

from jmat.runtime import hosts
from jmat.runtime.annotations import Leaf
from jmat.runtime.precision import float64
from jmat.runtime.pytrees import register_dataclass

Pair = tuple[str, str]  # (source site, target site)
BySite = dict[str, Array]


@functools.partial(
    register_dataclass,
    data_fields=["count", "shift", "sums", "squares", "own", "cross"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Moments:
    """Holds sums over tokens, float64, for a fixed set of pairs (source site, target
    site). With w a token's weight:

    Attributes:
      count: site → Σ w.
      shift: site → c [D], a fixed vector near the mean, about which the other sums are
        taken.
      sums: site → Σ w (x − c) [D].
      squares: site → Σ w (x − c)² [D], each coordinate by itself.
      own: source → Σ w (x − c)(x − c)ᵀ [D, D].
      cross: source → target → Σ w (x − c)(y − c)ᵀ [D, E].

    Memory, whatever the number of tokens: 8 D² bytes for each source and as much for
    each pair. From all L layers to the final one 2L matrices, for all pairs of layers L
    + L(L+1)/2: 0.8 GB for GPT-2 (D = 768, L = 12, 90 matrices), 25 GB for GPT-2-XL (D =
    1600, L = 48, 1,224 matrices; 2 GB to the final layer only).

    Every leaf may have one more leading axis, of partial sums, one a device: devices
    then need not wait for one another until `combine` adds them up.
    """

    count: Leaf[BySite]
    shift: Leaf[BySite]
    sums: Leaf[BySite]
    squares: Leaf[BySite]
    own: Leaf[BySite]
    cross: Leaf[dict[str, BySite]]

    @property
    def pairs(self) -> list[Pair]:
        """Returns (source, target) of each pair; a site that was given as its own
        target has only its own second moments.
        """
        return [(source, target) for source in self.cross for target in self.cross[source]]


@float64()
def zeros(pairs: Iterable[Pair], widths: Mapping[str, int], *, parts: int | None = None) -> Moments:
    """Returns the moments of no tokens.

    A pair `(site, site)` asks for the site's own second moments only. `widths` gives D
    of every site, `parts` the number of partial sums (default: no such axis).
    """
    pairs = list(dict.fromkeys(pairs))
    if not pairs:
        raise ValueError("no pairs of sites: there is nothing to sum up.")
    sites = dict.fromkeys(site for pair in pairs for site in pair)
    lead = () if parts is None else (parts,)
    make = lambda *shape: jnp.zeros((*lead, *shape), jnp.float64)  # noqa: E731
    shift, sums, squares = ({site: make(widths[site]) for site in sites} for _ in range(3))
    own = {source: make(widths[source], widths[source]) for source, _ in pairs}
    cross: dict[str, BySite] = {source: {} for source in own}
    for source, target in pairs:
        if target != source:
            cross[source][target] = make(widths[source], widths[target])
    return Moments({site: make() for site in sites}, shift, sums, squares, own, cross)


@float64()
def update(
    moments: Moments,
    acts: Mapping[str, Float[Array | ndarray, "*batch D"]],
    weights: Float[Array | ndarray, "*batch"],
) -> Moments:
    """Adds a batch; what was passed in is used up (donated).

    The matrices are added to one after another by one compiled program, so the memory
    beside them is that of one. Of partial sums, each takes its equal share of the
    batch's first axis, as the batch is sharded over the devices.

    Args:
      moments: so far.
      acts: the batch's activations by site. All sites of all pairs, or, where a batch's
        sites come in several parts, those of some pairs: then no site may come twice.
      weights: of the tokens; 0 leaves one out, whatever its activations hold.

    Raises:
      ValueError: a site of no pair, or one site of a pair without the other.
    """
    if unknown := acts.keys() - moments.count.keys():
        raise ValueError(
            f"site {min(unknown)!r} is in none of the pairs; they have {', '.join(moments.count)}."
        )
    for pair in moments.pairs:
        if len(there := acts.keys() & set(pair)) == 1:
            raise ValueError(
                f"of the pair {pair}, the batch has only {there.pop()!r}; both must come together."
            )
    count, shift, sums = dict(moments.count), dict(moments.shift), dict(moments.sums)
    squares, own, cross = (
        dict(moments.squares),
        dict(moments.own),
        {s: dict(to) for s, to in moments.cross.items()},
    )
    for site, x in acts.items():
        vectors = (shift[site], sums[site], squares[site])
        count[site], shift[site], sums[site], squares[site] = _add_vectors(
            count[site], vectors, x, weights
        )
    for source in acts.keys() & own.keys():
        c, x = shift[source], acts[source]
        own[source] = _add_product(own[source], c, c, x, x, weights)
        for target in cross[source]:
            total = cross[source][target]
            cross[source][target] = _add_product(total, c, shift[target], x, acts[target], weights)
    return Moments(count, shift, sums, squares, own, cross)


# not the count: whoever waits for a batch can wait for that
@functools.partial(jax.jit, donate_argnums=1)
def _add_vectors(
    count: Array, vectors: tuple[Array, ...], x: Array | ndarray, weights: Array | ndarray
) -> tuple[Array, ...]:
    def add(count, shift, sums, squares, x, w):
        real = w[:, None] > 0
        x = jnp.where(real, x, 0)
        mean = jnp.sum(w[:, None] * x, axis=0) / jnp.maximum(jnp.sum(w), 1)
        shift = jnp.where(count > 0, shift, mean)
        z = jnp.where(real, x - shift, 0)
        weighted = w[:, None] * z
        return (
            count + jnp.sum(w),
            shift,
            sums + jnp.sum(weighted, axis=0),
            squares + jnp.sum(weighted * z, axis=0),
        )

    return _by_part(add, count, *vectors, x=(x,), weights=weights)


@functools.partial(jax.jit, donate_argnums=0)
def _add_product(
    total: Array,
    shift_x: Array,
    shift_y: Array,
    x: Array | ndarray,
    y: Array | ndarray,
    weights: Array | ndarray,
) -> Array:
    def add(total, shift_x, shift_y, x, y, w):
        real = w[:, None] > 0
        zx = jnp.where(real, w[:, None] * (x - shift_x), 0)
        zy = jnp.where(real, y - shift_y, 0)
        return total + jnp.matmul(zx.T, zy, precision=jax.lax.Precision.HIGHEST)

    return _by_part(add, total, shift_x, shift_y, x=(x, y), weights=weights)


def _by_part(add, first, *state, x, weights):
    """Applies `add` to [N, D] activations in float64, or to each part's share of them."""
    parts = () if state[0].ndim == 1 else (state[0].shape[0],)  # a shift is [D], or [parts, D]
    rows = [values.astype(jnp.float64).reshape(*parts, -1, values.shape[-1]) for values in x]
    w = weights.astype(jnp.float64).reshape(*parts, -1)
    return (jax.vmap(add) if parts else add)(first, *state, *rows, w)


@float64()
def combine(moments: Moments) -> Moments:
    """Adds up the partial sums of all devices of this process, on the first of them;
    exact up to float64 rounding.
    """
    shards = [leaf.addressable_shards for leaf in jax.tree.leaves(moments)]
    home = shards[0][0].device
    parts = []
    for k in range(len(shards[0])):
        leaves = [
            jax.device_put(shard[k].data.reshape(shard[k].data.shape[1:]), home) for shard in shards
        ]
        parts.append(jax.tree.unflatten(jax.tree.structure(moments), leaves))
    return functools.reduce(merge, parts)


@float64()
def merge(first: Moments, second: Moments) -> Moments:
    """Returns the moments of both texts together, as if one pass had seen both; exact
    up to float64 rounding.

    For statistics of different hosts, processes or runs. Raises ValueError if they are
    of other sites or widths.
    """
    layouts = [
        [(path, jnp.shape(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(moments)]
        for moments in (first, second)
    ]
    if layouts[0] != layouts[1]:
        raise ValueError(
            "these moments are of other pairs of sites, or of other widths: they cannot be added."
        )
    return _merge(first, second)


@float64()
def merge_hosts(moments: Moments) -> Moments:
    """Returns the moments of all processes together, the same in each; what was passed
    in is used up (donated).

    All processes must call it. Leaf by leaf, so that a process never holds more than
    one matrix of every other.
    """
    if hosts.count() == 1:
        return moments
    sites = list(moments.count)
    ends = np.cumsum([width(moments, site) for site in sites])[:-1]
    counts = np.stack(hosts.gather(np.array([moments.count[site] for site in sites])))
    shifts = [
        np.split(each, ends)
        for each in hosts.gather(np.concatenate([moments.shift[s] for s in sites]))
    ]
    seen_by = (counts > 0).argmax(0).tolist()
    origin = {
        site: jnp.asarray(shifts[process][k])
        for k, (site, process) in enumerate(zip(sites, seen_by, strict=True))
    }
    leaves, tree = jax.tree.flatten(_about_origin(moments, origin))
    for k, leaf in enumerate(leaves):
        total = functools.reduce(np.add, hosts.gather(np.asarray(leaf)))
        leaves[k] = jnp.asarray(total.reshape(jnp.shape(leaf)))
    return dataclasses.replace(jax.tree.unflatten(tree, leaves), shift=origin)


@jax.jit
def _merge(first: Moments, second: Moments) -> Moments:
    seen = {site: first.count[site] > 0 for site in first.count}
    shift = {site: jnp.where(seen[site], first.shift[site], second.shift[site]) for site in seen}
    added = jax.tree.map(jnp.add, _about(first, shift), _about(second, shift))
    return dataclasses.replace(added, shift=shift)


def _about(moments: Moments, origin: BySite) -> Moments:
    """Returns the sums about another origin."""
    n, sums = moments.count, moments.sums
    step = {site: moments.shift[site] - origin[site] for site in origin}
    return Moments(
        count=n,
        shift=origin,
        sums={site: sums[site] + n[site] * step[site] for site in n},
        squares={s: moments.squares[s] + 2 * step[s] * sums[s] + n[s] * step[s] ** 2 for s in n},
        own={
            s: moved(total, n[s], (sums[s], sums[s]), (step[s], step[s]))
            for s, total in moments.own.items()
        },
        cross={
            s: {
                t: moved(total, n[s], (sums[s], sums[t]), (step[s], step[t]))
                for t, total in targets.items()
            }
            for s, targets in moments.cross.items()
        },
    )


_about_origin = jax.jit(_about, donate_argnums=0)


def moved(
    total: Array, count: Array, sums: tuple[Array, Array], steps: tuple[Array, Array]
) -> Array:
    """Returns `Σ (x + a)(y + b)ᵀ` from `Σ x yᵀ`, with `steps = (a, b)`."""
    return (
        total
        + jnp.outer(steps[0], sums[1])
        + jnp.outer(sums[0], steps[1])
        + count * jnp.outer(*steps)
    )


@float64()
def mean(moments: Moments, site: str) -> Float[Array | ndarray, " D"]:
    """Returns the mean of the activations, float64."""
    return moments.shift[site] + moments.sums[site] / moments.count[site]


def width(moments: Moments, site: str) -> int:
    """Returns the width D of a site."""
    return moments.sums[site].shape[0]
