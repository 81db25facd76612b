"""Real text by name, streamed from the Hugging Face hub: Wikipedia, news, WikiText-103.
Needs the extra `hub`.

Every data set is pinned to a commit, and its files are read one by one as they are
needed: some thousand sentences cost some ten megabytes, not the whole of Wikipedia.
Sentences to fit on and to evaluate on come from different documents. The paper's news,
Leipzig 2020, is not there; its sentences, their numbers cut off, can be read as a text
file.
"""

import importlib.metadata
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jmat.data import Examples, load_examples, make_examples, save_examples
from jmat.data.encoding import Tokenizer
from jmat.data.examples import fingerprint
from jmat.data.hub_sources import SOURCES, Source
from jmat.runtime.annotations import Fields
from jmat.runtime.cache import cached
from jmat.runtime.digests import short_hash
from jmat.runtime.errors import first_line

OpenFile = Callable[[str], Iterable[Fields]]  # address of a file → its rows
SplitText = Callable[[str], list[str]]  # paragraph → sentences


LOADED = 100_000  # sentences, where a caller wants a corpus as a whole
_FILES = 8  # read in turn: the articles of one file are all of one age
_PER_DOCUMENT = 10  # sentences at most, so that no long article dominates
_WORDS, _LETTERS = 4, 1000  # a sentence has so many words at least, and so many characters at most


# --------------------------------------------------------------------------------------------------
# What the rest of jmat asks for


def hub_fit_eval(
    name: str,
    num_fit: int,
    num_eval: int,
    seed: int,
    *,
    open_file: OpenFile | None = None,
    split_text: SplitText | None = None,
) -> tuple[list[str], list[str]]:
    """Returns sentences to fit on, and others to evaluate on from the documents that
    follow; no sentence twice.

    Args:
      name: one of `SOURCES`.
      num_fit: how many to fit on.
      num_eval: how many to evaluate on.
      seed: draws the files, at most ten sentences of each document, and their order.
      open_file: reads a file; default: streams it with `datasets`.
      split_text: cuts a paragraph; default: `sentencex`.

    Raises:
      ValueError: unknown name, the extra is not installed, fewer sentences than asked
        for.
      ConnectionError: the hub cannot be read.
    """
    source = _source(name)
    open_file = open_file or stream(f"corpus {name}", columns=["text"])
    split_text = split_text or _sentencex(name)
    random, seen = np.random.default_rng(seed), set[str]()
    documents = _documents(name, source, random, open_file)
    parts = [_take(documents, count, seen, random, split_text) for count in (num_fit, num_eval)]
    for part, count, flag in zip(parts, (num_fit, num_eval), ("num_fit", "num_eval"), strict=True):
        if len(part) < count:
            raise ValueError(
                f"corpus {name} gave {len(part)} sentences for {flag}={count}: ask for fewer."
            )
    return parts[0], parts[1]


def hub_sentences(name: str) -> list[str]:
    """Returns `LOADED` sentences of a corpus, always the same; errors as for
    `hub_fit_eval`.
    """
    return hub_fit_eval(name, LOADED, 0, 0)[0]


def hub_examples(
    name: str,
    tokenizer: Tokenizer,
    *,
    num_fit: int,
    num_eval: int,
    seed: int,
    open_file: OpenFile | None = None,
    split_text: SplitText | None = None,
    **options: Any,
) -> Examples:
    """Returns examples from `hub_fit_eval` and `jmat.data.make_examples`, whose options
    it takes; later from jmat's cache.

    The file there, NAME-HASH-FINGERPRINT.npz, is named by everything that matters: the
    data set's commit, the rules and the library that cut it into sentences, the numbers
    and the seed, the tokenizer, and the options.
    """
    chosen = [num_fit, num_eval, seed, sorted(options.items())]
    key = [_source(name), chosen, _tokenizer_digest(tokenizer), _rules(name, split_text is None)]

    def make() -> Examples:
        fit, held_out = hub_fit_eval(
            name, num_fit, num_eval, seed, open_file=open_file, split_text=split_text
        )
        return make_examples(fit, held_out, tokenizer, seed=seed, **options)

    return cached(
        f"{name}-{short_hash(repr(key).encode())}",
        ".npz",
        make,
        load_examples,
        save_examples,
        fingerprint,
    )


# --------------------------------------------------------------------------------------------------
# Files → documents → sentences


def _documents(
    name: str, source: Source, random: np.random.Generator, open_file: OpenFile
) -> Iterator[str]:
    """Yields documents of some files, drawn at random, one from each in turn."""
    shards = random.permutation(source.shards)[:_FILES]
    streams = [
        _articles(_texts(name, source.address(int(shard)), open_file), source.row_is)
        for shard in shards
    ]
    for documents in itertools.zip_longest(*streams):
        yield from (document for document in documents if document is not None)


def _texts(name: str, address: str, open_file: OpenFile) -> Iterator[str]:
    advice = "offline, use --corpus=docs, a text file, or --examples prepared elsewhere"
    for row in rows(f"corpus {name}", address, open_file, advice):
        yield row["text"] or ""


def rows(what: str, address: str, open_file: OpenFile, advice: str) -> Iterator[Fields]:
    """Yields the rows of a file. Whatever goes wrong while it is read is the network's
    or the hub's: a ConnectionError.
    """
    try:
        yield from open_file(address)
    except Exception as error:
        raise ConnectionError(
            f"{what} cannot be read from {address} ({type(error).__name__}: {first_line(error)}). "
            f"It needs the network, and HF_HUB_OFFLINE unset; {advice}."
        ) from None


_TITLE = re.compile(r"= [^=].* =")  # of a WikiText article; its sections have "= = Title = ="


def _articles(rows: Iterator[str], row_is: str) -> Iterator[str]:
    if row_is == "document":
        yield from rows
        return
    # what precedes the first title is the end of an article in another file
    lines: list[str] | None = None
    for row in rows:
        line = row.strip()
        if _TITLE.fullmatch(line):
            if lines:
                yield "\n".join(lines)
            lines = []
        elif lines is not None and line:
            lines.append(_together(line))
    if lines:
        yield "\n".join(lines)


# WikiText's marks of joined numbers and words, and the spaces that its tokenizer put around
# punctuation.
_SPACED = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r" @([-,.])@ ", r"\1"),
        (r" ([.,;:!?%)\]])", r"\1"),
        (r"([(\[$£€]) ", r"\1"),
        (r" ('(?:s|t|re|ve|ll|d|m)\b)", r"\1"),
        (r'" ([^"]*?) ?"', r'"\1"'),
    ]
]


def _together(line: str) -> str:
    for pattern, replacement in _SPACED:
        line = pattern.sub(replacement, line)
    return line


def _take(
    documents: Iterator[str],
    count: int,
    seen: set[str],
    random: np.random.Generator,
    split_text: SplitText,
) -> list[str]:
    """Returns sentences that were not seen before, from as many documents as it takes,
    in random order.
    """
    taken: list[str] = []
    while len(taken) < count and (document := next(documents, None)) is not None:
        new = [s for s in _sentences(document, split_text) if s.casefold() not in seen]
        chosen = [new[i] for i in np.sort(random.permutation(len(new))[:_PER_DOCUMENT])]
        seen.update(sentence.casefold() for sentence in chosen)
        taken += chosen
    order = random.permutation(min(len(taken), count))
    return [taken[i] for i in order]


def _sentences(document: str, split_text: SplitText) -> list[str]:
    """Returns the whole sentences of a document, each once; headings, lists and scraps
    have no full stop and are left out.
    """
    pieces = itertools.chain.from_iterable(
        split_text(line) for line in document.split("\n") if line.strip()
    )
    return [
        s for s in dict.fromkeys(" ".join(piece.split()) for piece in pieces) if _is_sentence(s)
    ]


def _is_sentence(text: str) -> bool:
    ends = text.rstrip("\"'”’)]").endswith((".", "!", "?"))
    return ends and not text[0].islower() and len(text) <= _LETTERS and len(text.split()) >= _WORDS


# --------------------------------------------------------------------------------------------------
# The extra, and what the cache depends on


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise ValueError(f"corpus {name!r} is not on the list of the hub's: {', '.join(SOURCES)}.")
    return SOURCES[name]


def _needs_extra(what: str) -> ValueError:
    return ValueError(
        f"{what} comes from the Hugging Face hub and needs the extra `hub`: pip install "
        "'jmat[hub]'."
    )


def stream(what: str, columns: list[str] | None = None) -> OpenFile:
    """Reads files of the hub row by row; `what` is for the error where the extra is not
    installed.
    """
    try:
        import datasets
    except ImportError:
        raise _needs_extra(what) from None
    return lambda address: datasets.load_dataset(
        "parquet", data_files=address, split="train", streaming=True, columns=columns
    )


def _sentencex(name: str) -> SplitText:
    try:
        import sentencex
    except ImportError:
        raise _needs_extra(f"corpus {name}") from None
    return lambda paragraph: sentencex.segment("en", paragraph)


def _rules(name: str, by_sentencex: bool) -> str:
    """Returns a hash of the code that makes examples of documents, and of the version
    of the library that cuts them into sentences.
    """
    try:
        version = importlib.metadata.version("sentencex") if by_sentencex else ""
    except importlib.metadata.PackageNotFoundError:
        raise _needs_extra(f"corpus {name}") from None
    here = Path(__file__)
    files = (here, here.with_name("sampling.py"), here.with_name("encoding.py"))
    code = [file.read_text("utf-8") for file in files]
    return short_hash("\n".join([version, *code]).encode())


def _tokenizer_digest(tokenizer: Tokenizer) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)  # of a fast tokenizer
    if backend is None:
        return short_hash(
            repr([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]).encode()
        )
    state = json.loads(backend.to_str())
    # How the last text was cut and padded is part of its state, not of what it is.
    kept = {name: part for name, part in state.items() if name not in ("truncation", "padding")}
    return short_hash(json.dumps(kept).encode())
