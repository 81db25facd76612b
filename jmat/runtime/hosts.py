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
import ctypes
import functools
import json
import os
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Int, Shaped
from numpy import ndarray

from jmat.runtime.annotations import Fields
from jmat.runtime.errors import first_line, in_one_line

try:
    from jaxlib import _jax as jaxlib_extension
except ImportError:  # another version: `_a_sentence_where_xla_aborts` does without
    jaxlib_extension = None

Item = TypeVar("Item")

AUTO = "auto"
_CARD = 1024  # bytes that each process shows at a meeting: a size, and what went wrong
_AT_ONCE = 64 << 20  # bytes on each device while values are gathered
# seconds until all processes have come together; XLA aborts without a word of ours after 300
_PATIENCE = 295


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


def initialize(
    coordinator: str | None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Joins the other processes; before anything else is done with JAX.

    Args:
      coordinator: HOST:PORT of process 0, reachable from all; `auto` where JAX finds
        out all three by itself (TPU pods, Slurm, Open MPI); None for a lone process.
      num_processes: of all hosts together.
      process_id: this one's, from 0.

    Raises:
      ValueError: flags that do not go together, processes that do not meet, or with
        different numbers of devices.
    """
    check_flags(coordinator, num_processes, process_id)
    if coordinator is None or num_processes == 1 or jax.distributed.is_initialized():
        return
    if coordinator != AUTO:
        _check_address(coordinator, bind=process_id == 0)
    with _no_longer_than(_PATIENCE, coordinator, num_processes), _a_sentence_where_xla_aborts():
        try:
            jax.distributed.initialize(
                *(() if coordinator == AUTO else (coordinator, num_processes, process_id))
            )
        except (RuntimeError, ValueError) as error:
            reason = first_line(error)
            if coordinator == AUTO:
                reason = (
                    f"this is no TPU pod, Slurm or Open MPI job ({reason}): give HOST:PORT of "
                    "process 0"
                )
            raise ValueError(
                f"--coordinator={coordinator}: the processes do not come together: {reason}"
            ) from None
    devices = Counter(device.process_index for device in jax.devices())
    if len(set(devices.values())) > 1:
        each = ", ".join(f"process {k} has {devices[k]}" for k in sorted(devices))
        raise UnequalHostsError(
            f"the processes have different numbers of devices ({each}); expected equally many."
        )


_LOST = (
    "another process has died or cannot be reached{reason}: start all of them again with "
    "the same flags; a pass over "
    "the text then goes on from its last snapshots."
)


@contextlib.contextmanager
def _a_sentence_where_xla_aborts() -> Iterator[None]:
    """Ends a process that joins others inside with a sentence and exit code 1, where
    XLA would abort it.

    XLA does that, in a thread of its own, where process 0 or a heartbeat is missing. It
    calls a function instead where it is given one, for which `jax.distributed` has no
    argument. Some versions fail to call a function of Python's, and abort all the same.
    Then the system calls the handler of SIGABRT, in that thread; one of Python's would
    be too late.
    """
    text = (
        b"error: XLA has ended this process, as it does where "
        + _LOST.format(reason="").encode()
        + b"\n"
    )

    def end(_: object) -> None:
        os.write(2, text)
        os._exit(1)

    _on_abort.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(end))
    ctypes.CDLL(None).signal(signal.SIGABRT, _on_abort[-1])
    make_client: Any = getattr(jaxlib_extension, "get_distributed_runtime_client", None)
    if "missed_heartbeat_callback" not in (getattr(make_client, "__doc__", None) or ""):
        yield
        return
    jaxlib_extension.get_distributed_runtime_client = functools.partial(
        make_client, missed_heartbeat_callback=end
    )
    try:
        yield
    finally:
        jaxlib_extension.get_distributed_runtime_client = make_client


_on_abort: list[object] = []  # what the system calls must not be collected


def _check_address(coordinator: str, *, bind: bool) -> None:
    """Raises ValueError where the host has no address, or, for process 0, where the
    port is taken: XLA would crash.
    """
    host, _, port = coordinator.rpartition(":")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"--coordinator={coordinator}: no such host or port ({first_line(error)})."
        ) from None
    if not bind:
        return
    try:
        # takes a port that an ended process has just left
        with socket.create_server(("", int(port))):
            pass
    except OSError as error:
        raise ValueError(
            f"--coordinator={coordinator}: port {port} of this host cannot be used "
            f"({first_line(error)}); an earlier run may still be going on: end it, or choose "
            "another port."
        ) from None


@contextlib.contextmanager
def _no_longer_than(
    seconds: float | int, coordinator: str, num_processes: int | None
) -> Iterator[None]:
    """Ends this process with one sentence where the processes have not come together by
    then.
    """

    def give_up() -> None:
        many = "the" if num_processes is None else f"the {num_processes}"
        print(
            f"error: --coordinator={coordinator}: {many} processes have not come together in "
            f"{seconds:.0f} seconds; was each started, with its own --process_id, and can the port "
            "of process 0 be reached?",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_flags(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Raises ValueError where the flags of that name do not go together."""
    given = {"num_processes": num_processes, "process_id": process_id}
    named = [f"--{name}" for name, value in given.items() if value is not None]
    if coordinator is None and named:
        raise ValueError(
            f"{named[0]} without --coordinator: give HOST:PORT of process 0 as well, the same "
            "everywhere."
        )
    if coordinator is None:
        return
    if coordinator == AUTO:
        if named:
            raise ValueError(
                f"--coordinator=auto finds out {named[0]} by itself: leave it out, or give "
                "HOST:PORT."
            )
        return
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"--coordinator={coordinator}: expected HOST:PORT of process 0, or auto.")
    if num_processes is None or process_id is None:
        raise ValueError("--coordinator=HOST:PORT needs --num_processes and --process_id as well.")
    if num_processes < 1:
        raise ValueError(f"--num_processes={num_processes}: expected at least 1.")
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"--process_id={process_id}: expected 0 .. {num_processes - 1}, one a process."
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
        raise LostProcessError(_LOST.format(reason=f" ({in_one_line(error)})")) from None


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
