"""Names the types that annotations of several rooms share."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

Value = TypeVar("Value")

# `Leaf[T]` is the type of a pytree's field that holds a T when the pytree is used. jax.tree.map
# puts all else in its place, such as shapes and shardings, so that nothing can be checked when a
# pytree is made.
if TYPE_CHECKING:
    Leaf = Annotated[Value, "leaf"]
else:

    class Leaf:
        """Stands for any type where annotations are checked at every call."""

        def __class_getitem__(cls, _: object) -> object:
            return Any


# Arguments that several calls share: mypy cannot tell which of them each value is for.
Keywords = dict[str, Any]

PyTree = Any  # arrays in containers in containers, which no type of Python describes

# Of PyTorch and of transformers on it: optional packages, whose types are not there where they are
# not installed.
TorchTensor = Any
TorchModel = Any

# A value out of a JSON file, whose type its reader checks; and an object, as json.loads returns it
# or json.dumps takes it, whose keys' readers know what they hold.
JsonValue = Any
JsonObject = dict[str, Any]
Fields = Mapping[str, Any]  # a JSON object that is only read
