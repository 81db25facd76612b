"""Keeps a run going where standard output or standard error is closed, full, or lacks
characters.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

CLOSED = 141  # exit code where a reader has gone, as of a program that SIGPIPE ends (128 + 13)


class LastingStream:
    """Writes text to a stream, and drops what cannot be written.

    Characters that its encoding lacks become question marks.

    Attributes:
      problem: the first error of the operating system, if there was one.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.problem: OSError | None = None
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")

    def write(self, text: str) -> int:
        with self._remembered():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._remembered():
            self._stream.flush()

    @contextlib.contextmanager
    def _remembered(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.problem = self.problem or error
            with contextlib.suppress(OSError, ValueError):
                # The rest of its buffer, and all that is written later, goes to /dev/null.
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting_streams() -> Iterator[None]:
    """Runs what stands inside to its end whatever becomes of standard output and
    standard error.

    Raises:
      SystemExit: always, with the exit code of what stands inside. Where that is 0, but
        a reader of the output has gone, the code is 141; where the output could not be
        written for another reason, 1, after a sentence.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (None if s is None else LastingStream(s) for s in before)  # type: ignore[assignment]
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, LastingStream)]
    code: Any = 0
    try:
        yield
    except SystemExit as end:
        code = end.code
    finally:
        for stream in streams:
            stream.flush()
        problems = [stream.problem for stream in streams if stream.problem is not None]
        others = [
            problem for problem in problems if problem.errno not in (errno.EPIPE, errno.ECONNRESET)
        ]
        if code in (None, 0) and others:
            reason = others[0].strerror
            print(
                f"error: cannot print all: {reason}; all files have been written.",
                file=sys.stderr,
                flush=True,
            )
        sys.stdout, sys.stderr = before
    if code in (None, 0) and problems:
        code = 1 if others else CLOSED
    sys.exit(code)
