"""One pass over the text with nothing stored: packed batches → activations, block after block → moments.

Several sentences share a row, blind to one another, so that hardly any computation goes to padding. Rows are sharded
over the devices; of the activations only those of one block, and of the streams where pairs reach across blocks, are in
memory at a time.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy import ndarray

from jmat.capture.moments import Moments, Pair, check_finite, combine, merge_hosts, update, zeros
from jmat.capture.snapshots import Snapshots, go_on, text_hash
from jmat.data.examples import Split, check_tokens
from jmat.data.packing import Batch, pack
from jmat.forward import run
from jmat.models.sites import check_names, width
from jmat.runtime import hosts
from jmat.runtime.digests import short_hash
from jmat.runtime.mesh import data_mesh, place, shard_batch
from jmat.runtime.progress import track

_SHORTEST_ROW = 128


def all_positions(split: Split, *, skip_first: int = 0, skip_tokens: Sequence[int] = ()) -> Bool[ndarray, " total"]:
    """Returns all tokens of a split but every sentence's first `skip_first`, and those with certain ids."""
    if skip_first < 0:
        raise ValueError(f"skip_first={skip_first}: expected at least 0.")
    position = np.arange(len(split.tokens)) - np.repeat(split.starts, split.lengths)
    return (position >= skip_first) & ~np.isin(split.tokens, list(skip_tokens))


def sampled_positions(split: Split) -> Bool[ndarray, " total"]:
    """Returns which tokens of a split are its examples."""
    read = np.zeros(len(split.tokens), bool)
    read[split.starts[split.rows] + split.positions] = True
    return read


def packed_batches(
    split: Split,
    read: Bool[ndarray, " total"],
    *,
    tokens_per_batch: int = 4096,
    row_length: int | None = None,
    row_multiple: int = 1,
) -> list[Batch]:
    """All sentences of which some token is read, several a row, in batches of one shape.

    Only the last batch can be short; it is filled up with empty rows.

    Args:
      split: the sentences.
      read: which tokens' activations are wanted (`all_positions`, `sampled_positions`).
      tokens_per_batch: places in one forward pass, as long as one row (or `row_multiple` rows) fits.
      row_length: T; by default the longest sentence's length, at least 128, rounded up to a multiple of 8.
      row_multiple: B is a multiple of this: the number of devices.

    Returns:
      Batches whose `targets` give a token's index in `split.tokens` where it is read, else −1.

    Raises:
      ValueError: no token is read, or a sentence is longer than a row.
    """
    if read.shape != split.tokens.shape or not read.any():
        raise ValueError(
            f"{int(read.sum())} of {len(split.tokens)} tokens are to be read: expected at least one; is every sentence "
            "shorter than the positions skipped?"
        )
    longest = int(split.lengths.max())
    row_length = row_length or -(-max(longest, _SHORTEST_ROW) // 8) * 8
    if longest > row_length:
        raise ValueError(f"the longest sentence has {longest} tokens, a row only {row_length}: give longer rows.")
    index = np.where(read, np.arange(len(read), dtype=np.int32), np.int32(-1))
    sentences = [slice(start, start + n) for start, n in zip(split.starts, split.lengths, strict=True)]
    whole = pack([(split.tokens[s], index[s]) for s in sentences if read[s].any()], row_length)
    most = -(-whole.rows // row_multiple) * row_multiple  # few sentences: no more rows than they need
    B = min(max(tokens_per_batch // row_length // row_multiple, 1) * row_multiple, most)
    return [whole.take(np.arange(start, min(start + B, whole.rows))).padded_to(B) for start in range(0, whole.rows, B)]


def visit(
    model: Any,
    batches: Sequence[Batch],
    pairs: Iterable[Pair],
    *,
    devices: Sequence[jax.Device] | None = None,
    progress: str | None = None,
) -> Iterator[tuple[Batch, Float[Array, "B T"], dict[str, Float[Array, "B T W"]]]]:
    """Runs the model over the batches; yields the activations of every pair once a batch.

    A batch comes in several parts, so that not all activations are in memory at once: the sites inside one block, block
    after block, then those of all pairs that reach across blocks. Both sites of a pair come together.

    Args:
      model: as `jmat.load` gives it.
      batches: from `packed_batches`, their rows a multiple of the number of devices.
      pairs: of sites.
      devices: default, all local ones.
      progress: what the progress bar says; None shows none.

    Yields:
      The batch, the weight of every token (1 where it is read), and activations by site.

    Raises:
      ValueError: an unknown site, a token id outside the embedding, a sentence longer than the positions.
    """
    pairs, config = list(pairs), model.config
    check_names([site for pair in pairs for site in pair], config, replace=False)
    for batch in batches:
        check_tokens(np.asarray(batch.inputs), config.vocab_size)
    inside, across = _groups(pairs, config.layers)
    wanted = [*inside, *(_block_of(site, config.layers) for site in across)]
    mesh = data_mesh(devices or jax.local_devices())
    model = place(mesh, model)
    for batch in track(batches, progress):
        x, segments, positions = shard_batch(mesh, (batch.inputs, batch.segments, batch.positions))
        weights: Any = shard_batch(mesh, (batch.targets >= 0).astype(np.float32))
        streams: dict[str, jax.Array] = {}
        for i in range(max(wanted) + 1):
            local = inside.get(i, ())
            passing = [site for site in across if _block_of(site, config.layers) == i]
            x, acts = run(
                model, x, keep=(*local, *passing), start=i, stop=i + 1, segments=segments, positions=positions
            )
            streams |= {site: acts.pop(site) for site in passing}
            if local:
                yield batch, weights, acts
        if across:
            yield batch, weights, streams


def stream_moments(
    model: Any,
    batches: Sequence[Batch],
    pairs: Sequence[Pair],
    *,
    devices: Sequence[jax.Device] | None = None,
    snapshots: Snapshots | None = None,
    progress: str | None = None,
) -> Moments:
    """Moments of all tokens that are read, in one pass. Takes what `visit` takes, and raises what it raises.

    Each host goes through its share of the batches; all get the moments of all.

    Memory for statistics does not depend on the number of tokens; `Moments` states it, for each device.

    Args:
      model: as for `visit`.
      batches: as for `visit`.
      pairs: (source site, target site); a site paired with itself has only its own second moments summed up.
      devices: as for `visit`.
      snapshots: from which a pass that was killed goes on; it ends with the same bits. None writes none.
      progress: as for `visit`.

    Raises:
      ValueError: also for NaN or infinity in the activations, naming the site.
      Terminated, OSError: as `go_on`.
    """
    how: dict[str, Any] = {"devices": devices, "snapshots": snapshots, "progress": progress}
    moments = merge_hosts(combine(partial_moments(model, hosts.share(batches), pairs, **how)))
    check_finite(moments, dict.fromkeys(site for pair in pairs for site in pair))
    return moments


def partial_moments(
    model: Any,
    batches: Sequence[Batch],
    pairs: Sequence[Pair],
    *,
    devices: Sequence[jax.Device] | None = None,
    moments: Moments | None = None,
    snapshots: Snapshots | None = None,
    progress: str | None = None,
) -> Moments:
    """Like `stream_moments`, but returns the sums of each device, so that an interrupted pass can go on.

    `moments` are those of the batches before, as this function returned them; they are used up. However the batches are
    divided over calls, the result has the same bits.
    """
    check_names([site for pair in pairs for site in pair], model.config, replace=False)
    mesh = data_mesh(devices or jax.local_devices())
    widths = {site: width(site, model.config) for pair in pairs for site in pair}
    start = zeros(pairs, widths, parts=mesh.size)
    shapes = [[jax.numpy.shape(leaf) for leaf in jax.tree.leaves(state)] for state in (start, moments or start)]
    if shapes[0] != shapes[1]:
        raise ValueError("the moments to go on from are of other pairs, or of another number of devices.")
    with jax.enable_x64(True):
        start = shard_batch(mesh, moments or start)

    def states(done: int, moments: Moments) -> Iterator[Moments]:
        return _after_each_batch(visit(model, batches[done:], pairs, devices=devices, progress=progress), moments)

    if snapshots is None:
        return functools.reduce(lambda _, after: after, states(0, start), start)
    what = {"number of devices": mesh.size, "text": text_hash(batches), "pairs": short_hash(repr(pairs).encode())}
    owner = {**snapshots.owner, **what}
    return go_on(states, start, len(batches), dataclasses.replace(snapshots, owner=owner))


def _after_each_batch(parts: Iterable[Any], moments: Moments) -> Iterator[Moments]:
    """The sums after every batch of `visit`; each is used up when the next one is asked for."""
    before = None
    for of_batch in by_batch(parts):
        for _, weights, acts in of_batch:
            moments = update(moments, acts, weights)
        jax.block_until_ready(before)  # the host runs ahead by one batch, not by all of them
        before = moments.count
        yield moments


def by_batch(parts: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """Yields what `visit` yields, the parts of one batch together."""
    return (of_batch for _, of_batch in itertools.groupby(parts, key=lambda part: id(part[0])))


def collect(
    model: Any,
    batches: Sequence[Batch],
    sites: Sequence[str],
    *,
    devices: Sequence[jax.Device] | None = None,
    progress: str | None = None,
) -> dict[str, Float[ndarray, "N W"]]:
    """Activations of all tokens that are read, in one pass, on the host: 4 N W bytes a site.

    Takes what `visit` takes, and raises what it raises. The tokens come in the order in which the batches hold them.
    Each host goes through its share of the batches; all get the values of all.
    """
    N, places = token_places(batches)
    values = {site: np.empty((N, width(site, model.config)), np.float32) for site in sites}
    parts = visit(model, hosts.share(batches), [(site, site) for site in sites], devices=devices, progress=progress)
    for at, of_batch in zip(places, by_batch(parts), strict=True):
        for batch, _, acts in of_batch:
            for site, value in acts.items():
                values[site][at] = np.asarray(value, np.float32)[batch.targets >= 0]
    mine = np.concatenate([np.empty(0, np.int64), *places])
    for filled in values.values():
        hosts.fill_in(filled, mine)
    return values


def token_places(batches: Sequence[Batch]) -> tuple[int, Sequence[Int[ndarray, " n"]]]:
    """N, the number of tokens that are read; and for each batch of this host's share which of the N are its own."""
    ends = np.cumsum([int((batch.targets >= 0).sum()) for batch in batches])
    return int(ends[-1]), hosts.share(np.split(np.arange(ends[-1]), ends[:-1]))


def _groups(pairs: Sequence[Pair], layers: int) -> tuple[dict[int, tuple[str, ...]], tuple[str, ...]]:
    """Sites to read block by block, and those that must wait for the end of the model.

    A block's sites are inside if no pair joins one of them to another block.
    """
    of_pair = [tuple(_block_of(site, layers) if _is_inside(site) else None for site in pair) for pair in pairs]
    leaves = {block for blocks in of_pair for block in blocks if len(set(blocks)) > 1}
    inside: dict[int, dict[str, None]] = {}
    across: dict[str, None] = {}
    for pair, (block, _) in zip(pairs, of_pair, strict=True):
        if block is None or block in leaves:
            across |= dict.fromkeys(pair)
        else:
            inside.setdefault(block, {}).update(dict.fromkeys(pair))
    return {block: tuple(sites) for block, sites in sorted(inside.items())}, tuple(across)


def _is_inside(site: str) -> bool:
    """Returns whether a site is a part of a block: `block.3.attn`, not `block.3` itself."""
    return site.count(".") > 1 and site.startswith("block.")


def _block_of(site: str, layers: int) -> int:
    """The block after which a site is known."""
    kind, _, rest = site.partition(".")
    return int(rest.partition(".")[0]) if kind == "block" else 0 if kind == "embed" else layers - 1
