"""Registers dataclasses as pytrees whose structures differ where their types do.

`jax.tree_util.register_dataclass` (JAX 0.10) compares the fields of two structures, and
not their types. So `jax.jit` can take the program of one type for another one with as
many fields: a run with `Scale` would now and then add, as `Add` does.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import jax

from jmat.runtime.annotations import PyTree

Class = TypeVar("Class", bound=type)


def register_dataclass(
    kind: Class, data_fields: Sequence[str] | None = None, meta_fields: Sequence[str] = ()
) -> Class:
    """Registers a dataclass as a pytree, and returns it.

    Args:
      kind: the dataclass.
      data_fields: fields that hold arrays, or pytrees of them; None: all fields.
      meta_fields: fields that are part of the structure.
    """
    data = (
        [field.name for field in dataclasses.fields(kind)]
        if data_fields is None
        else list(data_fields)
    )
    meta = list(meta_fields)

    def flatten(node: PyTree) -> tuple[PyTree, PyTree]:
        return tuple(getattr(node, name) for name in data), tuple(
            getattr(node, name) for name in meta
        )

    def flatten_with_keys(node: PyTree) -> tuple[PyTree, PyTree]:
        keys = tuple((jax.tree_util.GetAttrKey(name), getattr(node, name)) for name in data)
        return keys, tuple(getattr(node, name) for name in meta)

    def unflatten(values: PyTree, parts: PyTree) -> PyTree:
        return kind(**dict(zip(data, parts, strict=True)), **dict(zip(meta, values, strict=True)))

    jax.tree_util.register_pytree_with_keys(kind, flatten_with_keys, unflatten, flatten)
    return kind
