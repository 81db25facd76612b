"""The cache: keys and values of the tokens that a causal model has read, for all of its
blocks.

Keys and values are data: a `Cache` is a pytree of arrays of fixed length S, and no
family's block refers to it. `jmat.run(…, cache=…)` reads more tokens behind those that
the cache holds, and returns the longer cache.

The token at position p of a row's text has its keys and values in column p, whatever
padding stood around it when it was read. So attention needs no mask of the cache: a
token at position q looks at the columns 0 .. q, or at the last of them where the block
has a window. What lies beyond a row's length is never seen, and is overwritten later. So
the end of a text is taken back by `with_lengths`, at no cost.

Blocks have lengths of their own: `run(…, start=0, stop=E)` and `run(…, start=E)` fill
their blocks separately, and rows too, since rows that are padding throughout stay as
they are.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jmat.models.config import ModelConfig
from jmat.models.family import Transformer, check_model
from jmat.runtime.annotations import Keywords, Leaf
from jmat.runtime.arrays import on_host
from jmat.runtime.checks import check_whole
from jmat.runtime.mesh import DATA_AXIS
from jmat.runtime.pytrees import register_dataclass

NOWHERE = 2**30  # a column past the end of any row


class KeysValues(NamedTuple):
    """Holds the keys (after rotary positions) and values of one block, head by head."""

    keys: Float[Array, "B G S K"]
    values: Float[Array, "B G S K"]


@register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Cache:
    """Holds the keys and values of the tokens that a model has read.

    Attributes:
      blocks: of each block, 0 .. L − 1.
      lengths: how many tokens of each row each block has read, [L, B].
    """

    blocks: Leaf[tuple[KeysValues, ...]]
    lengths: Leaf[Int[Array, "L B"]]

    @property
    def rows(self) -> int:
        """Returns B, the number of texts."""
        return self.blocks[0].keys.shape[0]

    @property
    def room(self) -> int:
        """Returns S, the number of tokens that a row has room for."""
        return self.blocks[0].keys.shape[2]

    def with_lengths(self, lengths: Int[Array | np.ndarray, "#L #B"]) -> "Cache":
        """Returns the cache as if rows had other lengths, [L, B], or what broadcasts to
        that: the ends of texts are taken back.
        """
        lengths = jnp.broadcast_to(jnp.asarray(lengths, jnp.int32), self.lengths.shape)
        return dataclasses.replace(self, lengths=lengths)

    def __repr__(self) -> str:
        if not isinstance(self.blocks, tuple) or not self.blocks:
            return "Cache()"
        keys = self.blocks[0].keys
        return f"Cache({len(self.blocks)} blocks, {keys.dtype} [B, G, S, K] = {list(keys.shape)})"


def new_cache(model: Transformer, rows: int, room: int) -> Cache:
    """Returns an empty cache, where the model is: rows are split over its devices where
    their number allows it.

    Args:
      model: a causal model.
      rows: B, the number of texts that are read at a time.
      room: S, the number of tokens of a text that the cache holds.

    Raises:
      ValueError: the model is no causal one; numbers below 1.

    Examples:
      >>> import jmat
      >>> from jmat.models.cache import new_cache
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> batch = jmat.encode(tokenizer, ["Return a new array", "The default is None"])
      >>> cache = new_cache(model, rows=2, room=32)
      >>> x, _, cache = jmat.run(model, batch, cache=cache)
      >>> cache.lengths[0].tolist()
      [4, 4]
    """
    check_model(model)
    config = model.config
    check_causal(config)
    check_whole("rows", rows, 1)
    check_whole("room", room, 1)
    table = model.embed.tokens.table.get_raw_value()
    shape = (rows, config.kv_heads or config.heads, room, config.head_width)
    over_rows, over_columns = _shardings(table, rows)

    def zeros() -> jax.Array:
        empty = jnp.zeros(shape, table.dtype)
        return empty if over_rows is None else jax.device_put(empty, over_rows)

    lengths = jnp.zeros((config.layers, rows), jnp.int32)
    blocks = tuple(KeysValues(zeros(), zeros()) for _ in range(config.layers))
    return Cache(blocks, lengths if over_columns is None else jax.device_put(lengths, over_columns))


def check_causal(config: ModelConfig) -> None:
    """Raises ValueError for a masked model, whose tokens look at later ones."""
    if not config.causal:
        raise ValueError(
            f"a masked model ({config.family}) reads whole texts: it has no cache and writes "
            "nothing; expected a causal model."
        )


def _shardings(table: object, rows: int) -> tuple[NamedSharding | None, NamedSharding | None]:
    """Returns where arrays [B, …] and [L, B] of a cache lie, by where the token table
    does; None: anywhere.
    """
    sharding = getattr(table, "sharding", None)
    if isinstance(table, jax.core.Tracer) or not isinstance(sharding, NamedSharding):
        return None, None
    mesh, axis = sharding.mesh, DATA_AXIS if rows % sharding.mesh.size == 0 else None
    return NamedSharding(mesh, PartitionSpec(axis)), NamedSharding(mesh, PartitionSpec(None, axis))


# --- checks, on the host --------------------------------------------------------------------------


def fields_behind(
    config: ModelConfig, tokens: Array | np.ndarray, fields: Keywords, pads: dict[str, bool]
) -> tuple[Keywords, dict[str, bool]]:
    """Returns the fields of inputs and how they are padded, for tokens that are read
    behind those of a cache.

    Raises ValueError for a masked model, for positions, and for packed texts.
    """
    check_causal(config)
    if fields["positions"] is not None:
        raise ValueError(
            "positions were given, but with a cache they count on from the tokens that it holds: "
            "leave them out."
        )
    segments = None if fields["segments"] is None else on_host(fields["segments"])
    if isinstance(segments, np.ndarray) and segments.ndim == 2 and segments.size:
        real = np.where(segments > 0, segments, segments.max(1, keepdims=True))
        if (packed := np.flatnonzero((real != real[:, :1]).any(1))).size:
            raise ValueError(
                f"row {packed[0]} holds several texts; a cache holds one text a row: give each "
                "its own."
            )
    unmarked = fields["mask"] is None and segments is None and np.ndim(tokens) >= 2
    if unmarked and not isinstance(tokens, jax.Array):
        # Rows of the host may be padded, and padding must not enter the cache.
        fields = fields | {"mask": np.ones(np.shape(tokens)[:2], bool)}
    several = np.ndim(tokens) >= 2 and np.shape(tokens)[1] > 1
    return fields, {"pad_length": pads["pad_length"] and several, "pad_rows": False}


def check_room(
    cache: Cache,
    config: ModelConfig,
    rows: int,
    segments: Int[Array | np.ndarray, "B T"] | None,
    start: int,
    stop: int,
) -> None:
    """Raises ValueError for a cache that does not hold the tokens before those that are
    given, or has no room for these.

    Args:
      cache: of the model.
      config: of the model.
      rows: B of the inputs.
      segments: tell real tokens (above 0) from padding. Lengths are compared where they
        are on the host.
      start: first block that reads them.
      stop: the block before which they stop.
    """
    if cache.lengths.shape != (config.layers, rows):
        layers, texts = cache.lengths.shape
        raise ValueError(
            f"the cache is of {layers} blocks and {texts} texts; expected {config.layers} blocks "
            f"and as many texts as there are inputs, {rows}."
        )
    if not isinstance(segments, np.ndarray) or isinstance(cache.lengths, jax.core.Tracer):
        return
    if start == stop:
        return
    lengths = np.asarray(cache.lengths)[start:stop]
    if (differs := np.argwhere(lengths != lengths[0])).size:
        block, row = differs[0]
        raise ValueError(
            f"block {start} has read {lengths[0, row]} tokens of row {row} and block "
            f"{start + block} {lengths[block, row]}: run the blocks that lag behind first."
        )
    total = lengths[0] + (segments > 0).sum(1)
    row = int(total.argmax())
    if total[row] > cache.room:
        raise ValueError(
            f"the text of row {row} has {total[row]} tokens with those in the cache, which has "
            f"room for {cache.room}: make it with room={total[row]} or more."
        )
    if total[row] > config.num_positions:
        raise ValueError(
            f"the text of row {row} has {total[row]} tokens with those in the cache; the model has "
            f"positions for {config.num_positions}."
        )


# --- while a model is traced ----------------------------------------------------------------------


class Memory:
    """Gives attention the keys and values of one block while it is traced, and takes
    those of new tokens.

    Attributes:
      kept: the keys and values, those of new tokens included once attention was
        computed.
      columns: where those of new tokens go, [B, T]; past the end for padding.
    """

    def __init__(self, kept: KeysValues, columns: Int[Array, "B T"]):
        self.kept = kept
        self.columns = columns

    def extend(
        self, keys: Float[Array, "B T G K"], values: Float[Array, "B T G K"]
    ) -> tuple[Float[Array, "B G S K"], Float[Array, "B G S K"]]:
        """Returns the keys and values of all tokens, with these put in their columns."""
        self.kept = KeysValues(
            _put(self.kept.keys, keys, self.columns), _put(self.kept.values, values, self.columns)
        )
        return self.kept.keys, self.kept.values


def _put(
    kept: Float[Array, "B G S K"], new: Float[Array, "B T G K"], columns: Int[Array, "B T"]
) -> Float[Array, "B G S K"]:
    # Row by row: the compiler then knows that a device needs no other device's rows.
    def put(
        row: Float[Array, "G S K"], new: Float[Array, "T G K"], columns: Int[Array, " T"]
    ) -> Float[Array, "G S K"]:
        return row.at[:, columns].set(jnp.moveaxis(new, 1, 0).astype(row.dtype), mode="drop")

    return jax.vmap(put)(kept, new, columns)


def columns_of(
    positions: Int[Array, "B T"], segments: Int[Array, "B T"] | None
) -> Int[Array, "B T"]:
    """Returns the columns of new tokens: their positions, and past the end for padding."""
    return positions if segments is None else jnp.where(segments > 0, positions, NOWHERE)


@jax.jit
def positions_behind(
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"] | None,
    lengths: Int[Array, "L B"],
    start: Int[Array, ""] | int,
    stop: Int[Array, ""] | int,
) -> tuple[Int[Array, "B T"], Int[Array, "L B"]]:
    """Returns the positions of new tokens behind those that block `start` has read, and
    the lengths once blocks `start` .. `stop − 1` have read the new ones, too.
    """
    before = lengths[start]  # of the last block where `start` is L
    real = jnp.ones_like(positions) if segments is None else (segments > 0).astype(jnp.int32)
    block = jnp.arange(len(lengths))[:, None]
    longer = jnp.where((block >= start) & (block < stop), lengths + real.sum(1), lengths)
    return positions + before[:, None], longer
