"""Names the types that annotations of several rooms share."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

Value = TypeVar("Value")

# `Leaf[T]` is the type of a pytree's field that holds a T when the pytree is used. jax.tree.map puts all else in its
# place, such as shapes and shardings, so that nothing can be checked when a pytree is made.
if TYPE_CHECKING:
    Leaf = Annotated[Value, "leaf"]
else:

    class Leaf:
        """Stands for any type where annotations are checked at every call."""

        def __class_getitem__(cls, _: object) -> object:
            return Any


PyTree = Any  # arrays in containers in containers, which no type of Python describes

# A JSON object, as json.loads returns it or json.dumps takes it; the readers of a key know what it holds.
JsonObject = dict[str, Any]
Fields = Mapping[str, Any]  # a JSON object that is only read
