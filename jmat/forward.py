"""The forward pass: any stretch of blocks, any site read, any site replaced.

One jitted program serves every block of a model (all have the same shapes), and `run` calls it in a Python loop: a
sweep over layers compiles nothing new, and stopping early truly stops.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jmat.models.layers import Context
from jmat.models.sites import Site, Tap, check_callables, check_names, gather, replace
from jmat.runtime.mesh import gathered, settled

# What a block itself, in contrast to its parts, is called inside the jitted program that all blocks share.
_OF_BLOCK = ""


def run(
    model: Any,
    inputs: Int[Array | np.ndarray, "B T"] | Float[Array | np.ndarray, "B T D"],
    *,
    keep: tuple[str, ...] = (),
    sites: Mapping[str, Site] | None = None,
    start: int = 0,
    stop: int | None = None,
    mask: Bool[Array | np.ndarray, "B T"] | None = None,
    segments: Int[Array | np.ndarray, "B T"] | None = None,
    positions: Int[Array | np.ndarray, "B T"] | None = None,
    type_ids: Int[Array | np.ndarray, "B T"] | None = None,
    read_at: Int[Array | np.ndarray, " B"] | Int[Array | np.ndarray, "B P"] | None = None,
) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
    """Runs blocks `start` .. `stop − 1` of a model, reading and replacing sites on the way.

    Args:
      model: as `jmat.load` gives it.
      inputs: token ids [B, T], or a residual stream [B, T, D] to go on from (h_start).
      keep: sites to return; see `jmat.models.sites` for the names. Nothing else is kept in memory.
      sites: site name → callable pytree that stands in for it. A part that is replaced is not computed.
      start: first block to run, 0 .. L. Above 0, `inputs` is a stream.
      stop: the block to stop before; L (all blocks) by default.
      mask: True where a token is real; padding may lie on either side.
      segments: instead of a mask, which text each token belongs to (from 1; 0 is padding): several texts packed into
        one row, blind to one another.
      positions: index of each token in its text; by default counted from each text's first real token.
      type_ids: token type ids (BERT's sentence A and B); zeros by default.
      read_at: return kept sites at these positions only: [B] → [B, D], [B, P] → [B, P, D].

    Returns:
      The stream after the last block run, h_stop [B, T, D] (before the final norm), and the kept sites by name.

    Raises:
      ValueError: unknown site, a site that is never reached, a replacement that is no callable pytree or returns
        another shape, token id outside the embedding, text longer than the positions, `start`/`stop` out of range,
        inputs that do not fit `start`.
    """
    config = model.config
    L = config.layers
    stop = L if stop is None else stop
    if isinstance(keep, str):
        raise ValueError(f"keep={keep!r} is one name; expected a tuple of names, such as keep=({keep!r},).")
    if keep is None or not isinstance(sites, Mapping | None):
        raise ValueError(
            f"keep is {type(keep).__name__}, sites {type(sites).__name__}; expected a tuple of names, and a dict from "
            "names to what stands in for them."
        )
    sites = dict(sites or {})
    check_names(keep, config, replace=False)
    check_names(sites, config, replace=True)
    check_callables(sites)
    if not 0 <= start <= stop <= L:
        raise ValueError(f"start={start}, stop={stop}: expected 0 <= start <= stop <= {L}, the model's blocks.")
    _check_reached([*keep, *sites], sites, start, stop, L)

    inputs, context = _prepare(config, inputs, start, mask, segments, positions, type_ids)
    read_at = None if read_at is None else _check_read_at(read_at, *inputs.shape[:2])
    kept: dict[str, jax.Array] = {}
    if jnp.issubdtype(inputs.dtype, jnp.floating):
        if "embed" in sites:
            raise ValueError("site 'embed' is replaced, but the inputs are a stream, which needs no embedding.")
        x = inputs.astype(model_dtype(model))
    elif "embed" in sites:
        x = _replace_embed(sites["embed"], inputs)
        if x.shape != (*inputs.shape, config.width):
            raise ValueError(
                f"the replacement for site 'embed' returned shape {x.shape}; expected {(*inputs.shape, config.width)}."
            )
    else:
        x = _run_embed(model, inputs, context, type_ids)
    if "embed" in keep:
        kept["embed"] = gather(x, read_at)

    for i in range(start, stop):
        name = f"block.{i}"
        if name in sites:
            with _name_block(i):
                x = _apply(sites[name], x, name="block.{i}")
            if name in keep:
                kept[name] = gather(x, read_at)
            continue
        inside = name + "."
        local_sites = {site.removeprefix(inside): part for site, part in sites.items() if site.startswith(inside)}
        local_keep = tuple(site.removeprefix(inside) for site in keep if site.startswith(inside))
        local_keep += (_OF_BLOCK,) if name in keep else ()
        x, values = _run_block(model, i, x, context, local_sites, read_at, keep=local_keep)
        kept |= {name if part == _OF_BLOCK else inside + part: value for part, value in values.items()}

    final = {name for name in keep if name in ("final_norm.in", "final_norm", "logits")}
    if final:
        at_end = gather(x, read_at)
        kept |= {"final_norm.in": at_end} if "final_norm.in" in final else {}
        if final - {"final_norm.in"}:
            normed = final_norm(model, at_end, sites)
            kept |= {"final_norm": normed} if "final_norm" in final else {}
            kept |= {"logits": unembed(model, normed, sites)} if "logits" in final else {}
    return x, {name: kept[name] for name in keep}


def logits(
    model: Any, x: Float[Array | np.ndarray, "*batch D"], *, sites: Mapping[str, Site] | None = None
) -> Float[Array, "*batch V"]:
    """Returns logits from a vector that stands in for the final stream h_L: `head(final_norm(x))`, in float32.

    For GPT-2 the head is the unembedding after `ln_f`; for BERT the whole masked-language-model head. Of `sites`, those
    named `final_norm` and `logits` apply.

    Raises:
      ValueError: the model has no head.
    """
    sites = dict(sites or {})
    check_names(sites, model.config, replace=True)
    check_callables(sites)
    if x.shape[-1] != model.config.width or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {x.dtype} {x.shape}; expected a stream [..., {model.config.width}].")
    return unembed(model, final_norm(model, jnp.asarray(x, model_dtype(model)), sites), sites)


def enter(
    model: Any, tokens: Int[Array | np.ndarray, "B T"], *, mask: Bool[Array | np.ndarray, "B T"] | None = None
) -> tuple[Float[Array, "B T D"], Context]:
    """h_0, and what the blocks must know besides it: for loops over `advance`, which checks nothing again."""
    tokens, context = _prepare(model.config, tokens, 0, mask, None, None, None)
    return _run_embed(model, tokens, context, None), context


def advance(model: Any, x: Float[Array, "B T D"], context: Context, start: int, stop: int) -> Float[Array, "B T D"]:
    """h_start → h_stop, nothing read or replaced."""
    for i in range(start, stop):
        x, _ = _run_block(model, i, x, context, {}, None, keep=())
    return x


def final_norm(model: Any, x: Float[Array, "*batch D"], sites: Mapping[str, Site]) -> Float[Array, "*batch D"]:
    """The stream as the head reads it; the identity for a model without final norm."""
    return settled(_apply(sites.get("final_norm", model.final_norm), x, name="final_norm"), _whole(model))


def unembed(model: Any, x: Float[Array, "*batch D"], sites: Mapping[str, Site]) -> Float[Array, "*batch V"]:
    """The head alone. Raises ValueError if the model has none."""
    if "logits" in sites:
        return _head_replacement(sites["logits"], x)
    if model.head is None:
        raise ValueError(
            f"this {model.config.family} checkpoint has no language-model head, so it makes no predictions; "
            "load one saved with its head (for BERT: BertForMaskedLM)."
        )
    return settled(_head(model.head, x, model.embed.tokens.table[...]), _whole(model))


def model_dtype(model: Any) -> jnp.dtype:
    """The dtype of a model's parameters, and so of its stream."""
    return model.embed.tokens.table.dtype


def _check_reached(names: list[str], sites: Mapping[str, Site], start: int, stop: int, layers: int) -> None:
    """A site outside the stretch that is run, or in a block that is replaced, would be silently ignored: refuse it."""
    for name in names:
        kind, _, rest = name.partition(".")
        block = ".".join(name.split(".")[:2])
        if block != name and block in sites:
            raise ValueError(f"site {name!r} is never reached: {block!r} is replaced, and so not computed.")
        index = int(rest.partition(".")[0]) if kind == "block" else {"embed": -1}.get(kind, layers)
        reached = {-1: start == 0, layers: stop == layers}.get(index, start <= index < stop)
        if not reached:
            raise ValueError(f"site {name!r} is not reached when blocks {start} .. {stop - 1} of {layers} are run.")


def _prepare(config, inputs, start, mask, segments, positions, type_ids) -> tuple[jax.Array, Context]:
    """Checks shapes and ids; derives segments from the mask and positions from the segments."""
    inputs = inputs if isinstance(inputs, jax.Array) else np.asarray(inputs)
    is_tokens = jnp.issubdtype(inputs.dtype, jnp.integer)
    if is_tokens and (inputs.ndim != 2 or start > 0):
        expected = "token ids [B, T]" if start == 0 else f"the stream [B, T, {config.width}] that enters block {start}"
        raise ValueError(f"inputs are {inputs.dtype} {inputs.shape}; expected {expected}.")
    if not is_tokens and (inputs.ndim != 3 or inputs.shape[-1] != config.width):
        raise ValueError(
            f"inputs are {inputs.dtype} {inputs.shape}; expected tokens [B, T] or a stream [B, T, {config.width}]."
        )
    B, T = inputs.shape[:2]
    if B * T == 0:
        raise ValueError(f"inputs have shape {inputs.shape}: there is no token to run the model on.")
    for name, value in (("mask", mask), ("segments", segments), ("positions", positions), ("type_ids", type_ids)):
        if value is not None and value.shape != (B, T):
            raise ValueError(f"{name} has shape {value.shape}; expected {(B, T)}, that of the tokens.")
        if value is not None and not jnp.issubdtype(value.dtype, np.bool_ if name == "mask" else jnp.integer):
            expected = "booleans, True where a token is real" if name == "mask" else "integers"
            raise ValueError(f"{name} is {value.dtype}; expected {expected}.")
    if mask is not None and segments is not None:
        raise ValueError("give either mask or segments: segments already mark padding with 0.")
    if is_tokens:
        check_ids("token id", inputs, config.vocab_size)
    if type_ids is not None:
        if not config.type_vocab_size:
            raise ValueError(f"type_ids were given, but {config.family} models have no token types; leave them out.")
        check_ids("type id", type_ids, config.type_vocab_size)
    if mask is not None:
        segments = jnp.asarray(mask).astype(jnp.int32)
    if positions is None:
        positions = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)) if segments is None else _count(segments)
        # A row may be longer than the model's positions, if none of the texts in it is.
        if config.num_positions < T and not isinstance(positions, jax.core.Tracer):
            longest = int(positions.max()) + 1
            if config.num_positions < longest:
                raise ValueError(
                    f"a text has {longest} tokens; the model has positions for {config.num_positions}: cut the text."
                )
    else:
        check_ids("position", positions, config.num_positions)
    segments = None if segments is None else jnp.asarray(segments)
    return jnp.asarray(inputs), Context(jnp.asarray(positions), segments, np.int32(0))


def _check_read_at(read_at: jax.Array | np.ndarray, batch: int, length: int) -> jax.Array:
    """Positions to read, [B] or [B, P]."""
    if read_at.ndim not in (1, 2) or read_at.shape[0] != batch or not jnp.issubdtype(read_at.dtype, jnp.integer):
        raise ValueError(f"read_at is {read_at.dtype} {read_at.shape}; expected integers [{batch}] or [{batch}, P].")
    check_ids("read_at position", read_at, length)
    return jnp.asarray(read_at)


def check_ids(what: str, ids: Int[Array | np.ndarray, "*shape"], size: int) -> None:
    """Raises ValueError for an id outside [0, size): JAX would clamp it silently. Traced ids cannot be checked."""
    if isinstance(ids, jax.core.Tracer) or ids.size == 0:
        return
    host = np.asarray(ids)
    bad = (host < 0) | (host >= size)
    if bad.any():
        where = tuple(int(axis) for axis in np.argwhere(bad)[0])
        raise ValueError(f"{what} {host[where]} at {where} is outside the model's range 0 .. {size - 1}.")


@jax.jit
def _count(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Index of each token in its own segment; padding gets 0."""
    T = segments.shape[1]
    same = (segments[:, :, None] == segments[:, None, :]) & jnp.tril(jnp.ones((T, T), bool), k=-1)
    return jnp.where(segments > 0, same.sum(-1, dtype=jnp.int32), 0)


def _run_embed(model, tokens, context, type_ids):
    whole = _whole(model)
    return settled(_embed(model.embed, tokens, context.positions, type_ids, whole=whole), whole)


def _run_block(model, i, x, context, sites, read_at, *, keep):
    context, whole = context._replace(layer=np.int32(i)), _whole(model)
    with _name_block(i):
        return settled(_block(model.blocks[i], x, context, sites, read_at, keep=keep, whole=whole), whole)


@contextlib.contextmanager
def _name_block(i):
    """One program serves all blocks, and its errors speak of `block.{i}`: puts the number in."""
    try:
        yield
    except ValueError as error:
        if "block.{i}" not in str(error):
            raise
        raise ValueError(str(error).replace("block.{i}", f"block.{i}")) from error


def _whole(model):
    """Returns where a sharded model's parameters come together; read off the token table, since all take long."""
    return gathered(model.embed.tokens.table.get_raw_value())


@jax.jit(static_argnames=("whole",))
def _embed(embed, tokens, positions, type_ids, *, whole):
    embed = _gather_parameters(embed, whole)
    with jax.named_scope("embed"):
        return embed(tokens, positions, type_ids)


@jax.jit
def _replace_embed(site, tokens):
    return site(tokens)


@jax.jit(static_argnames=("keep", "whole"))
def _block(block, x, context, sites, read_at, *, keep, whole):
    block, tap = _gather_parameters(block, whole), Tap(sites, keep, read_at)
    return tap.read(_OF_BLOCK, block(x, context, tap)), tap.finish()


def _gather_parameters(part, whole):
    """Sharded parameters come together here, inside the program: they take no memory before or after."""
    return part if whole is None else jax.lax.with_sharding_constraint(part, whole)


@jax.jit(static_argnames=("name",))
def _apply(part, x, *, name):
    return replace(name, part, x, x.shape)


@jax.jit
def _head(head, x, table):
    with jax.named_scope("logits"):
        return head(x, table)


@jax.jit
def _head_replacement(site, x):
    return site(x)
