"""Edits: what `sites=` takes beside maps that stand in for a part.

| | the site's value becomes |
|---|---|
| `Edit(f)` | `f(y)` of the value y that the model computes |
| `Add(v)` | `y + v` |
| `Scale(a)` | `a · y` |
| `At(positions, site)` | at some tokens what `site` makes of it, elsewhere y |

All are pytrees: other values of the same shapes compile nothing new, and `jax.grad`
goes through them.

A part of the model may stand in for another:
`sites={"block.1.attn": model.blocks[0].attn}`. `jmat.run` calls parts that look at
other tokens, which are marked by `NeedsContext`, as `part(x, context)`. Windows and
scales that depend on a block's index follow the block that the part belongs to, not the
one that it stands in; see `OfBlock`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from jmat.models.context import Context, IgnoresInput, IgnoresPadding, NeedsContext
from jmat.models.sites import Site, gather, is_square
from jmat.runtime.annotations import Leaf, PyTree
from jmat.runtime.arrays import on_host
from jmat.runtime.errors import first_line
from jmat.runtime.pytrees import register_dataclass

# --- edits ----------------------------------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
class Edit:
    """Computes the part of the model, then applies `f` to its output.

    `f` is a callable pytree (`jmat.Linear(W)`,
    `jax.tree_util.Partial(function, values)`), whose values are arguments of the
    compiled program, or a plain function. A plain function is part of the program: one
    that was used before compiles nothing, another one, an equal `lambda` too, does; and
    the values that it closes over are those that they were when it was first used. With
    a plain function, every length of the rows is a program of its own.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> batch = jmat.encode(tokenizer, ["Return a new array", "The default is None"])
      >>> edit = jmat.Edit(lambda y: y.at[..., 0].set(0.0))
      >>> _, acts = jmat.run(model, batch, keep="block.3", sites={"block.3": edit})
      >>> float(abs(acts["block.3"][..., 0]).max())
      0.0
    """

    def __init__(self, f: Site):
        self.f: Leaf[Site] = f
        self._is_tree = not jax.tree_util.all_leaves([f])

    def __call__(self, y: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
        return self.f(y)

    def __repr__(self) -> str:
        return f"Edit({self.f!r})"

    def tree_flatten(self) -> tuple[tuple[PyTree], PyTree]:
        return ((self.f,), None) if self._is_tree else ((None,), self.f)

    @classmethod
    def tree_unflatten(cls, function: PyTree, children: tuple[PyTree]) -> "Edit":
        edit = object.__new__(cls)
        edit.f, edit._is_tree = children[0] if function is None else function, function is None
        return edit


@functools.partial(register_dataclass, data_fields=["value"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class Add:
    """Computes the part, then adds `value` to its output: [D], or any shape that
    broadcasts to the output's.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> batch = jmat.encode(tokenizer, ["Return a new array", "The default is None"])
      >>> direction = model.embed.tokens.table[7] - model.embed.tokens.table[8]
      >>> x, _ = jmat.run(model, batch, sites={"block.3": jmat.Add(direction)})
    """

    value: Leaf[Array | np.ndarray]

    def __call__(self, y: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return y + jnp.asarray(self.value).astype(y.dtype)


@functools.partial(register_dataclass, data_fields=["factor"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class Scale:
    """Computes the part, then multiplies its output by `factor`: a number, [D], or what
    broadcasts to the output.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> batch = jmat.encode(tokenizer, ["Return a new array", "The default is None"])
      >>> no_ffn = {"*.ffn": jmat.Scale(0.0)}
      >>> x, acts = jmat.run(model, batch, keep="block.3.ffn", sites=no_ffn)
      >>> float(abs(acts["block.3.ffn"]).max())
      0.0
    """

    factor: Leaf[float | Array | np.ndarray]

    def __call__(self, y: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return y * jnp.asarray(self.factor).astype(y.dtype)


@functools.partial(register_dataclass, data_fields=["positions", "site"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class At:
    """Computes the part everywhere, and puts what `site` makes of it at some tokens
    only.

    Attributes:
      positions: of tokens in their text, from 0, or from the end where negative: a
        number (that token of every row), a list (those tokens of every row), an array
        [B] (one token a row) or [B, P]. They count from a row's first real token, and
        negative ones from its last, so padding on either side is never meant.
      site: an edit or a stand-in for the part. It sees the part's output (an edit) or
        input (a stand-in) at these tokens: [B, …], or [B, P, …] for a list and for [B,
        P]. `Constant(source)` takes `source` [B, D] or [D]. Of attention scores and
        patterns, positions are queries: `site` sees rows [B, H, T] or [B, P, H, T].

    Positions that are a `jax.Array` are not checked: those outside the text change
    nothing.

    Examples:
      >>> import jmat
      >>> model, tokenizer = jmat.load("gpt2-docs")
      >>> batch = jmat.encode(tokenizer, ["Return a new array", "The default is None"])
      >>> last_is_zero = jmat.At(-1, jmat.Scale(0.0))
      >>> x, _ = jmat.run(model, batch, sites={"block.7": last_is_zero})
      >>> float(abs(x[:, -1]).max())
      0.0
    """

    positions: Leaf[int | Sequence[int] | Array | np.ndarray]
    site: Leaf[Site]

    def __post_init__(self):
        if isinstance(self.positions, Sequence):
            object.__setattr__(self, "positions", on_host(self.positions)[None])

    def __call__(self, y: Array, x: Array, context: Context | None, name: str) -> Array:
        """Returns y [B, T, …], the value of the site `name`, with other values at some
        tokens.

        Positions are columns of the rows here, [B] or [B, P]: `jmat.run` has counted
        them in the texts. Those past a row's end change nothing. `x` is the input of
        the part that computed y.
        """
        axis, columns, site = 2 if is_square(name) else 1, jnp.asarray(self.positions), self.site
        inside = jnp.minimum(columns, y.shape[axis] - 1)
        before = gather(y, inside, axis=axis)
        if isinstance(site, NeedsContext):  # looks at all tokens
            value = gather(
                _checked(name, site, _in_context(site, x, context), y.shape, x), inside, axis=axis
            )
        else:
            input_axis = 2 if name.endswith("attn.pattern") else 1  # a pattern is made of scores
            seen = before if is_edit(site) else gather(x, inside, axis=input_axis)
            value = _checked(
                name, site, _change(site, seen, before.shape, context), before.shape, seen
            )
        rows = jnp.arange(len(y)) if columns.ndim == 1 else jnp.arange(len(y))[:, None]
        changed = jnp.moveaxis(y, axis, 1).at[rows, columns].set(value.astype(y.dtype), mode="drop")
        return jnp.moveaxis(changed, 1, axis)


EDITS = (Edit, Add, Scale)  # and At, which needs the input of the part, too


@functools.partial(register_dataclass, data_fields=["part", "layer"], meta_fields=[])
@dataclasses.dataclass(frozen=True, eq=False)
class OfBlock(NeedsContext, IgnoresPadding):
    """Computes a part that looks at other tokens, as block `layer` has it, wherever it
    stands.

    In some models a block's attention depends on its index: by windows (GPT-Neo,
    Mistral) or by scale (a GPT-2 option). `jmat.run` finds the block of a part of the
    same model. Give the block of a part of another model with such attention:
    `OfBlock(other.blocks[3].attn, 3)`.
    """

    part: Leaf[Site]
    layer: Leaf[int | Array | np.ndarray | np.integer]

    def __call__(self, x: Float[Array, "B T D"], context: Context) -> Float[Array, "B T D"]:
        return self.part(x, context._replace(layer=jnp.asarray(self.layer, jnp.int32)))


def is_edit(site: object) -> bool:
    """Returns whether the part is computed: by an edit, not by a stand-in."""
    return isinstance(site, (*EDITS, At))


# --- applying them, while a model is traced -------------------------------------------------------


def apply_site(
    name: str,
    site: Site,
    part: Callable[[], jax.Array],
    x: jax.Array,
    shape: tuple[int | None, ...],
    dtype: DTypeLike,
    context: Context | None,
) -> jax.Array:
    """Returns the value of a site as an edit or a stand-in has it.

    Args:
      name: of the site, for errors.
      site: the edit or the stand-in. Positions of `At` are columns of the row here.
      part: computes the part of the model; only edits call it.
      x: input of the part.
      shape: of the part's output; None for an axis that a stand-in may choose.
      dtype: of the part's output, and so of the result.
      context: for stand-ins that need it.

    Raises:
      ValueError: the site does not take what it gets, or returns another shape.
    """
    seen = part() if is_edit(site) else x
    try:
        if isinstance(site, At):
            return site(seen, x, context, name)
        value = _change(site, seen, shape, context)
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise _refusal(name, site, seen, error) from error
    return _checked(name, site, value, shape, seen).astype(dtype)


def _change(
    site: Site, seen: jax.Array, shape: tuple[int | None, ...], context: Context | None
) -> jax.Array:
    """Returns what an edit makes of the part's output, or what a stand-in makes of the
    part's input.
    """
    if isinstance(site, Edit) and isinstance(site.f, NeedsContext):
        return _in_context(site.f, seen, context)
    if isinstance(site, IgnoresInput):
        return site.fill(shape)
    return _in_context(site, seen, context) if isinstance(site, NeedsContext) else site(seen)


def _in_context(site: NeedsContext, x: jax.Array, context: Context | None) -> jax.Array:
    if context is None:
        raise ValueError("it looks at other tokens, which is possible inside blocks only")
    return site(x, context)


def _checked(
    name: str,
    site: Site,
    value: jax.Array | np.ndarray,
    shape: tuple[int | None, ...],
    x: jax.Array,
) -> jax.Array:
    """Returns the value. Raises ValueError for no floats, or another shape than the
    output's (None: any size).
    """
    given = np.shape(value)
    expected = tuple(given[-1] if size is None and given else size for size in shape)
    if given != expected:
        raise ValueError(
            f"the {role(site)} for site {name!r} returned shape {given} for an input of "
            f"{x.shape}; expected {expected}."
        )
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"the {role(site)} for site {name!r} returned {value.dtype}; expected floats."
        )
    return value


def _refusal(name: str, site: Site, x: jax.Array, error: Exception) -> ValueError:
    """Returns the error of a site that fails on its input, or the one that already
    names the site.
    """
    if f"site {name!r}" in str(error):
        return ValueError(str(error))
    return ValueError(
        f"the {role(site)} for site {name!r} does not take its input {x.dtype} {list(x.shape)}: "
        f"{first_line(error)}"
    )


def role(site: object) -> str:
    """Returns the word for a site's value in errors."""
    return "edit" if is_edit(site) else "replacement"
