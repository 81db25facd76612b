"""Prints what a script has to say: errors in one sentence, progress on standard error."""

import contextlib
import difflib
import logging
import pathlib
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn, TextIO

import absl.logging
from absl import app, flags

from experiments import figure_flags, tracking
from experiments.children import end_with_parent
from experiments.help import asks_for_help, print_help
from experiments.streams import lasting_streams
from jmat.report.notes import format_notes
from jmat.runtime import hosts
from jmat.runtime.annotations import Fields, JsonObject
from jmat.runtime.errors import printable, sentence
from jmat.runtime.folders import OutputFolder, claim_output_folder
from jmat.runtime.stopping import EXIT_INTERRUPTED, EXIT_TERMINATED, Terminated, lasting_interrupts


def say(message: str) -> None:
    """Tells the user, on standard error, what happens now; of several processes only
    the first does.
    """
    if hosts.is_first():
        print(printable(f"· {message}"), file=sys.stderr, flush=True)


_claimed: list[OutputFolder] = []


def claim_folder(
    out: str | pathlib.Path,
    experiment: str,
    config: Fields,
    *,
    writes: Collection[str] = (),
    reads: Collection[str] = (),
    overwrite: bool,
) -> OutputFolder:
    """Claims the output folder (`claim_output_folder`) until the script ends, and says
    what the user should know.
    """
    trackers = tracking.chosen()
    writes = (*writes, *trackers)
    claim = claim_output_folder(
        out, experiment, config, writes=writes, reads=reads, overwrite=overwrite
    )
    _claimed.append(claim)
    if claim.moved is not None:
        say(f"what an earlier run left is in {claim.moved} until there are new results")
    if not claim.locked:
        say(
            f"the file system of {out} has no locks: see to it that no other run writes there "
            "meanwhile"
        )
    if trackers:
        when_all_is_done(lambda: say(tracking.send(claim)))
    return claim


def release_folders() -> None:
    """Gives back the output folders of the script; one in which nothing was written is
    as it was before.
    """
    while _claimed:
        _claimed.pop().release()


def _leave(code: int) -> NoReturn:
    """Ends the process without a meeting of all processes (`hosts.leave`), its folders
    given back.
    """
    release_folders()
    hosts.leave(code)


def print_notes(rows: Sequence[Fields]) -> None:
    """Prints every note of the rows once: which figures have no value, or mean less
    than they seem to.
    """
    for line in format_notes(rows):
        print(line)


def with_flags(message: str) -> str:
    """Returns the message of an error, with the setting that it begins with as a flag:
    `--layers has …`.
    """
    setting = re.match(r"(\w+)(=| has )", message)
    return f"--{message}" if setting is not None and setting[1] in flags.FLAGS else message


class _Formatter(logging.Formatter):
    """Writes out control characters that come with what is logged."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class PrintableStream:
    """Writes text to a stream with its control characters written out."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _printable_output() -> Iterator[None]:
    """Writes out control characters on standard output, since tables hold names and
    tokens out of files.
    """
    stream = sys.stdout
    with contextlib.redirect_stdout(PrintableStream(stream)):  # type: ignore[type-var]
        yield


def drop_plain_handlers() -> None:
    """Removes the handlers by which libraries that log while they are imported would
    say everything twice.
    """
    for handler in [each for each in logging.root.handlers if type(each) is logging.StreamHandler]:
        logging.root.removeHandler(handler)


_when_done: list[Callable[[], None]] = []


def when_all_is_done(work: Callable[[], None]) -> None:
    """Registers work for the end of an experiment that succeeds, in every process."""
    _when_done.append(work)


def run(main: Callable[[list[str]], None]) -> None:
    """Runs an experiment: a user's mistake ends in one sentence and exit code 1, not in
    a traceback.

    One that SIGTERM stopped, and that can go on, ends with exit code 128 + 15; one that
    Ctrl-C stopped, with 128 + 2; one that has written everything, but whose output
    nobody reads any more, with 128 + 13.
    """

    def guarded(argv: list[str]) -> None:
        absl.logging.set_verbosity(absl.logging.WARNING)  # JAX tells which backends it did not find
        absl.logging.get_absl_handler().setFormatter(_Formatter("· %(message)s"))
        drop_plain_handlers()
        if len(argv) > 1:
            raise app.UsageError(
                f"unexpected argument {argv[1]!r}; flags are written --name=value."
            )
        try:
            _when_done.clear()
            with _printable_output(), hosts.together():
                main(argv)
            for work in _when_done:
                work()
        except Terminated as stop:
            say(str(stop))
            _leave(EXIT_TERMINATED)
        except KeyboardInterrupt:
            say("interrupted.")
            _leave(EXIT_INTERRUPTED)
        except (ValueError, OSError) as error:
            print(printable(f"error: {with_flags(sentence(error))}", lines=False), file=sys.stderr)
            if isinstance(error, hosts.LostProcessError):
                _leave(1)
            sys.exit(1)
        finally:
            release_folders()

    with lasting_streams():
        if asks_for_help(sys.argv[1:]):
            print_help(sys.modules[main.__module__].__doc__ or "")
            return
        end_with_parent()
        with lasting_interrupts():
            app.run(guarded, flags_parser=_parsed)


def _parsed(arguments: Sequence[str]) -> list[str]:
    """Sets the flags, and returns the other arguments. Ends with a sentence where a flag
    is unknown, or has a value that it cannot have.
    """
    try:
        return flags.FLAGS(arguments)
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, flags.FLAGS, n=2)
        hint = f" Did you mean {' or '.join(f'--{name}' for name in near)}?" if near else ""
        message = f"there is no flag --{error.flagname}.{hint} --help lists all flags."
    except flags.Error as error:
        message = sentence(error)
    print(printable(f"error: {message}", lines=False), file=sys.stderr)
    sys.exit(1)


def own_flags(module: str | None = None) -> JsonObject:
    """Returns the flags of the running experiment, or of a module, by name, as
    results.json records them.
    """
    skip = {
        "out",
        "overwrite",
        "coordinator",
        "num_processes",
        "process_id",
        "snapshot_every",
        "studies",
    }
    skip |= {*figure_flags.NAMES, "track"}
    given = {
        flag.name: flag.value
        for flag in flags.FLAGS.get_key_flags_for_module(module or sys.argv[0])
    }
    return {name: value for name, value in given.items() if name not in skip}
