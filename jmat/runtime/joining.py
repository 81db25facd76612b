"""Joins the processes of a run on many hosts, and ends this one with a sentence where they
do not come together.
"""

import contextlib
import ctypes
import functools
import os
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

from jmat.runtime.errors import first_line
from jmat.runtime.hosts import LOST, UnequalHostsError

try:
    from jaxlib import _jax as jaxlib_extension
except ImportError:  # another version: `_a_sentence_where_xla_aborts` does without
    jaxlib_extension = None

AUTO = "auto"
# seconds until all processes have come together; XLA aborts without a word of ours after 300
_PATIENCE = 295


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
        + LOST.format(reason="").encode()
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
