"""How a script talks to its user: errors in one sentence, progress on standard error. It defines no flags."""

import logging
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import absl.logging
from absl import app

from jmat import hosts
from jmat.results import claim_output_folder
from jmat.resume import EXIT_INTERRUPTED, EXIT_TERMINATED
from jmat.streaming.snapshots import Terminated


def say(message: str) -> None:
    """Tells the user, on standard error, what happens now; of several processes only the first does."""
    if hosts.is_first():
        print(f"· {message}", file=sys.stderr, flush=True)


def claim_folder(out: str | pathlib.Path, experiment: str, config: Mapping[str, Any], *, overwrite: bool) -> None:
    """`claim_output_folder`, and tells where --overwrite put what it replaces."""
    moved = claim_output_folder(out, experiment, config, overwrite=overwrite)
    if moved is not None:
        say(f"what an earlier run left is in {moved} until there are new results")


_when_done: list[Callable[[], None]] = []


def when_all_is_done(work: Callable[[], None]) -> None:
    """What to do at the end of an experiment that succeeds, in every process."""
    _when_done.append(work)


def run(main: Callable[[list[str]], None]) -> None:
    """Runs an experiment: a user's mistake ends in one sentence and exit code 1, not in a traceback.

    One that SIGTERM stopped, and that can go on, ends with exit code 128 + 15; one that Ctrl-C stopped, with 128 + 2.
    """

    def guarded(argv: list[str]) -> None:
        absl.logging.set_verbosity(absl.logging.WARNING)  # JAX tells which backends it did not find
        absl.logging.get_absl_handler().setFormatter(logging.Formatter("· %(message)s"))
        if len(argv) > 1:
            raise app.UsageError(f"unexpected argument {argv[1]!r}; flags are written --name=value.")
        try:
            _when_done.clear()
            with hosts.together():
                main(argv)
            for work in _when_done:
                work()
        except Terminated as stop:
            say(str(stop))
            hosts.leave(EXIT_TERMINATED)
        except KeyboardInterrupt:
            say("interrupted.")
            hosts.leave(EXIT_INTERRUPTED)
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)

    app.run(guarded)
