"""Makes messages of errors readable: in one line, not too long, without control
characters.
"""

import contextlib
import re
from collections.abc import Iterator

# Control characters, all but tabs and new lines; those that reorder text; halves of characters,
# which no terminal can show.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class NothingToDrawError(ValueError):
    """Reports results that hold no value that a figure shows."""


def first_line(error: Exception) -> str:
    """Returns the first line of the message, or the kind of error where there is none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def in_one_line(error: BaseException) -> str:
    """Returns the message in one line of at most 300 characters, or the kind of error
    where there is none.
    """
    missing = " is missing" if isinstance(error, KeyError) else ""
    return " ".join(str(error).split())[:300] + missing or type(error).__name__


def shortened(value: object, most: int = 120) -> str:
    """Returns `repr(value)`, cut after `most` characters, since a value of a file may
    be of any length.
    """
    return _beginning(repr(value), most)


def shortened_name(name: str, most: int = 60) -> str:
    """Returns a name out of a file, control characters written out, cut after `most`
    characters.
    """
    return _beginning(printable(name, lines=False), most)


def _beginning(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def sentence(error: Exception) -> str:
    """Returns the message of an error, without the number that the operating system has
    for it.
    """
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return (
        error.strerror
        if error.filename is None
        else f"{shortened(error.filename)}: {error.strerror}."
    )


def printable(text: str, *, lines: bool = True) -> str:
    r"""Writes out control characters, `\x1b` for one, so that a name out of a file
    cannot command a terminal.

    `lines`: whether new lines and tabs stay.
    """
    text = _OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
    return text if lines else text.replace("\n", r"\n").replace("\t", r"\t")


@contextlib.contextmanager
def readable_errors() -> Iterator[None]:
    """Writes out control characters in messages of ValueError and OSError, and cuts
    long messages.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        error.args = tuple(
            _cut(printable(part, lines=False)) if isinstance(part, str) else part
            for part in error.args
        )
        raise


def _cut(message: str) -> str:
    """Returns the beginning and the end of a message of more than 3,000 characters;
    else all of it.
    """
    most = 3000
    return message if len(message) <= most else f"{message[: most - 200]} … {message[-190:]}"
