"""Turns panics of the Rust code in tokenizers into errors of one sentence."""

import contextlib
import os
import tempfile
from collections.abc import Iterator

from jmat.runtime.errors import in_one_line


@contextlib.contextmanager
def panics_as_errors(what: str) -> Iterator[None]:
    """Raises ValueError, which begins with `what`, where the tokenizers library raises
    or panics.

    A panic of compiled code is no Exception for Python; it becomes a TokenizerError.
    """
    with _no_report_of_panics():
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            fatal = _is_panic(error) or isinstance(error, TokenizerError)
            kind = TokenizerError if fatal else ValueError
            raise kind(f"{what}: {in_one_line(error)}") from None


def _is_panic(error: BaseException | None) -> bool:
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def _no_report_of_panics() -> Iterator[None]:
    """Holds back what is written to standard error while a panic ends in an exception:
    it is the panic's own report.
    """
    try:
        shown = os.dup(2)
    except OSError:  # there is no standard error
        yield
        return
    with tempfile.TemporaryFile() as report:
        os.dup2(report.fileno(), 2)
        panicked = False
        try:
            yield
        except ValueError as error:
            panicked = _is_panic(error.__context__)
            raise
        finally:
            os.dup2(shown, 2)
            os.close(shown)
            report.seek(0)
            if not panicked:
                os.write(2, report.read())


class TokenizerError(ValueError):
    """Reports a tokenizer that can read no text: its code gives up, or takes
    exponential time.
    """
