"""Forms of maps in files: the equation by which maps.json says how a map is applied,
and the tensors that it takes.

A map's first matrix W is stored under the map's name, all else under `NAME.FIELD`. A
matrix in int8 takes two tensors: `….int8 [D, E]` and `….scale [D]`, a float32 for each
row.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from numpy import ndarray

from jmat.maps.compact import Diagonal, Hadamard, Hidden, LowRank, Map, Quantised, is_quantised
from jmat.maps.types import Constant, Identity, Linear
from jmat.runtime.annotations import Fields, JsonObject

# How a map is applied → its type, and the names of its fields. H is
# `jmat.maps.compact.rotation(D)`.
FORMS: dict[str, tuple[type, tuple[str, ...]]] = {
    "y = x": (Identity, ()),
    "y = value": (Constant, ("value",)),
    "y = x @ W": (Linear, ("W",)),
    "y = x @ W + bias": (Linear, ("W", "bias")),
    "y = x @ A @ B": (LowRank, ("A", "B")),
    "y = x @ A @ B + bias": (LowRank, ("A", "B", "bias")),
    "y = x * s": (Diagonal, ("s",)),
    "y = x * s + bias": (Diagonal, ("s", "bias")),
    "y = ((x @ H) * s) @ H": (Hadamard, ("s",)),
    "y = ((x @ H) * s) @ H + bias": (Hadamard, ("s", "bias")),
    "y = x @ W + gelu(x @ U + c) @ V + bias": (Hidden, ("W", "U", "c", "V", "bias")),
}
TYPES = tuple(dict.fromkeys(kind for kind, _ in FORMS.values()))
TYPE_NAMES = "jmat.Linear, or another map of jmat.maps"
# Six digits: no model is as deep, and int() takes any such text.
_JUMP = re.compile(r"(.+)\.(\d{1,6})\.(\d{1,6})", re.ASCII | re.DOTALL)


def jump_of(name: str) -> tuple[str, int, int] | None:
    """Returns kind, source and target layer of a map named `KIND.i.j`, such as
    `mat.3.8`; None for another name, such as `attn.3`.
    """
    match = _JUMP.fullmatch(name)
    return None if match is None else (match[1], int(match[2]), int(match[3]))


class Form(NamedTuple):
    """Holds what maps.json says of one map.

    Attributes:
      apply: how it is applied, one of `FORMS`.
      shape: (D, E); () for the identity, (E,) for a constant.
      int8: fields that are matrices in int8 by row.
    """

    apply: str
    shape: tuple[int, ...]
    int8: tuple[str, ...] = ()

    @property
    def bias(self) -> bool:
        """Returns whether there is a bias."""
        return self.apply.endswith("+ bias")

    def names(self, name: str) -> dict[str, tuple[str, ...]]:
        """Returns the names of the tensors of a map by field."""
        fields = {
            field: name if field == "W" else f"{name}.{field}" for field in FORMS[self.apply][1]
        }
        return {
            f: (f"{at}.int8", f"{at}.scale") if f in self.int8 else (at,)
            for f, at in fields.items()
        }


def form_of(stand_in: Map) -> Form:
    """Returns the form of a map. Raises ValueError for what is none."""
    fields = {field.name: getattr(stand_in, field.name) for field in dataclasses.fields(stand_in)}
    fields = {name: value for name, value in fields.items() if value is not None}
    apply = next(
        (text for text, form in FORMS.items() if form == (type(stand_in), tuple(fields))), None
    )
    if apply is None:
        raise ValueError(
            f"a map of type {type(stand_in).__name__} has no form in maps.json; expected "
            f"{TYPE_NAMES}."
        )
    int8 = tuple(name for name, value in fields.items() if is_quantised(value))
    return Form(apply, _shape(stand_in, fields), int8)


def _shape(stand_in: Map, fields: Fields) -> tuple[int, ...]:
    if isinstance(stand_in, Identity):
        return ()
    if isinstance(stand_in, Constant):
        return tuple(stand_in.value.shape)
    D = next(iter(fields.values())).shape[0]
    last = [value for name, value in fields.items() if name in ("W", "B", "s")][-1]
    return (D, last.shape[-1])


def described(name: str, stand_in: Map) -> JsonObject:
    """Returns what maps.json says of a map: its shape, and how it is applied; its kind,
    where the name has one.
    """
    form = form_of(stand_in)
    jump = jump_of(name)
    about: JsonObject = {"shape": list(form.shape), "bias": form.bias}
    if jump is not None:
        about["kind"] = jump[0]
    return about | {"apply": form.apply} | ({"int8": list(form.int8)} if form.int8 else {})


def read_form(about: Fields) -> Form:
    """Returns the form of a map that maps.json describes; files before there were kinds
    say nothing of `apply`.

    Raises ValueError, TypeError or KeyError for something else.
    """
    apply = about.get("apply")
    if apply is None:
        apply = "y = x @ W + bias" if about["bias"] else "y = x @ W"
    form = Form(apply, tuple(about["shape"]), tuple(about.get("int8", ())))
    if form.apply not in FORMS:
        raise ValueError(
            f"maps are applied as {form.apply!r}, which this version of jmat does not know"
        )
    if unknown := set(form.int8) - set(FORMS[form.apply][1]):
        raise ValueError(f"{min(unknown)!r} is in int8, and no part of {form.apply!r}")
    return form


def tensors_of(name: str, stand_in: Map) -> dict[str, ndarray]:
    """Returns the tensors of a map by their names in the file."""
    tensors: dict[str, ndarray] = {}
    for field, names in form_of(stand_in).names(name).items():
        value = getattr(stand_in, field)
        parts = (value.values, value.scale) if is_quantised(value) else (value,)
        tensors |= {at: np.ascontiguousarray(part) for at, part in zip(names, parts, strict=True)}
    return tensors


def build(name: str, form: Form, tensors: Mapping[str, Array]) -> Map:
    """Returns the map of a name from the tensors of a file."""
    fields = {}
    for field, names in form.names(name).items():
        parts = [tensors[at] for at in names]
        fields[field] = Quantised(*parts) if field in form.int8 else parts[0]
    return FORMS[form.apply][0](**fields)


def fits(stand_in: Map, form: Form) -> bool:
    """Returns whether the parts of a map fit one another, and the shape of its form."""
    if not form.shape:
        return isinstance(stand_in, Identity)
    x = jax.ShapeDtypeStruct(form.shape[:1], jnp.float32)
    try:
        ends = jax.eval_shape(lambda f, x: f(x), stand_in, x).shape
        return ends == form.shape[-1:] and form_of(stand_in) == form
    except (TypeError, ValueError, IndexError):
        return False
