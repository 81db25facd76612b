"""Runs the stages of a model, one jitted program each: embedding, block, final norm,
head.

All blocks of a model have the same shapes and share one program, whose argument `layer`
is the block's index.
"""

import contextlib
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from jmat.models.cache import Cache, KeysValues, Memory, columns_of, positions_behind
from jmat.models.context import Context, IgnoresInput
from jmat.models.edits import apply_site, is_edit
from jmat.models.family import Transformer
from jmat.models.settling import inside_block
from jmat.models.sites import Site
from jmat.models.tap import BLOCK, Tap
from jmat.runtime.annotations import PyTree
from jmat.runtime.mesh import gathered, settled


def run_embed(
    model: Transformer,
    tokens: Int[Array, "B T"],
    context: Context,
    type_ids: Int[Array, "B T"] | None,
    site: Site | None,
) -> Float[Array, "B T D"]:
    """Returns h_0 of tokens, or what a site makes of it."""
    whole, width = _whole(model), model.config.width
    return settled(
        _embed(model.embed, tokens, context, type_ids, site, width=width, whole=whole), whole
    )


def run_block(
    model: Transformer,
    i: int,
    x: Float[Array, "B T D"],
    context: Context,
    sites: Mapping[str, Site],
    read_at: Int[Array, "*places"] | None,
    *,
    keep: tuple[str, ...],
) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
    """Returns h_{i+1} from h_i, and the kept sites of block i by their names inside the
    block.

    `sites` and `keep` are named inside the block, too; `jmat.models.tap.BLOCK` is the
    block itself.
    """
    context, whole = context._replace(layer=np.int32(i)), _whole(model)
    with _name_block(i):
        return settled(
            _block(model.blocks[i], x, context, sites, read_at, keep=keep, whole=whole), whole
        )


def run_block_behind(
    model: Transformer,
    i: int,
    x: Float[Array, "B T D"],
    context: Context,
    kept: KeysValues,
    sites: Mapping[str, Site],
    read_at: Int[Array, "*places"] | None,
    *,
    keep: tuple[str, ...],
) -> tuple[Float[Array, "B T D"], dict[str, Array], KeysValues]:
    """Returns what `run_block` does for tokens behind those whose keys and values are
    `kept`, and the keys and values of all. The buffers of `kept` become the result's.
    """
    context, whole = context._replace(layer=np.int32(i)), _whole(model)
    with _name_block(i):
        return settled(
            _block_behind(
                model.blocks[i], x, context, kept, sites, read_at, keep=keep, whole=whole
            ),
            whole,
        )


def behind(cache: Cache, context: Context, start: int, stop: int) -> tuple[Context, Cache]:
    """Returns the context of new tokens, with their positions behind the tokens of the
    cache, and the cache with the lengths that it has once blocks `start` .. `stop − 1`
    have read them.
    """
    positions, lengths = positions_behind(
        context.positions, context.segments, cache.lengths, np.int32(start), np.int32(stop)
    )
    return context._replace(positions=positions), Cache(cache.blocks, lengths)


def run_blocks(
    model: Transformer,
    x: Float[Array, "B T D"],
    context: Context,
    cache: Cache | None,
    sites: Mapping[str, Site],
    read_at: Int[Array, "*places"] | None,
    *,
    start: int,
    stop: int,
    keep: tuple[str, ...],
) -> tuple[Float[Array, "B T D"], dict[str, Array], Cache | None]:
    """Returns h_stop from h_start, the kept sites of the blocks between, and the cache;
    context and cache are as `behind` returns them.
    """
    kept: dict[str, Array] = {}
    blocks = [] if cache is None else list(cache.blocks)
    for i in range(start, stop):
        inside, wanted = inside_block(i, sites, keep)
        if cache is None:
            x, values = run_block(model, i, x, context, inside, read_at, keep=wanted)
        else:
            x, values, blocks[i] = run_block_behind(
                model, i, x, context, blocks[i], inside, read_at, keep=wanted
            )
        kept |= {
            f"block.{i}" if part == BLOCK else f"block.{i}.{part}": value
            for part, value in values.items()
        }
    return x, kept, None if cache is None else Cache(tuple(blocks), cache.lengths)


def final_norm(
    model: Transformer, x: Float[Array, "*batch D"], sites: Mapping[str, Site]
) -> Float[Array, "*batch D"]:
    """Returns the stream as the head reads it: x itself for a model without final norm."""
    return settled(_norm(model.final_norm, x, sites.get("final_norm")), _whole(model))


def unembed(
    model: Transformer, x: Float[Array, "*batch D"], sites: Mapping[str, Site]
) -> Float[Array, "*batch V"]:
    """Returns what the head alone makes of x. Raises ValueError if the model has none."""
    site = sites.get("logits")
    check_head(model, site)
    table, vocab_size = model.embed.tokens.table[...], model.config.vocab_size
    return settled(_head(model.head, x, table, site, vocab_size=vocab_size), _whole(model))


def check_head(model: Transformer, site: Site | None) -> None:
    """Raises ValueError for a model without a head, unless `site` stands in for it."""
    if model.head is None and (site is None or is_edit(site)):
        raise ValueError(
            f"this {model.config.family} checkpoint has no language-model head, so it makes no "
            "predictions; load one saved with its head (for BERT: BertForMaskedLM)."
        )


def model_dtype(model: Transformer) -> jnp.dtype:
    """Returns the dtype of a model's parameters, and so of its stream."""
    return model.embed.tokens.table.dtype


@contextlib.contextmanager
def _name_block(i: int) -> Iterator[None]:
    """Puts the block's number into errors, which speak of `block.{i}`: one program
    serves all blocks.
    """
    try:
        yield
    except ValueError as error:
        if "block.{i}" not in str(error):
            raise
        raise ValueError(str(error).replace("block.{i}", f"block.{i}")) from error


def _whole(model: Transformer) -> NamedSharding | None:
    """Returns where a sharded model's parameters come together; read off the token
    table, since all take long.
    """
    return gathered(model.embed.tokens.table.get_raw_value())


@jax.jit(static_argnames=("width", "whole"))
def _embed(
    embed: PyTree,
    tokens: Array,
    context: Context,
    type_ids: Array | None,
    site: Site | None,
    *,
    width: int,
    whole: NamedSharding | None,
) -> Array:
    embed = _gather_parameters(embed, whole)

    def compute() -> Array:
        with jax.named_scope("embed"):
            return embed(tokens, context.positions, type_ids)

    if site is None:
        return compute()
    dtype = embed.tokens.table.dtype
    return apply_site("embed", site, compute, tokens, (*tokens.shape, width), dtype, context)


@jax.jit(static_argnames=("keep", "whole"))
def _block(
    block: PyTree,
    x: Array,
    context: Context,
    sites: Mapping[str, Site],
    read_at: Array | None,
    *,
    keep: tuple[str, ...],
    whole: NamedSharding | None,
) -> tuple[Array, dict[str, Array]]:
    block, tap = _gather_parameters(block, whole), Tap(sites, keep, read_at, context)
    return tap(BLOCK, block, x, context, tap), tap.finish()


@jax.jit(static_argnames=("keep", "whole"), donate_argnames=("kept",))
def _block_behind(
    block: PyTree,
    x: Array,
    context: Context,
    kept: KeysValues,
    sites: Mapping[str, Site],
    read_at: Array | None,
    *,
    keep: tuple[str, ...],
    whole: NamedSharding | None,
) -> tuple[Array, dict[str, Array], KeysValues]:
    memory = Memory(kept, columns_of(context.positions, context.segments))
    context = context._replace(memory=memory)
    block, tap = _gather_parameters(block, whole), Tap(sites, keep, read_at, context)
    x = tap(BLOCK, block, x, context, tap)
    return x, tap.finish(), memory.kept


def _gather_parameters(part: PyTree, whole: NamedSharding | None) -> PyTree:
    """Returns a part with its sharded parameters together, inside the program: they
    take no memory before or after.
    """
    return part if whole is None else jax.lax.with_sharding_constraint(part, whole)


@jax.jit
def _norm(norm: PyTree, x: Array, site: Site | None) -> Array:
    if site is None:
        return norm(x)
    return apply_site("final_norm", site, lambda: norm(x), x, x.shape, x.dtype, None)


@jax.jit(static_argnames=("vocab_size",))
def _head(head: PyTree, x: Array, table: Array, site: Site | None, *, vocab_size: int) -> Array:
    def compute() -> Array:
        with jax.named_scope("logits"):
            return head(x, table)

    if site is None:
        return compute()
    # What stands in for the head may know other words.
    words = vocab_size if is_edit(site) or isinstance(site, IgnoresInput) else None
    return apply_site("logits", site, compute, x, (*x.shape[:-1], words), jnp.float32, None)
