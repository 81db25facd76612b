"""Many hosts: one process each, which works on its own share of the batches with its
own devices.

The processes meet seldom: to compare what they were started with, to put results
together once at the end of a pass, and when they are done. At every meeting each says
how it is doing, so a failure in one is raised in all, and none waits for a process that
has given up. That a process has died is noticed at the next meeting, at once where it
was process 0, and after 100 seconds at the latest by the heartbeat of
`jax.distributed`: the others then end with a sentence. On CPUs XLA waits 30 minutes at
most for the last one to come.

A lone process calls none of `jax.distributed`, and everything here then costs nothing.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Int, Shaped
from numpy import ndarray

from jmat.runtime.annotations import Fields
from jmat.runtime.errors import in_one_line

Item = TypeVar("Item")

_CARD = 1024  # bytes that each process shows at a meeting: a size, and what went wrong
_AT_ONCE = 64 << 20  # bytes on each device while values are gathered


class OtherProcessError(ValueError):
    """Reports that another process has failed; the message is its own."""


class LostProcessError(ValueError):
    """Reports that another process has died or cannot be reached, so that no exchange
    is possible any more.
    """


class UnequalHostsError(ValueError):
    """Reports that the processes have different numbers of devices: they cannot meet,
    and each of them sees that by itself.
    """


LOST = (
    "another process has died or cannot be reached{reason}: start all of them again with "
    "the same flags; a pass over "
    "the text then goes on from its last snapshots."
)


def count() -> int:
    """Returns the number of processes."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def is_first() -> bool:
    """Returns whether this is process 0, the one that writes files and talks to the
    user.
    """
    return count() == 1 or jax.process_index() == 0


def share(items: Sequence[Item]) -> list[Item]:
    """Returns this process's share: every P-th, since batches come sorted by size."""
    return list(items) if count() == 1 else list(items[jax.process_index() :: count()])


def gather(values: Shaped[ndarray, "*shape"]) -> list[Shaped[ndarray, " n"]]:
    """Returns the values of every process, flat, in the order of the processes; any
    number from each, also none.

    All processes get all of them, bit by bit: float64 stays float64, whatever
    `jax_enable_x64` and the device say.

    Raises:
      OtherProcessError: a process has failed in the meantime.
    """
    flat = np.ascontiguousarray(values).reshape(-1)
    if count() == 1:
        return [flat]
    mine = flat.view(np.uint8)
    sizes = _meet(mine.size)
    parts = [np.empty(size, np.uint8) for size in sizes]
    step = _AT_ONCE // count()
    for start in range(0, max(sizes), step):
        piece = mine[start : start + step]
        sent = np.zeros(min(step, max(sizes) - start), np.uint8)
        sent[: piece.size] = piece
        for part, got in zip(parts, _exchange(sent), strict=True):
            room = part[start : start + step]
            room[:] = got[: room.size]
    return [part.view(flat.dtype) for part in parts]


def fill_in(values: Shaped[ndarray, "N *rest"], mine: Int[ndarray, " n"]) -> None:
    """Sets the rows that other processes have computed; `mine` are those that this one
    has.
    """
    if count() == 1:
        return
    rows = gather(np.asarray(mine, np.int64))
    for at, got in zip(rows, gather(values[mine]), strict=True):
        values[at] = got.reshape(len(at), *values.shape[1:])


def check_same(what: Fields) -> None:
    """Raises ValueError, in all processes, where they were given different values of
    the same name.
    """
    if count() == 1:
        return
    text = json.dumps(what, default=str)
    all_given = [
        json.loads(given.tobytes()) for given in gather(np.frombuffer(text.encode(), np.uint8))
    ]
    for k, given in enumerate(all_given):
        for name in {**all_given[0], **given}:
            values = all_given[0].get(name), given.get(name)
            if json.dumps(values[0]) != json.dumps(values[1]):  # NaN is the same as NaN here
                raise ValueError(
                    f"{name} is {values[0]!r} in process 0 and {values[1]!r} in process {k}; all "
                    "must work on the same."
                )


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Surrounds all that a process does: it ends when all processes end, and fails in
    all when it fails in one.
    """
    try:
        yield
        _meet()
    except (OtherProcessError, LostProcessError, UnequalHostsError):
        raise
    # the devices or the network fail: there may be no meeting any more
    except jax.errors.JaxRuntimeError:
        raise
    except Exception as error:
        # what happened here says more
        with contextlib.suppress(OtherProcessError, LostProcessError):
            _meet(failure=f"{error}" if isinstance(error, ValueError | OSError) else repr(error))
        raise


def leave(code: int) -> NoReturn:
    """Ends this process, without waiting for the others, whom `jax.distributed` will
    end.
    """
    if count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _exchange(values: Shaped[ndarray, "*shape"]) -> Shaped[ndarray, "P *shape"]:
    """Returns the values of all processes, of one shape. Raises LostProcessError where
    they do not all answer.
    """
    try:
        return multihost_utils.process_allgather(values)
    except Exception as error:  # ValueError or JaxRuntimeError, by the version and the network
        raise LostProcessError(LOST.format(reason=f" ({in_one_line(error)})")) from None


def _meet(size: int = 0, failure: str | None = None) -> list[int]:
    """Returns the size that every process reports. Raises OtherProcessError for the
    first failure that one reports.
    """
    if count() == 1:
        return [size]
    text = b"" if failure is None else (failure or "no message").encode()[: _CARD - 16]
    card = np.zeros(_CARD, np.uint8)
    card[:16] = np.array([size, len(text)], np.int64).view(np.uint8)
    card[16 : 16 + len(text)] = np.frombuffer(text, np.uint8)
    sizes = []
    for k, got in enumerate(_exchange(card)):
        size, length = got[:16].view(np.int64).tolist()
        if length:
            raise OtherProcessError(
                f"process {k} failed: {got[16 : 16 + length].tobytes().decode(errors='replace')}"
            )
        sizes.append(size)
    return sizes
