"""Signals that end a run: the exception that SIGTERM becomes, and exit codes."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator


class Terminated(BaseException):
    """Reports that SIGTERM came, and that the process is to end. The work done by then
    is on disk; the message says how far that is.
    """


_LATER = 0.05  # seconds
EXIT_TERMINATED, EXIT_INTERRUPTED = 128 + signal.SIGTERM, 128 + signal.SIGINT


@contextlib.contextmanager
def sigterm_received() -> Iterator[list[int]]:
    """Yields a list that is empty until SIGTERM comes; meanwhile the signal does not
    end the process.

    Outside the main thread, where Python lets nobody catch signals, it stays empty.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def lasting_interrupts() -> Iterator[None]:
    """Raises Ctrl-C again where Python drops it: in a callback, such as JAX's during
    garbage collection, it would be printed as a traceback, and the program would go on.
    """
    default = sys.unraisablehook

    def again(dropped: "sys.UnraisableHookArgs") -> None:
        if isinstance(dropped.exc_value, KeyboardInterrupt):
            # Not at once, when it would be raised in here, and dropped as well.
            main = threading.main_thread().ident
            threading.Timer(_LATER, signal.pthread_kill, (main, signal.SIGINT)).start()
        else:
            default(dropped)

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = default
