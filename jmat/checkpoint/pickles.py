"""Reads pickles without running anything in them.

A pickle is a program for a small stack machine, and Python's own machine imports and
calls whatever the program names. This one takes the instructions that make plain values
(numbers, text, bytes, lists, tuples, dicts), and the few names that its caller gives.
Every other instruction or name ends the reading.
"""

import io
import pickletools
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, runtime_checkable

# Of a file of maps: several dozen for each tensor.
_MOST_STEPS = 100_000
_MOST_BITS = 128  # of a whole number

# What a pickle's instructions make: plain values, and what the caller's functions return.
Value = object
Function = Callable[..., Value]


class PickleError(ValueError):
    """Reports a pickle that is damaged, or holds something else than it may; the
    message is what follows "FILE" in a sentence.
    """


@runtime_checkable
class Buildable(Protocol):
    """Takes a state after it was made, as arrays of NumPy do."""

    def build(self, state: Value) -> None: ...


class OrderedDict(dict[Value, Value]):
    """Holds a dict whose attributes, which a pickle may set, are forgotten."""

    @classmethod
    def make(cls, *args: Value) -> "OrderedDict":
        """Returns an empty one."""
        if args:
            raise PickleError("makes an ordered dict in a way that no file of maps does")
        return cls()

    def build(self, state: Value) -> None:
        """Ignores attributes: of the tables of PyTorch, they are versions of its
        modules.
        """
        if not isinstance(state, dict):
            raise PickleError("sets something else than the attributes of a dict")


def read_pickle(
    file: io.BytesIO, names: Mapping[str, Value], persistent: Function | None = None
) -> Value:
    """Returns what one pickle holds; the file is left behind its end.

    Args:
      file: at the beginning of the pickle.
      names: values and functions by the names that the pickle may have for them, such
        as `collections.OrderedDict`. Functions are called, with any arguments.
      persistent: returns the value of a persistent id; by default there may be none.

    Raises:
      PickleError: a damaged pickle, another name or instruction.
    """
    machine = _Machine(names, persistent)
    steps = pickletools.genops(file)
    for _ in range(_MOST_STEPS):
        name, argument = _next(steps)
        if name == "STOP":
            return machine.pop()
        machine.do(name, argument)
    raise PickleError(f"holds more than {_MOST_STEPS} values, which no file of maps needs")


def _next(steps: Iterator[tuple[pickletools.OpcodeInfo, Value, int | None]]) -> tuple[str, Value]:
    """Returns the next instruction and its argument."""
    try:
        opcode, argument, _ = next(steps)
    except (ValueError, OverflowError, MemoryError, StopIteration):
        raise PickleError("is no pickle, or a truncated one") from None
    return opcode.name, argument


_LITERALS = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT UNICODE SHORT_BINUNICODE BINUNICODE"
    " BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 BYTEARRAY8".split()
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """Holds the stack, the marks on it and the memo of one pickle."""

    def __init__(self, names: Mapping[str, Value], persistent: Function | None):
        self.names, self.persistent = names, persistent
        self.stack: list[Value] = []
        self.marks: list[int] = []
        self.memo: dict[int, Value] = {}

    def pop(self) -> Value:
        """Returns the topmost value, and takes it off."""
        if not self.stack:
            raise PickleError("is a damaged pickle")
        return self.stack.pop()

    def top(self) -> Value:
        """Returns the topmost value."""
        if not self.stack:
            raise PickleError("is a damaged pickle")
        return self.stack[-1]

    def since_mark(self) -> list[Value]:
        """Returns the values above the last mark, and takes them off."""
        if not self.marks:
            raise PickleError("is a damaged pickle")
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def do(self, name: str, argument: Value) -> None:
        """Carries out one instruction."""
        if name in _LITERALS:
            if isinstance(argument, int) and argument.bit_length() > _MOST_BITS:
                raise PickleError(f"holds a whole number of more than {_MOST_BITS} bits")
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            self.stack.append(tuple(reversed([self.pop() for _ in range(_TUPLES[name])])))
        elif (method := getattr(self, f"_{name.lower()}", None)) is not None:
            method(argument)
        else:
            raise PickleError(f"has the instruction {name}, which no file of maps needs")

    def _proto(self, argument: Value) -> None:
        """Passes over the number of the protocol, and the length of a part."""

    _frame = _proto

    def _mark(self, argument: Value) -> None:
        self.marks.append(len(self.stack))

    def _empty_list(self, argument: Value) -> None:
        self.stack.append([])

    def _empty_dict(self, argument: Value) -> None:
        self.stack.append({})

    def _tuple(self, argument: Value) -> None:
        self.stack.append(tuple(self.since_mark()))

    def _list(self, argument: Value) -> None:
        self.stack.append(self.since_mark())

    def _dict(self, argument: Value) -> None:
        pairs = self.since_mark()
        self.stack.append({})
        self._set(pairs)

    def _append(self, argument: Value) -> None:
        self._extend([self.pop()])

    def _appends(self, argument: Value) -> None:
        self._extend(self.since_mark())

    def _extend(self, values: list[Value]) -> None:
        target = self.top()
        if not isinstance(target, list):
            raise PickleError("is a damaged pickle")
        target.extend(values)

    def _setitem(self, argument: Value) -> None:
        value, key = self.pop(), self.pop()
        self._set([key, value])

    def _setitems(self, argument: Value) -> None:
        self._set(self.since_mark())

    def _set(self, pairs: list[Value]) -> None:
        target = self.top()
        if not isinstance(target, dict) or len(pairs) % 2:
            raise PickleError("is a damaged pickle")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            # A tuple of tuples of … could take forever to hash.
            if not isinstance(key, str | int):
                raise PickleError("has a key that is neither text nor a whole number")
            target[key] = value

    def _memoize(self, argument: Value) -> None:
        self.memo[len(self.memo)] = self.top()

    def _put(self, argument: int) -> None:
        self.memo[argument] = self.top()

    _binput = _long_binput = _put

    def _get(self, argument: int) -> None:
        if argument not in self.memo:
            raise PickleError("is a damaged pickle")
        self.stack.append(self.memo[argument])

    _binget = _long_binget = _get

    def _global(self, argument: str) -> None:
        self._named(*argument.split(" ", 1))

    def _stack_global(self, argument: Value) -> None:
        name, module = self.pop(), self.pop()
        self._named(module, name)

    def _named(self, module: Value, name: Value) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleError("is a damaged pickle")
        known = f"{module}.{name}"
        if known not in self.names:
            raise PickleError(f"names {known[:100]}, which no file of maps needs")
        self.stack.append(self.names[known])

    def _reduce(self, argument: Value) -> None:
        args, function = self.pop(), self.pop()
        if not isinstance(args, tuple) or not callable(function):
            raise PickleError("calls something that is no function")
        try:
            self.stack.append(function(*args))
        except TypeError:
            raise PickleError("calls a function with other arguments than it takes") from None

    def _build(self, argument: Value) -> None:
        state, target = self.pop(), self.top()
        if not isinstance(target, Buildable) or isinstance(target, type):
            raise PickleError("sets attributes of something that has none")
        target.build(state)

    def _binpersid(self, argument: Value) -> None:
        if self.persistent is None:
            raise PickleError("refers to something outside")
        self.stack.append(self.persistent(self.pop()))
