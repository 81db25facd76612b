"""Runs any stretch of a model's blocks, reading and changing sites on the way.

One jitted program serves every block of a model (`jmat.models.stack`), and `run` calls
it in a Python loop: a sweep over layers compiles nothing new, and stopping early truly
stops.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jmat.data.batches import Batch
from jmat.data.encoding import Tokenizer
from jmat.data.reading import encode, is_texts
from jmat.models.cache import Cache, check_room, fields_behind
from jmat.models.context import Context
from jmat.models.edits import At
from jmat.models.family import Transformer, check_model
from jmat.models.inputs import Inputs, cut, prepare
from jmat.models.settling import reached_sites, settle
from jmat.models.site_checks import checked_sites, is_any_length
from jmat.models.sites import Site, gather, is_square
from jmat.models.stack import (
    behind,
    final_norm,
    model_dtype,
    run_block,
    run_blocks,
    run_embed,
    unembed,
)
from jmat.runtime.annotations import Keywords
from jmat.runtime.arrays import on_host
from jmat.runtime.checks import whole

# Texts, token ids, a batch, or a stream; and positions to read.
ModelInputs = (
    Int[Array | np.ndarray, "B T"] | Float[Array | np.ndarray, "B T D"] | Batch | Sequence[str]
)
Places = int | Sequence[int] | Int[Array | np.ndarray, "*places"]


@overload
def run(
    model: Transformer,
    inputs: ModelInputs,
    *,
    tokenizer: Tokenizer | None = None,
    keep: str | Iterable[str] = (),
    sites: Mapping[str, Site] | None = None,
    start: int = 0,
    stop: int | None = None,
    mask: Bool[Array | np.ndarray, "B T"] | None = None,
    segments: Int[Array | np.ndarray, "B T"] | None = None,
    positions: Int[Array | np.ndarray, "B T"] | None = None,
    type_ids: Int[Array | np.ndarray, "B T"] | None = None,
    read_at: Places | None = None,
    cache: None = None,
) -> tuple[Float[Array, "B T D"], dict[str, Array]]: ...


@overload
def run(
    model: Transformer,
    inputs: ModelInputs,
    *,
    tokenizer: Tokenizer | None = None,
    keep: str | Iterable[str] = (),
    sites: Mapping[str, Site] | None = None,
    start: int = 0,
    stop: int | None = None,
    mask: Bool[Array | np.ndarray, "B T"] | None = None,
    segments: Int[Array | np.ndarray, "B T"] | None = None,
    type_ids: Int[Array | np.ndarray, "B T"] | None = None,
    read_at: Places | None = None,
    cache: Cache,
) -> tuple[Float[Array, "B T D"], dict[str, Array], Cache]: ...


def run(
    model: Transformer,
    inputs: ModelInputs,
    *,
    tokenizer: Tokenizer | None = None,
    keep: str | Iterable[str] = (),
    sites: Mapping[str, Site] | None = None,
    start: int = 0,
    stop: int | None = None,
    mask: Bool[Array | np.ndarray, "B T"] | None = None,
    segments: Int[Array | np.ndarray, "B T"] | None = None,
    positions: Int[Array | np.ndarray, "B T"] | None = None,
    type_ids: Int[Array | np.ndarray, "B T"] | None = None,
    read_at: Places | None = None,
    cache: Cache | None = None,
) -> (
    tuple[Float[Array, "B T D"], dict[str, Array]]
    | tuple[Float[Array, "B T D"], dict[str, Array], Cache]
):
    """Runs blocks `start` .. `stop − 1` of a model, reading and changing sites on the
    way.

    Token ids of the host (numpy) are checked, and rows of them are padded to 8, 16, 24,
    … tokens (few rows also to a few numbers of rows) and results cut to the true size:
    so texts of many lengths run a few programs. Padding changes nothing. A `jax.Array`
    is taken as it is: its values are never fetched, nor checked, nor padded.

    Args:
      model: as `jmat.load` gives it.
      inputs: texts; token ids [B, T]; a `Batch`, which has its own segments and
        positions; or a residual stream [B, T, D] to go on from (h_start).
      tokenizer: reads texts (`jmat.encode`).
      keep: the site or sites to return, `*` standing for part of a name; see
        `jmat.models.sites` for the names. Nothing else is kept in memory.
      sites: site name → an edit of the value that is computed (`Edit`, `Add`, `Scale`,
        `At`), or a callable pytree that stands in for the part. A part that is replaced
        is not computed. Names may hold `*`, too.
      start: first block to run, 0 .. L. Above 0, `inputs` is a stream.
      stop: the block to stop before; L (all blocks) by default.
      mask: True where a token is real; padding may lie on either side.
      segments: instead of a mask, which text each token belongs to (from 1; 0 is
        padding): several texts packed into one row, blind to one another.
      positions: index of each token in its text; by default counted from each text's
        first real token.
      type_ids: token type ids (BERT's sentence A and B); zeros by default.
      read_at: return kept sites at these tokens only: a number or [B] → [B, …], a list
        or [B, P] → [B, P, …]. Counted from a row's first real token, or back from its
        last where negative (−1 is the last). Of attention scores and patterns, they are
        queries: [B, H, T] or [B, P, H, T].
      cache: keys and values of the tokens before these (`jmat.models.cache.new_cache`),
        of which a row has as many as it has read. The blocks that are run read the new
        tokens behind them; `mask` may leave out rows. Positions of `read_at` and `At`
        count within the inputs. Scores and patterns have an axis of the cache's S keys.
        What stands in for attention sees the new tokens alone, unless it is attention
        itself.

    Returns:
      The stream after the last block run, h_stop [B, T, D] (before the final norm), and
      the kept sites by name, in the order asked for. With a cache, also the cache with
      the new tokens. It takes the memory of the one that was given, which is of no more
      use.

    Raises:
      ValueError: texts without a tokenizer, unknown site, a pattern that matches none,
        a site that is never reached, an edit or replacement that is no callable pytree
        or returns another shape, token id outside the embedding, text longer than the
        positions, `start`/`stop` out of range, inputs that do not fit `start`,
        positions outside a text; a cache without room, of a masked model or of another
        one, or with packed texts.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> batch = jmat.encode(tokenizer, ["Return a new array", "The default is None"])
      >>> x, acts = jmat.run(model, batch, keep=["block.3", "block.*.attn"])
      >>> x.shape, len(acts)
      ((2, 4, 192), 9)
    """
    check_model(model)
    config = model.config
    start, stop = whole("start", start), config.layers if stop is None else whole("stop", stop)
    asked, sites = reached_sites(config, keep, sites, start, stop)
    keep = tuple(dict.fromkeys(asked.values()))
    if is_texts(inputs):
        inputs = encode(tokenizer, inputs)
    if isinstance(inputs, Batch):
        if mask is not None or segments is not None or positions is not None:
            raise ValueError(
                "texts and a Batch have their own segments and positions: leave out mask, segments "
                "and positions."
            )
        segments, positions = inputs.segments, None if cache is not None else inputs.positions
    # no texts any more
    tokens = inputs.tokens if isinstance(inputs, Batch) else cast(Array | np.ndarray, inputs)
    fields: Keywords = {
        "mask": mask,
        "segments": segments,
        "positions": positions,
        "type_ids": type_ids,
    }
    pads = {
        "pad_length": all(is_any_length(*item) for item in sites.items()),
        "pad_rows": not sites,
    }
    if cache is not None:
        fields, pads = fields_behind(config, tokens, fields, pads)
    given, spans = prepare(config, tokens, start, **fields, **pads)
    context = given.context
    if cache is not None:
        check_room(cache, config, spans.rows, spans.segments, start, stop)
        context, cache = behind(cache, context, start, stop)

    def unpadded() -> None:
        # Arrays on a device are not padded.
        run(
            model,
            jnp.asarray(tokens),
            keep=keep,
            sites=sites,
            start=start,
            stop=stop,
            read_at=read_at,
            **fields,
        )

    columns = None if read_at is None else spans.columns("read_at", _listed(read_at), empty=0)
    places = None if columns is None else jnp.asarray(given.padded_rows(columns))
    settled = {name: settle(name, site, model, spans.columns) for name, site in sites.items()}
    with _errors_without_padding(given, unpadded if cache is None else None):
        x = _first_stream(model, given, context, settled)
        kept = {"embed": gather(x, places)} if "embed" in keep else {}
        x, inside, cache = run_blocks(
            model, x, context, cache, settled, places, start=start, stop=stop, keep=keep
        )
        kept |= inside | _read_end(model, x, keep, settled, places)
    kept = {site: kept[site] for site in keep}
    x, kept = _without_padding(given, x, kept, whole=read_at is None, keys=cache is None)
    kept = {name: kept[site] for name, site in asked.items()}
    return (x, kept) if cache is None else (x, kept, cache)


@contextlib.contextmanager
def _errors_without_padding(given: Inputs, unpadded: Callable[[], None] | None) -> Iterator[None]:
    """Raises an error of a padded pass as the pass `unpadded`, where there is one, does:
    it speaks of shapes that the caller knows.
    """
    try:
        yield
    except ValueError:
        if given.is_padded and unpadded is not None:
            unpadded()
        raise


def _first_stream(
    model: Transformer, given: Inputs, context: Context, sites: Mapping[str, Site]
) -> Float[Array, "B T D"]:
    """Returns h_start: of tokens h_0, as a site changes it; a stream is returned in the
    model's dtype.
    """
    if not jnp.issubdtype(given.x.dtype, jnp.floating):
        return run_embed(model, given.x, context, given.type_ids, sites.get("embed"))
    if "embed" in sites:
        raise ValueError(
            "site 'embed' is changed, but the inputs are a stream, which needs no embedding."
        )
    return given.x.astype(model_dtype(model))


def _without_padding(
    given: Inputs,
    x: Float[Array, "rows length D"],
    kept: dict[str, Array],
    *,
    whole: bool,
    keys: bool,
) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
    """Returns a stream and kept sites of the true size; `whole` says that they were not
    read at single tokens, `keys` that keys are padded as queries are.
    """
    if not given.is_padded:
        return x, kept
    axes = (
        (1,),
        *(_length_axes(name, value, whole=whole, keys=keys) for name, value in kept.items()),
    )
    x, *values = cut([x, *kept.values()], rows=given.rows, length=given.length, axes=axes)
    return x, dict(zip(kept, values, strict=True))


def _length_axes(name: str, value: jax.Array, *, whole: bool, keys: bool) -> tuple[int, ...]:
    """Returns the axes of a kept value that are T long: that of tokens where the value
    is `whole`, that of `keys`.
    """
    tokens = (2 if is_square(name) else 1,) if whole else ()
    return (*tokens, value.ndim - 1) if is_square(name) and keys else tokens


def logits(
    model: Transformer,
    x: Float[Array | np.ndarray, "*batch D"],
    *,
    sites: Mapping[str, Site] | None = None,
) -> Float[Array, "*batch V"]:
    """Returns logits from a vector that stands in for the final stream h_L:
    `head(final_norm(x))`, in float32.

    For GPT-2 the head is the unembedding after `ln_f`; for BERT the whole
    masked-language-model head. Of `sites`, those named `final_norm` and `logits` apply;
    `At` does not, since there are no texts here.

    Raises:
      ValueError: the model has no head; x is no stream; `sites` are none of the
        model's.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> batch = jmat.encode(tokenizer, ["Return a new array", "The default is None"])
      >>> x, _ = jmat.run(model, batch)
      >>> jmat.logits(model, x).shape == (2, 4, model.config.vocab_size)
      True
    """
    check_model(model)
    config = model.config
    sites = checked_sites(sites, config, 0, config.layers)
    for name, site in sites.items():
        if isinstance(site, At):
            raise ValueError(
                f"site {name!r}: At names tokens of texts; give it to jmat.run, with keep='logits'."
            )
    x = on_host(x)
    if x.shape[-1:] != (config.width,) or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {x.dtype} {x.shape}; expected a stream [..., {config.width}].")
    return unembed(model, final_norm(model, jnp.asarray(x, model_dtype(model)), sites), sites)


def enter(
    model: Transformer,
    tokens: Int[Array | np.ndarray, "B T"],
    *,
    mask: Bool[Array | np.ndarray, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], Context]:
    """Returns h_0, and what the blocks must know besides it: for loops over `advance`,
    which checks nothing again.
    """
    given, _ = prepare(
        model.config, tokens, 0, mask, None, None, None, pad_rows=False, pad_length=False
    )
    return run_embed(model, given.x, given.context, None, None), given.context


def advance(
    model: Transformer, x: Float[Array, "B T D"], context: Context, start: int, stop: int
) -> Float[Array, "B T D"]:
    """Returns h_stop from h_start; nothing is read or changed."""
    for i in range(start, stop):
        x, _ = run_block(model, i, x, context, {}, None, keep=())
    return x


def _listed(read_at: object) -> object:
    """Returns positions with a list, which is for every row, as [1, P]."""
    return on_host(read_at)[None] if isinstance(read_at, Sequence) else read_at


def _read_end(
    model: Transformer,
    x: jax.Array,
    keep: tuple[str, ...],
    sites: Mapping[str, Site],
    read_at: jax.Array | None,
) -> dict[str, jax.Array]:
    """Returns the kept sites after the last block: at `read_at` alone, unless something
    is changed there.

    Edits and stand-ins see whole rows, as they do inside the blocks.
    """
    kept = {"final_norm.in": gather(x, read_at)} if "final_norm.in" in keep else {}
    if "final_norm" not in keep and "logits" not in keep:
        return kept
    left = read_at  # still to be read
    if "final_norm" not in sites and "logits" not in sites:
        x, left = gather(x, left), None
    normed = final_norm(model, x, sites)
    if "logits" not in sites:
        normed, left = gather(normed, left), None
    kept |= {"final_norm": gather(normed, left)} if "final_norm" in keep else {}
    kept |= {"logits": gather(unembed(model, normed, sites), left)} if "logits" in keep else {}
    return kept
