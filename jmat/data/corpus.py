"""Text → sentences: the offline corpus ``docs``, text files, and draws from them.

``docs`` is English that every jmat installation already holds: the docstrings of the
Python standard library and of jmat's dependencies, read with ``ast`` (nothing is
imported) and cleaned until only sentences for people remain.
"""

import ast
import contextlib
import functools
import gc
import importlib.metadata
import logging
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jmat.data import docstrings, hub_corpora
from jmat.data.splitting import digest, distinct, divide, draw, split
from jmat.runtime.cache import cached
from jmat.runtime.digests import short_hash
from jmat.runtime.files import save_atomically, text_lines
from jmat.runtime.names import known_name
from jmat.runtime.progress import track

# --------------------------------------------------------------------------------------------------
# The installed packages → docstrings

# Where jmat runs from a source tree that was never installed, there is no metadata to ask.
_DIRECT_DEPENDENCIES = (
    "absl-py flax jax jaxtyping matplotlib numpy optax orbax-checkpoint packaging rich safetensors "
    "tokenizers transformers".split()
)
# Tests, generated code, and copies of what stands elsewhere: the model folders of transformers, as
# long as everything else together, copy one another.
_SKIPPED = re.compile(
    r"(?:.*/)?(?:(?:tests?|testing|_vendor|idlelib|lib2to3|turtledemo|distutils|pydoc_data"
    r"|encodings|pygments/lexers|pydantic/v1|transformers/models)/.*"
    r"|conftest\.py|(?:[^/]*_)?test(?:s|ing)?(?:_[^/]*)?\.py|[^/]*_(?:pb2|gen)\.py)"
)


def _dependencies() -> dict[str, importlib.metadata.Distribution]:
    """Returns the installed distributions that jmat needs, directly or not, without
    extras, by canonical name.
    """
    try:
        queue = _requirements(importlib.metadata.distribution("jmat"))
    except importlib.metadata.PackageNotFoundError:
        queue = list(_DIRECT_DEPENDENCIES)
    found: dict[str, importlib.metadata.Distribution] = {}
    while queue:
        name = canonicalize_name(queue.pop())
        if name not in found:
            # not installed: not read
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.distribution(name)
                queue += _requirements(found[name])
    return found


def _requirements(distribution: importlib.metadata.Distribution) -> list[str]:
    needed = map(Requirement, distribution.requires or ())
    return [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]


def _python_files(distributions: Iterable[importlib.metadata.Distribution]) -> list[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    packages = [
        folder
        for folder in library.iterdir()
        if folder.name not in {"site-packages", "dist-packages"}
    ]
    modules = [
        *library.glob("*.py"),
        *(path for folder in packages for path in folder.rglob("*.py")),
    ]
    files = [(path.relative_to(library), path) for path in modules]
    for distribution in distributions:
        files += [
            (Path(f), Path(str(f.locate()))) for f in distribution.files or () if f.suffix == ".py"
        ]
    return [path for relative, path in files if not _SKIPPED.fullmatch(relative.as_posix())]


def _docstrings(path: Path) -> Iterator[str]:
    """Returns the docstrings of a module, its classes and functions; none where the
    file cannot be read or parsed.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    queue: list[ast.AST] = [tree]
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
        # statements only: no expression has a docstring
        for field in ("body", "orelse", "handlers", "finalbody"):
            statements = getattr(node, field, None)
            queue += statements if isinstance(statements, list) else []


# --------------------------------------------------------------------------------------------------
# The corpora


def docs_sentences() -> list[str]:
    """Returns the corpus ``docs``: about 70,000 distinct English sentences, ordered by
    their hash.

    Found once in half a minute, then kept in a text file in
    ``$JMAT_CACHE``, else ``$XDG_CACHE_HOME/jmat``, else ``~/.cache/jmat``, named by a
    hash of every version and rule that matters, and by one of its content: a damaged
    file is made anew. It is no error if the folder cannot be written.
    """
    packages = _dependencies()
    versions = [
        platform.python_version(),
        *sorted(f"{name} {d.version}" for name, d in packages.items()),
    ]
    rules = [Path(file).read_text("utf-8") for file in (__file__, docstrings.__file__)]
    name = short_hash("\n".join([*versions, *rules]).encode())

    def save(path: Path, sentences: list[str]) -> None:
        save_atomically(
            path, lambda temporary: temporary.write_text("\n".join(sentences) + "\n", "utf-8")
        )

    make = functools.partial(_read_docstrings, packages.values())
    return cached(f"docs-{name}", ".txt", make, text_sentences, save, sentences_fingerprint)


def _read_docstrings(packages: Iterable[importlib.metadata.Distribution]) -> list[str]:
    """Returns the distinct sentences of all docstrings of the standard library and of
    packages, ordered by their hash.
    """
    seen: set[str] = set()
    found: set[str] = set()
    with _no_garbage_collection(), warnings.catch_warnings():
        # of the compiler on other people's code, such as invalid escapes
        warnings.simplefilter("ignore")
        for path in track(_python_files(packages), "reading docstrings, this once"):
            new = set(_docstrings(path)) - seen
            seen |= new
            found.update(sentence for text in new for sentence in docstrings.sentences(text))
    return distinct(sorted(found, key=digest))


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Turns off the search for cycles, of which syntax trees have none, and which takes
    as long as parsing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def text_sentences(path: str | os.PathLike[str]) -> list[str]:
    """Returns the lines of a text file, one sentence or paragraph each, without the
    blank ones.

    Raises what `text_lines` does, and ValueError for a file without text.
    """
    sentences = [line for line in text_lines(path) if line]
    if not sentences:
        raise ValueError(f"{path} holds no text; expected one sentence or paragraph a line.")
    return sentences


# those that are read here; others are the hub's
NAMED: dict[str, Callable[[], list[str]]] = {"docs": docs_sentences}


def named_corpus(name_or_path: str | os.PathLike[str]) -> str | None:
    """Returns the name of a corpus that jmat knows, without the prefix `jmat:`; None
    for a text file.

    Raises ValueError where the name is empty, or also that of a file here: `./docs` is
    the file, `jmat:docs` the corpus.
    """
    return known_name(name_or_path, [*NAMED, *hub_corpora.SOURCES], Path.is_file, kind="corpus")


def load_corpus(name_or_path: str | os.PathLike[str]) -> list[str]:
    """Returns the sentences of a named corpus or of a text file.

    Raises:
      FileNotFoundError, ValueError: neither a name nor a readable text file
        (`text_sentences`).
    """
    named = named_corpus(name_or_path)
    if named in NAMED:
        sentences = NAMED[named]()
        if named == "docs":
            _compare_with_readme(sentences_fingerprint(sentences))
        return sentences
    if named is not None:
        return hub_corpora.hub_sentences(named)
    name = os.fspath(name_or_path)
    if not Path(name).exists():
        names = ", ".join([*NAMED, *hub_corpora.SOURCES])
        raise FileNotFoundError(
            f"corpus {name!r} is neither a name ({names}) nor a text file that exists;"
            " a text file holds one sentence or paragraph a line."
        )
    return text_sentences(name)


# Fingerprint of the corpus `docs` that README's figures are of: Python 3.11.7 and
# requirements.lock.
README_DOCS = "8ccf6563fad1f1c1"

# --------------------------------------------------------------------------------------------------
# Train, fit, eval


def sentences_fingerprint(sentences: Iterable[str]) -> str:
    """Returns 16 hex digits of SHA-256 over all sentences, in their order."""
    return short_hash(*(sentence.encode() + b"\0" for sentence in sentences))


def _compare_with_readme(fingerprint: str) -> None:
    """Logs one line where `docs` holds another text than the one that README's figures
    are of.
    """
    if fingerprint != README_DOCS:
        logging.getLogger(__name__).warning(
            "the corpus docs here (%s) is not the text of README's figures (%s), since versions of "
            "Python or of packages differ: expect other digits. requirements.lock has README's "
            "versions.",
            fingerprint,
            README_DOCS,
        )


def fit_eval(
    name_or_path: str | os.PathLike[str], num_fit: int | None, num_eval: int | None, seed: int
) -> tuple[list[str], list[str]]:
    """Draws sentences to fit on and others to evaluate on from two parts that never
    overlap.

    For a named corpus these are
    ``fit`` and ``eval`` of `split`: the bundled models have read its ``train`` part.
    The text of a user is divided by the same hash, in proportion to the numbers asked
    for, each distinct sentence once. Of a data set on the hub (`jmat.data.hub_corpora`)
    the two come from different documents.

    Args:
      name_or_path: a named corpus, or a text file.
      num_fit: sentences to fit on; None: all that `num_eval` leaves.
      num_eval: sentences to evaluate on; None: all that `num_fit` leaves, or, if that
        is None, too, a quarter of a user's text.
      seed: draws them.

    Raises:
      FileNotFoundError, ValueError, ConnectionError: as `load_corpus`; or there are
        fewer sentences than asked for.
    """
    if (num_fit is not None and num_fit < 1) or (num_eval is not None and num_eval < 1):
        raise ValueError(f"num_fit={num_fit} and num_eval={num_eval}: both must be at least 1.")
    named, name = named_corpus(name_or_path), os.fspath(name_or_path)
    if named in hub_corpora.SOURCES:
        if num_fit is None or num_eval is None:
            raise ValueError(
                f"{named} is drawn from a data set on the hub: give num_fit and num_eval."
            )
        return hub_corpora.hub_fit_eval(named, num_fit, num_eval, seed)
    sentences = distinct(load_corpus(name_or_path))
    if named in NAMED:
        parts = split(sentences)
        fit, held_out = parts["fit"], parts["eval"]
    else:
        fit, held_out = divide(sentences, *_shares(len(sentences), num_fit, num_eval))
    num_fit, num_eval = num_fit or max(len(fit), 1), num_eval or max(len(held_out), 1)
    if len(fit) < num_fit or len(held_out) < num_eval:
        enough = (
            f"use --num_fit={min(num_fit, len(fit))} --num_eval={min(num_eval, len(held_out))}, or "
            "more text"
        )
        advice = enough if fit and held_out else "give more text"
        rest = ", since bundled models were trained on the others" if named in NAMED else ""
        raise ValueError(
            f"corpus {name} has {len(sentences)} distinct sentences (digits, case and punctuation "
            f"aside): {len(fit)} to fit on and {len(held_out)} to evaluate on{rest}, but "
            f"num_fit={num_fit} and num_eval={num_eval} were asked for; {advice}."
        )
    return draw(fit, num_fit, seed), draw(held_out, num_eval, seed)


def _shares(count: int, num_fit: int | None, num_eval: int | None) -> tuple[int, int]:
    """Returns in which proportion a text of so many sentences is divided; None: all
    that the other leaves.
    """
    if num_fit is None and num_eval is None:
        return 3, 1
    if num_eval is None:
        return num_fit or 1, max(count - (num_fit or 1), 1)
    return max(count - num_eval, 1) if num_fit is None else num_fit, num_eval
