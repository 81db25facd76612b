"""Tensors as pickles of PyTorch and NumPy describe them, held against the bytes that
there are before memory is taken.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import TypeGuard

import ml_dtypes
import numpy as np
from numpy import ndarray

from jmat.checkpoint.pickles import OrderedDict, PickleError, Value
from jmat.runtime.errors import shortened

# The storages of PyTorch that hold weights.
DTYPES = {
    "Half": np.dtype(np.float16),
    "BFloat16": np.dtype(ml_dtypes.bfloat16),
    "Float": np.dtype(np.float32),
    "Double": np.dtype(np.float64),
}
STORAGES: dict[str, Value] = {f"torch.{name}Storage": dtype for name, dtype in DTYPES.items()}
_MOST_AXES = 8
_MOST = 1 << 48  # sizes, strides and offsets are below: NumPy computes with 64 bits

Bytes = Callable[[], memoryview]


@dataclasses.dataclass(eq=False)
class Storage:
    """Holds a row of numbers of a file.

    Attributes:
      dtype: of a number.
      count: how many there are.
      read: returns their bytes; None where these stand behind the pickle, and were not
        reached yet.
    """

    dtype: np.dtype
    count: int
    read: Bytes | None

    @property
    def nbytes(self) -> int:
        """Returns the number of its bytes."""
        return self.count * self.dtype.itemsize


@dataclasses.dataclass(eq=False)
class Tensor:
    """Holds the place of a tensor in a storage, in numbers of the storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.strides):
            raise PickleError("has a tensor with more strides than axes, or fewer")
        steps = zip(self.shape, self.strides, strict=True)
        last = self.offset + sum((n - 1) * stride for n, stride in steps)
        size = math.prod(self.shape)
        if math.prod(n for n in self.shape if n) >= _MOST:  # NumPy, too, leaves out axes of 0
            raise PickleError(f"has a tensor of shape {_shown(self.shape)}, which is too large")
        # As many numbers as it announces: one number, say, may not stand for a thousand.
        if size and (last >= self.storage.count or size > self.storage.count):
            raise PickleError(
                f"has a tensor of shape {_shown(self.shape)} beyond the {self.storage.count} "
                "numbers that its storage holds"
            )

    @property
    def nbytes(self) -> int:
        """Returns the bytes that its values take."""
        return math.prod(self.shape) * self.storage.dtype.itemsize

    def values(self, dtype: np.dtype | type = np.float32) -> ndarray:
        """Returns its values as an array of its own, [*shape].

        Raises PickleError where its bytes are not in the file.
        """
        storage = self.storage
        if storage.read is None:
            raise PickleError("lacks the values of a tensor")
        numbers = np.frombuffer(storage.read(), storage.dtype, storage.count)[self.offset :]
        strides = tuple(stride * storage.dtype.itemsize for stride in self.strides)
        view = np.lib.stride_tricks.as_strided(
            numbers if math.prod(self.shape) else numbers[:0], self.shape, strides, writeable=False
        )
        with np.errstate(all="ignore"):  # a number that is too large becomes infinite
            return np.array(view, dtype=dtype, order="C")


def is_size(value: Value) -> TypeGuard[int]:
    """Returns whether a value is a whole number of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _shown(shape: tuple[int, ...]) -> str:
    return "×".join(str(n) for n in shape) or "()"


class Budget:
    """Makes tensors until they announce more values than a file can hold."""

    def __init__(self, nbytes: int):
        self.total = self.left = nbytes

    def rebuild(
        self,
        storage: Value = None,
        offset: Value = None,
        shape: Value = None,
        strides: Value = None,
        _requires_grad: Value = None,
        hooks: Value = None,
        *rest: Value,
    ) -> Tensor:
        """Returns what `torch._utils._rebuild_tensor_v2` does with the same arguments."""
        if not isinstance(storage, Storage) or hooks or any(rest):
            raise PickleError("has a tensor of another kind than numbers in a storage")
        (start,) = _sizes((offset,))
        return self.spend(Tensor(storage, start, _sizes(shape), _sizes(strides)))

    def spend(self, tensor: Tensor) -> Tensor:
        """Returns the tensor, unless all tensors together take more bytes than the file
        has.
        """
        self.left -= tensor.nbytes
        if self.left < 0:
            raise PickleError(f"announces more numbers than its {self.total} bytes can hold")
        return tensor


def _sizes(given: Value) -> tuple[int, ...]:
    """Returns a shape, strides or an offset, unless they are something else."""
    if (
        not isinstance(given, tuple)
        or len(given) > _MOST_AXES
        or not all(is_size(n) and n < _MOST for n in given)
    ):
        raise PickleError(
            "has a tensor whose shape, strides or offset are no whole numbers of at least 0 and "
            f"below {_MOST}, or one of more than {_MOST_AXES} axes"
        )
    return given


# --- arrays of NumPy ------------------------------------------------------------------------------


class Dtype:
    """Holds a dtype of NumPy as a pickle makes it: a name, and later a byte order."""

    def __init__(self, name: Value = None, *_flags: Value):
        if name not in ("f2", "f4", "f8"):
            shown = f" {shortened(name, 40)}" if isinstance(name, str) else ""
            raise PickleError(f"has an array of another dtype{shown} than floating point")
        self.dtype = np.dtype(name)

    def build(self, state: Value) -> None:
        """Sets the byte order, `<`, `>`, `=` or `|`."""
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else None
        if order not in ("<", ">", "=", "|"):
            raise PickleError("has an array of an unknown byte order")
        self.dtype = self.dtype.newbyteorder(order)


class NumpyArray:
    """Holds an array of NumPy as a pickle makes it: empty, and later with values."""

    def __init__(self, budget: Budget):
        self.budget = budget
        self.tensor: Tensor | None = None

    def build(self, state: Value) -> None:
        """Sets shape, dtype, order and bytes."""
        if not isinstance(state, tuple) or len(state) != 5:
            raise PickleError("has an array of another kind than numbers")
        _, shape, dtype, fortran, content = state
        self.fill(content, dtype, shape, "F" if fortran else "C")

    def fill(self, content: Value, dtype: Value, shape: Value, order: Value) -> "NumpyArray":
        """Returns the array with values, from bytes in C or Fortran order."""
        if not isinstance(dtype, Dtype) or not isinstance(content, bytes | bytearray):
            raise PickleError("has an array of another kind than numbers")
        sizes = _sizes(shape)
        count, remainder = divmod(len(content), dtype.dtype.itemsize)
        if remainder or math.prod(sizes) != count:
            raise PickleError(
                f"has an array of shape {_shown(sizes)}, and {len(content)} bytes for it"
            )
        strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
        if order == "F":
            strides = [math.prod(sizes[:axis]) for axis in range(len(sizes))]
        storage = Storage(dtype.dtype, count, lambda: memoryview(content))
        self.tensor = self.budget.spend(Tensor(storage, 0, sizes, tuple(strides)))
        return self


def _encode(text: Value = None, codec: Value = None) -> bytes:
    """Returns bytes that old protocols write as text."""
    if not isinstance(text, str) or codec != "latin1":
        raise PickleError("holds text in another code than bytes are written in")
    try:
        return text.encode("latin1")
    except UnicodeEncodeError:
        raise PickleError("is a damaged pickle") from None


def _no_bytes(*args: Value) -> bytes:
    """Returns the empty bytes, which old protocols call a class for."""
    if args:
        raise PickleError("makes bytes in a way that no file of maps does")
    return b""


def plain_names(budget: Budget) -> dict[str, Value]:
    """Returns the names that arrays of NumPy and tables of PyTorch need, besides those
    of storages.
    """

    def from_buffer(*args: Value) -> NumpyArray:
        if len(args) != 4:
            raise PickleError("has an array of another kind than numbers")
        return NumpyArray(budget).fill(*args)

    names: dict[str, Value] = {
        "collections.OrderedDict": OrderedDict.make,
        "torch._utils._rebuild_tensor_v2": budget.rebuild,
        "_codecs.encode": _encode,
        "__builtin__.bytes": _no_bytes,
        "numpy.dtype": Dtype,
        "numpy.ndarray": None,
    }
    for core in ("numpy.core", "numpy._core"):
        names[f"{core}.multiarray._reconstruct"] = lambda *_: NumpyArray(budget)
        names[f"{core}.numeric._frombuffer"] = from_buffer
    return names
