"""One pass over the text with nothing stored: packed batches → activations, block after
block → moments.

Several sentences share a row, blind to one another, so that hardly any computation goes
to padding. Rows are sharded over the devices; of the activations only those of one
block, and of the streams where pairs reach across blocks, are in memory at a time.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy import ndarray

from jmat.capture.moments import Moments, Pair, combine, merge_hosts, update, zeros
from jmat.capture.snapshots import Snapshots, go_on, text_hash
from jmat.capture.statistics import check_finite
from jmat.capture.sweep import on_devices
from jmat.data.batches import Batch
from jmat.data.examples import Split, check_tokens
from jmat.data.packing import lay_out, shuffled_rows
from jmat.forward import run
from jmat.models.config import ModelConfig
from jmat.models.family import Transformer
from jmat.models.site_names import site_of
from jmat.models.sites import check_names, width
from jmat.runtime import hosts
from jmat.runtime.annotations import Keywords
from jmat.runtime.digests import short_hash
from jmat.runtime.mesh import local_mesh, place, shard_batch
from jmat.runtime.precision import float64

_SHORTEST_ROW = 128


def all_positions(
    split: Split, *, skip_first: int = 0, skip_tokens: Sequence[int] = ()
) -> Bool[ndarray, " total"]:
    """Returns all tokens of a split but every sentence's first `skip_first`, and those
    with certain ids.
    """
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
    """Returns all sentences of which some token is read, several a row, in batches of
    one shape.

    Only the last batch can be short; it is filled up with empty rows.

    Args:
      split: the sentences.
      read: which tokens' activations are wanted (`all_positions`, `sampled_positions`).
      tokens_per_batch: places in one forward pass, as long as one row (or
        `row_multiple` rows) fits.
      row_length: T; by default the longest sentence's length, at least 128, rounded up
        to a multiple of 8.
      row_multiple: B is a multiple of this: the number of devices.

    Returns:
      Batches whose examples are the tokens that are read, each at its own place, by
      their index in `split.tokens`.

    Raises:
      ValueError: no token is read, or a sentence is longer than a row.
    """
    if read.shape != split.tokens.shape or not read.any():
        raise ValueError(
            f"{int(read.sum())} of {len(split.tokens)} tokens are to be read: expected at least "
            "one; is every sentence shorter than the positions skipped?"
        )
    longest = int(split.lengths.max())
    T = row_length or -(-max(longest, _SHORTEST_ROW) // 8) * 8
    if longest > T:
        raise ValueError(
            f"the longest sentence has {longest} tokens, a row only {T}: give longer rows."
        )
    chosen = np.flatnonzero(np.logical_or.reduceat(read, split.starts))
    rows = [chosen[members] for members in shuffled_rows(split.lengths[chosen], T)]
    # few sentences: no more rows than they need
    most = -(-len(rows) // row_multiple) * row_multiple
    B = min(max(tokens_per_batch // T // row_multiple, 1) * row_multiple, most)
    R = -(-len(rows) // B) * B
    places = lay_out(rows, split.lengths, T, count=R)
    tokens, examples = (np.full(R * T, fill, np.int32) for fill in (0, -1))
    index = split.places(places.members)
    tokens[places.of_token] = split.tokens[index]
    examples[places.of_token] = np.where(read[index], index, -1)
    columns = np.broadcast_to(np.arange(T, dtype=np.int32), (R, T))  # takes no memory
    fields = (
        tokens.reshape(R, T),
        places.segments,
        places.positions,
        columns,
        examples.reshape(R, T),
    )
    return [Batch(*(field[k : k + B] for field in fields)) for k in range(0, R, B)]


# A batch's activations by site, in several parts.
Tokens = Int[Array | ndarray, "B T"]
Parts = Callable[[Tokens, Tokens, Tokens], Iterator[dict[str, Array]]]


def block_by_block(model: Transformer, pairs: Sequence[Pair]) -> Parts:
    """Returns a function from tokens, segments and positions [B, T] to their
    activations [B, T, W] by site.

    They come in several parts, so that not all are in memory at once: the sites inside
    one block, block after block, then those of all pairs that reach across blocks. Both
    sites of a pair come together.

    Raises ValueError for an unknown site.
    """
    sites = _sites(pairs, model.config)
    inside, across = _groups(pairs, sites, model.config.layers)
    blocks = {name: _block_of(sites[name], model.config.layers) for name in across}
    last = max([*inside, *blocks.values()])

    def parts(tokens: Tokens, segments: Tokens, positions: Tokens) -> Iterator[dict[str, Array]]:
        x: Tokens | Float[Array, "B T D"] = tokens
        streams: dict[str, Array] = {}
        for i in range(last + 1):
            local = inside.get(i, ())
            passing = [name for name in across if blocks[name] == i]
            keep = (*local, *passing)
            x, acts = run(
                model, x, keep=keep, start=i, stop=i + 1, segments=segments, positions=positions
            )
            streams |= {site: acts.pop(site) for site in passing}
            if local:
                yield acts
        if across:
            yield streams

    return parts


def token_inputs(batch: Batch) -> tuple[Tokens, Tokens, Tokens, Float[ndarray, "B T"]]:
    """Returns tokens, segments and positions, and the weight of every token: 1 where it
    is read, else 0.
    """
    return (
        batch.tokens,
        batch.segments,
        batch.positions,
        np.asarray(batch.examples >= 0, np.float32),
    )


def stream_moments(
    model: Transformer,
    batches: Sequence[Batch],
    pairs: Sequence[Pair],
    *,
    devices: Sequence[jax.Device] | None = None,
    snapshots: Snapshots | None = None,
    progress: str | None = None,
) -> Moments:
    """Returns the moments of all tokens that are read, summed up in one pass.

    Each host goes through its share of the batches; all get the moments of all.

    Memory for statistics does not depend on the number of tokens; `Moments` states it,
    for each device.

    Args:
      model: as `jmat.load` returns it.
      batches: from `packed_batches`, their rows a multiple of the number of devices.
      pairs: (source site, target site); a site paired with itself has only its own
        second moments summed up.
      devices: default, all local ones.
      snapshots: from which a pass that was killed goes on; it ends with the same bits.
        None writes none.
      progress: label of the progress bar; by default none is shown.

    Raises:
      ValueError: an unknown site, a token id outside the embedding, a sentence longer
        than the positions, NaN or infinity in the activations, naming the site.
      Terminated, OSError: as `go_on`.
    """
    settings: Keywords = {"devices": devices, "snapshots": snapshots, "progress": progress}
    moments = merge_hosts(combine(partial_moments(model, hosts.share(batches), pairs, **settings)))
    check_finite(moments, dict.fromkeys(site for pair in pairs for site in pair))
    return moments


def partial_moments(
    model: Transformer,
    batches: Sequence[Batch],
    pairs: Sequence[Pair],
    *,
    devices: Sequence[jax.Device] | None = None,
    moments: Moments | None = None,
    snapshots: Snapshots | None = None,
    progress: str | None = None,
) -> Moments:
    """Returns the sums of each device, as `stream_moments` before it adds them up, for
    passes that go on.

    `moments` are those of the batches before, as this function returned them; they are
    used up. However the batches are divided over calls, the result has the same bits.
    """
    sites = _sites(pairs, model.config)
    for batch in batches:
        check_tokens(np.asarray(batch.tokens), model.config.vocab_size)
    mesh = local_mesh(devices)
    widths = {name: width(site, model.config) for name, site in sites.items()}
    start = zeros(pairs, widths, parts=mesh.size)
    shapes = [
        [jax.numpy.shape(leaf) for leaf in jax.tree.leaves(state)]
        for state in (start, moments or start)
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "the moments to go on from are of other pairs, or of another number of devices."
        )
    with float64():
        start = shard_batch(mesh, moments or start)
    parts = block_by_block(place(model, mesh), pairs)

    def states(done: int, moments: Moments) -> Iterator[Moments]:
        before = None
        for _, (*inputs, weights) in on_devices(
            batches[done:], inputs=token_inputs, mesh=mesh, progress=progress
        ):
            for acts in parts(*inputs):
                moments = update(moments, acts, weights)
            jax.block_until_ready(before)  # the host runs ahead by one batch, not by all of them
            before = moments.count
            yield moments

    if snapshots is None:
        return functools.reduce(lambda _, after: after, states(0, start), start)
    text = {
        "number of devices": mesh.size,
        "text": text_hash(batches),
        "pairs": short_hash(repr(pairs).encode()),
    }
    owner = {**snapshots.owner, **text}
    return go_on(states, start, len(batches), dataclasses.replace(snapshots, owner=owner))


def _sites(pairs: Sequence[Pair], config: ModelConfig) -> dict[str, str]:
    """Returns the sites of pairs by the names that they are given, which may be those of
    other libraries. Raises ValueError for an unknown one.
    """
    sites = {name: site_of(name, config) for pair in pairs for name in pair}
    check_names(sites.values(), config, replace=False)
    return sites


def _groups(
    pairs: Sequence[Pair], sites: Mapping[str, str], layers: int
) -> tuple[dict[int, tuple[str, ...]], tuple[str, ...]]:
    """Returns the names to read block by block, and those that must wait for the end of
    the model.

    A block's sites are inside if no pair joins one of them to another block.
    """
    blocks = {
        name: _block_of(site, layers) if _is_inside(site) else None for name, site in sites.items()
    }
    of_pair = [(blocks[source], blocks[target]) for source, target in pairs]
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
    """Returns whether a site is a part of a block: `block.3.attn`, not `block.3`
    itself.
    """
    return site.count(".") > 1 and site.startswith("block.")


def _block_of(site: str, layers: int) -> int:
    """Returns the block after which a site is known."""
    kind, _, rest = site.partition(".")
    return int(rest.partition(".")[0]) if kind == "block" else 0 if kind == "embed" else layers - 1
