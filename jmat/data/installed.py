"""Text that packages of Debian and its kin install: novels, glosses, sayings, licences,
and manual pages in many languages, as sentences.
"""

import dataclasses
import gzip
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator

from jmat.data.man_pages import man_paragraphs
from jmat.data.r_texts import string_vectors
from jmat.data.splitting import distinct

_MOST_BYTES = 1 << 28  # of one file, unpacked
_LANGUAGES = {"de": "German", "fr": "French", "es": "Spanish", "it": "Italian", "nl": "Dutch"}
_FEWEST, _MOST = 5, 60  # words of a sentence
_LETTERS = 0.75  # share of letters and spaces below which it is a table, or code
_BOUNDARY = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["')»”]))\s+(?=["'(«„“]?[^\W\d_a-zà-ÿ])""")
_EMPHASIS = re.compile(r"(?<!\w)_|_(?!\w)")  # as novels have it
_ENDS = (".", "!", "?", '."', '!"', '?"', ".)", "”", "»")


@dataclasses.dataclass(frozen=True)
class Text:
    """Says where a text is installed, and how it is read.

    Attributes:
      words: describes it.
      package: that installs it.
      files: patterns of its files below the root.
      paragraphs: returns the paragraphs of one file's content.
    """

    words: str
    package: str
    files: tuple[str, ...]
    paragraphs: Callable[[bytes], Iterator[str]]


def _man(content: bytes) -> Iterator[str]:
    return man_paragraphs(content.decode("utf-8", "replace"))


def _novels(content: bytes) -> Iterator[str]:
    for lines in string_vectors(content):
        yield from _blocks("\n".join(lines))


def _glosses(content: bytes) -> Iterator[str]:
    """Returns the definitions of WordNet, each as a sentence, without its examples."""
    for line in content.decode("utf-8", "replace").splitlines():
        _, bar, gloss = line.partition(" | ")
        if bar and not line.startswith(" "):
            meaning = gloss.partition('; "')[0].strip()
            yield f"{meaning[:1].upper()}{meaning[1:]}."


def _sayings(content: bytes) -> Iterator[str]:
    for saying in re.split(r"^%\n?", content.decode("utf-8", "replace"), flags=re.MULTILINE):
        yield re.split(r"\n\s*--", saying)[0]  # without its author


def _definitions(content: bytes) -> Iterator[str]:
    """Returns the paragraphs below the headwords of a dictionary of dictd."""
    for block in re.split(r"\n\s*\n", content.decode("utf-8", "replace")):
        lines = [line.strip() for line in block.splitlines() if line.startswith("   ")]
        text = re.sub(r"\[[^]]*\]|\{|\}|--[A-Z].*$", "", " ".join(lines))
        yield re.sub(r"^(?:\d+\. |\([^)]*\) )+", "", text)


def _blocks(text: str) -> Iterator[str]:
    yield from re.split(r"\n\s*\n", text)


def _plain(content: bytes) -> Iterator[str]:
    return _blocks(content.decode("utf-8", "replace"))


TEXTS: dict[str, Text] = {
    "novels": Text(
        "novels of Jane Austen",
        "r-cran-janeaustenr",
        ("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb",),
        _novels,
    ),
    "glosses": Text(
        "definitions of WordNet", "wordnet-base", ("usr/share/wordnet/data.*",), _glosses
    ),
    "dictionary": Text(
        "definitions of Webster's dictionary",
        "dict-gcide",
        ("usr/share/dictd/gcide.dict.dz",),
        _definitions,
    ),
    "fortunes": Text("sayings", "fortunes", ("usr/share/games/fortunes/*",), _sayings),
    "fortunes-de": Text(
        "German sayings", "fortunes-de", ("usr/share/games/fortunes/de/*",), _sayings
    ),
    "licences": Text("licences", "base-files", ("usr/share/common-licenses/*",), _plain),
    "manual": Text("manual pages", "manpages", ("usr/share/man/man*/*.gz",), _man),
}
TEXTS |= {
    f"manual-{code}": Text(
        f"{name} manual pages", f"manpages-{code}", (f"usr/share/man/{code}/man*/*.gz",), _man
    )
    for code, name in _LANGUAGES.items()
}


def installed_sentences(name: str, root: pathlib.Path) -> list[str]:
    """Returns the distinct sentences of a text, in the order of its files' names; none
    where it is not installed.

    A file that cannot be read is left out.

    Args:
      name: one of `TEXTS`.
      root: folder below which packages are installed, `/` or where one was unpacked.

    Raises:
      ValueError: a file holds something else than its package installs there.
    """
    text = TEXTS[name]
    paths = sorted({path for pattern in text.files for path in root.glob(pattern)})
    found: list[str] = []
    for path in paths:
        content = _content(path)
        if content is None:
            continue
        try:
            for paragraph in text.paragraphs(content):
                found += sentences(paragraph)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return distinct(found)


def _content(path: pathlib.Path) -> bytes | None:
    """Returns what a file holds, unpacked; None where it cannot be read, is a link to
    what another name holds, or an index of sayings.
    """
    if path.is_symlink() or not path.is_file() or path.suffix == ".dat":
        return None
    try:
        if path.suffix not in (".gz", ".dz"):
            return path.read_bytes()
        with gzip.open(path) as file:
            return file.read(_MOST_BYTES)
    except (OSError, EOFError, zlib.error):
        return None


def sentences(paragraph: str) -> list[str]:
    """Returns the sentences of a paragraph that begin with a capital, end with a stop,
    and are mostly letters.
    """
    text = " ".join(_EMPHASIS.sub("", paragraph).split())
    return [each for each in _BOUNDARY.split(text) if _is_prose(each)]


def _is_prose(sentence: str) -> bool:
    letters = sum(each.isalpha() or each == " " for each in sentence)
    first = sentence.lstrip("\"'(«„“")[:1]
    return (
        _FEWEST <= len(sentence.split()) <= _MOST
        and first.isupper()
        and sentence.endswith(_ENDS)
        and letters >= _LETTERS * len(sentence)
        and sentence.isprintable()
        and "\\" not in sentence
    )
