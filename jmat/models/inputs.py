"""Inputs: checks what a model is given, derives positions, and pads rows to a few
shapes.

Arrays of the host (numpy, lists) are checked here, once: ids, positions and shapes. A
`jax.Array` is on a device already and is never fetched back: its shape and dtype are
checked, its values are the caller's business (JAX clamps ids that are out of range).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jmat.models.cache import NOWHERE
from jmat.models.config import ModelConfig
from jmat.models.context import Context
from jmat.runtime.arrays import on_host
from jmat.runtime.shapes import rung

_MOST_ROWS = 32  # batches of more rows come from loops, which have few shapes anyway

Values = Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Holds the checked inputs of a forward pass.

    Attributes:
      x: token ids [B, T], or a stream [B, T, D].
      context: positions and segments [B, T].
      type_ids: [B, T], or None.
      rows: B as it was given; rows beyond are empty.
      length: T as it was given; columns beyond are padding.
    """

    x: jax.Array
    context: Context
    type_ids: jax.Array | None
    rows: int
    length: int

    @property
    def is_padded(self) -> bool:
        """Returns whether results are to be cut to `rows` and `length`."""
        return self.x.shape[:2] != (self.rows, self.length)

    def padded_rows(self, columns: Values) -> Values:
        """Returns columns to read [B] or [B, P] with a zero for every empty row."""
        extra = self.x.shape[0] - self.rows
        return np.pad(columns, ((0, extra), *[(0, 0)] * (columns.ndim - 1))) if extra else columns


def prepare(
    config: ModelConfig,
    inputs: object,
    start: int,
    mask: object,
    segments: object,
    positions: object,
    type_ids: object,
    *,
    pad_rows: bool,
    pad_length: bool,
) -> tuple[Inputs, "Spans"]:
    """Checks shapes and ids; derives segments from the mask and positions from the
    segments; pads tokens of the host.

    Returns the inputs, and where the tokens of each row begin and end. Raises
    ValueError; see `jmat.run`.
    """
    array = on_host(inputs)
    is_tokens = jnp.issubdtype(array.dtype, jnp.integer)
    if is_tokens and (array.ndim != 2 or start > 0):
        expected = (
            "token ids [B, T]"
            if start == 0
            else f"the stream [B, T, {config.width}] that enters block {start}"
        )
        raise ValueError(f"inputs are {array.dtype} {array.shape}; expected {expected}.")
    is_stream = (
        array.ndim == 3
        and array.shape[-1] == config.width
        and jnp.issubdtype(array.dtype, jnp.floating)
    )
    if not is_tokens and not is_stream:
        raise ValueError(
            f"inputs are {array.dtype} {array.shape}; expected tokens [B, T] or a stream [B, T, "
            f"{config.width}]."
        )
    B, T = array.shape[:2]
    if B * T == 0:
        raise ValueError(f"inputs have shape {array.shape}: there is no token to run the model on.")
    fields = {"mask": mask, "segments": segments, "positions": positions, "type_ids": type_ids}
    given = {name: on_host(value) for name, value in fields.items() if value is not None}
    for name, value in given.items():
        if value.shape != (B, T):
            raise ValueError(
                f"{name} has shape {value.shape}; expected {(B, T)}, that of the tokens."
            )
        if not jnp.issubdtype(value.dtype, np.bool_ if name == "mask" else jnp.integer):
            expected = "booleans, True where a token is real" if name == "mask" else "integers"
            raise ValueError(f"{name} is {value.dtype}; expected {expected}.")
    if "mask" in given and "segments" in given:
        raise ValueError("give either mask or segments: segments already mark padding with 0.")
    if is_tokens:
        check_ids("token id", array, config.vocab_size)
    if "type_ids" in given:
        if not config.type_vocab_size:
            raise ValueError(
                f"type_ids were given, but {config.family} models have no token types; leave them "
                "out."
            )
        check_ids("type id", given["type_ids"], config.type_vocab_size)

    given = {name: value.astype(np.int32) for name, value in given.items()}
    if "mask" in given:
        given["segments"] = given.pop("mask")
    spans = Spans(given.get("segments"), B, T)
    if "positions" in given:
        _check_positions(given["positions"], config.num_positions)
    else:
        given["positions"] = _derive_positions(config, given.get("segments"), B, T)
    given["x"] = array.astype(np.int32) if is_tokens else array
    host = {name: value for name, value in given.items() if isinstance(value, np.ndarray)}
    if is_tokens and pad_length and len(host) == len(given):
        given = {**_padded(config, host, pad_rows=pad_rows)}
    arrays = {name: jnp.asarray(value) for name, value in given.items()}
    context = Context(arrays["positions"], arrays.get("segments"), np.int32(0))
    return Inputs(arrays["x"], context, arrays.get("type_ids"), B, T), spans


def _check_positions(positions: Int[Array | np.ndarray, "B T"], size: int) -> None:
    """Raises ValueError for a position of the host that the model does not have."""
    if not isinstance(positions, jax.Array) and positions.min() >= 0 and positions.max() >= size:
        row = int(positions.max(1).argmax())
        raise ValueError(
            f"row {row} reaches position {positions.max()}, and the model has positions 0 .. "
            f"{size - 1}: shorten the text, or cut texts with jmat.encode(tokenizer, texts, "
            f"max_length={size})."
        )
    check_ids("position", positions, size)


def check_ids(what: str, ids: Int[Array | np.ndarray, "*shape"], size: int) -> None:
    """Raises ValueError for an id of the host outside [0, size): JAX would clamp it
    silently.
    """
    if isinstance(ids, jax.Array) or ids.size == 0 or (ids.min() >= 0 and ids.max() < size):
        return
    where = tuple(int(axis) for axis in np.argwhere((ids < 0) | (ids >= size))[0])
    raise ValueError(
        f"{what} {ids[where]} at {where} is outside the model's range 0 .. {size - 1}."
    )


# --- positions ------------------------------------------------------------------------------------


def _derive_positions(
    config: ModelConfig, segments: Values | None, rows: int, length: int
) -> Values:
    """Returns the index of each token in its text. Raises ValueError for a text longer
    than the model's positions.
    """
    if segments is None:
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
        longest = length
    elif isinstance(segments, jax.Array):
        return _positions_on_device(segments)
    else:
        positions = np.asarray(text_positions(segments))
        longest = int(positions.max()) + 1
    # A row may be longer than the model's positions, if none of the texts in it is.
    if longest > config.num_positions:
        raise ValueError(
            f"a text has {longest} tokens; the model has positions for {config.num_positions}: cut "
            "the text."
        )
    return positions


def text_positions(segments: Values) -> Values:
    """Returns the index of each token in its own text, also where a text lies in
    pieces; padding gets 0.

    Takes and gives numpy or JAX arrays [B, T], and needs no memory of T².
    """
    xp = jnp if isinstance(segments, jax.Array) else np
    # The tokens of a text come together in a stable sort; each then counts from the first of its
    # text.
    order = xp.argsort(segments, axis=1, stable=True)
    text = xp.take_along_axis(segments, order, axis=1)
    index = xp.broadcast_to(xp.arange(segments.shape[1], dtype=np.int32), segments.shape)
    is_first = xp.concatenate(
        [xp.ones_like(text[:, :1], dtype=bool), text[:, 1:] != text[:, :-1]], axis=1
    )
    start = xp.where(is_first, index, 0)
    start = jax.lax.cummax(start, axis=1) if xp is jnp else np.maximum.accumulate(start, axis=1)
    back = xp.argsort(order, axis=1, stable=True)
    count = xp.take_along_axis(index - start, back, axis=1)
    return xp.where(segments > 0, count, 0).astype(np.int32)


_positions_on_device = jax.jit(text_positions)


@dataclasses.dataclass(frozen=True)
class Spans:
    """Says where the texts of each row begin and end, from which positions of `read_at`
    and `At` count.

    Attributes:
      segments: [B, T], or None where all tokens are real.
      rows: B.
      length: T.
    """

    segments: Values | None
    rows: int
    length: int

    def columns(self, what: str, positions: object, *, empty: int = NOWHERE) -> Values:
        """Returns the columns [B] or [B, P] of positions.

        Positions count from a row's first real token; negative ones back from its end.

        Args:
          what: the positions are for, in errors: `read_at`, a site's name.
          positions: a number, [B], [B, P], or [1, P] for all rows.
          empty: column for position 0 of a row without real tokens, and of positions of
            a `jax.Array` outside the text.

        Raises ValueError for positions of another shape or dtype, and for positions of
        the host outside the text.
        """
        positions = on_host(positions)
        B = self.rows
        shapes = {(), (B,)} | (
            {(len(positions), positions.shape[1])} if positions.ndim == 2 else set()
        )
        fits = positions.shape in shapes and (positions.ndim < 2 or len(positions) in (1, B))
        if not fits or not jnp.issubdtype(positions.dtype, jnp.integer):
            raise ValueError(
                f"{what} is {positions.dtype} {positions.shape}; expected integers [{B}] or [{B}, "
                "P], a number, or a list of numbers for every row."
            )
        shape = (B, *positions.shape[1:])
        if isinstance(positions, jax.Array) or isinstance(self.segments, jax.Array):
            if not isinstance(positions, jax.Array):
                check_ids(
                    f"{what} position",
                    np.where(positions < 0, -1 - positions, positions),
                    self.length,
                )
            return _columns_on_device(
                jnp.asarray(positions), self.segments, self.length, shape, int(empty)
            )
        first, count = (
            side.reshape(B, *[1] * (len(shape) - 1))
            for side in _ends(self.segments, self.length, B)
        )
        positions = np.broadcast_to(positions, shape)
        outside = ((positions < -count) | (positions >= count)) & ((count > 0) | (positions != 0))
        if outside.any():
            where = tuple(int(axis) for axis in np.argwhere(outside)[0])
            size = int(count.ravel()[where[0]])
            raise ValueError(
                f"{what} position {positions[where]} at {where} is outside the text of row "
                f"{where[0]}, which has {size} tokens: expected {-size} .. {size - 1}."
            )
        columns = first + np.where(positions < 0, count + positions, positions)
        return np.where(count > 0, columns, empty).astype(np.int32)


def _ends(segments: Values | None, length: int, rows: int) -> tuple[Values, Values]:
    """Returns the column of each row's first real token, and the number of columns up
    to its last; [B] each.
    """
    if segments is None:
        return np.zeros(rows, np.int32), np.full(rows, length, np.int32)
    real = segments > 0
    first, after = real.argmax(axis=1), length - real[:, ::-1].argmax(axis=1)
    # 0 for a row without real tokens
    count = (after - first) * real.any(axis=1).astype(first.dtype)
    return first.astype(np.int32), count.astype(np.int32)


@functools.partial(jax.jit, static_argnames=("length", "shape", "empty"))
def _columns_on_device(
    positions: Array, segments: Values | None, length: int, shape: tuple[int, ...], empty: int
) -> jax.Array:
    first, count = (
        jnp.asarray(side).reshape(-1, *[1] * (len(shape) - 1))
        for side in _ends(segments, length, shape[0])
    )
    positions = jnp.broadcast_to(positions.astype(jnp.int32), shape)
    columns = first + jnp.where(positions < 0, count + positions, positions)
    return jnp.where((positions < count) & (positions >= -count), columns, jnp.int32(empty))


# --- padding --------------------------------------------------------------------------------------


def _padded(
    config: ModelConfig, arrays: dict[str, np.ndarray], *, pad_rows: bool
) -> dict[str, np.ndarray]:
    """Returns the arrays with rows padded on the right to one of few lengths, and few
    rows to one of few numbers.
    """
    B, T = arrays["x"].shape
    length = rung(T, 8)
    if config.num_positions >= T:
        length = min(length, config.num_positions)
    rows = rung(B) if pad_rows and B <= _MOST_ROWS else B
    if (rows, length) == (B, T):
        return arrays
    if "segments" not in arrays and not config.causal:
        # Nothing that a causal model reads lies to the right; in other models padding must be
        # marked.
        arrays = arrays | {"segments": np.ones((B, T), np.int32)}
    # Padding is token 0 at position 0 of no segment.
    return {name: np.pad(value, ((0, rows - B), (0, length - T))) for name, value in arrays.items()}


@functools.partial(jax.jit, static_argnames=("rows", "length", "axes"))
def cut(
    values: list[jax.Array], *, rows: int, length: int, axes: tuple[tuple[int, ...], ...]
) -> list[jax.Array]:
    """Returns values without the padding of `prepare`: the first `rows` rows, and
    `length` along the axes of each.
    """

    def one(value: jax.Array, axes: tuple[int, ...]) -> jax.Array:
        ends = {0: rows} | dict.fromkeys(axes, length)
        return value[tuple(slice(ends.get(axis)) for axis in range(value.ndim))]

    return [one(value, ours) for value, ours in zip(values, axes, strict=True)]
