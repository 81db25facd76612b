"""Starts scripts that end when the script that started them ends, however that happens."""

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from typing import NoReturn

from jmat.runtime.stopping import Terminated

_LIFELINE = "JMAT_LIFELINE"  # names the child's end of a pipe whose other end only the parent has
_PATIENCE = 60  # seconds that a child has to save what it has done


def run_child(command: Sequence[str]) -> int:
    """Runs a command to its end, and returns its exit code.

    Where this process is stopped meanwhile, by SIGTERM or Ctrl-C, the child gets
    SIGTERM and is waited for. Where it is killed, a child that calls `end_with_parent`
    ends, too.

    Raises:
      Terminated: this process got SIGTERM.
    """

    def stop(number: int, frame: object) -> NoReturn:
        raise Terminated("stopped by SIGTERM; start again with the same flags to go on from there.")

    read, write = os.pipe()
    child = subprocess.Popen(command, pass_fds=[read], env={**os.environ, _LIFELINE: str(read)})
    os.close(read)
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, stop) if in_main_thread else None
    try:
        return child.wait()
    except BaseException:
        child.terminate()
        try:
            child.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise
    finally:
        os.close(write)
        if in_main_thread:
            signal.signal(signal.SIGTERM, before)


def end_with_parent() -> None:
    """Ends this process by SIGTERM as soon as the script that started it is no more, if
    a script did.
    """
    handle = os.environ.pop(_LIFELINE, None)
    if handle is None:
        return

    def wait() -> None:
        # returns when the other end is closed, which the system does for a killed process
        os.read(int(handle), 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
