"""Reads the tokenizer of a checkpoint as the checkpoint's own files describe it.

Where there is a tokenizer.json, it alone decides how text becomes tokens: normaliser,
pre-tokenizer, model, added and special tokens, decoder. Classes of transformers that
are named after a family build some of these anew, from defaults that other checkpoints
of the family do not have, so none of them is used for it. Likewise `add_bos_token` and
`add_eos_token` of tokenizer_config.json, which tokenizer.json contradicts in some
checkpoints, count only where there is no tokenizer.json, as in transformers. The names
of special tokens (which one is the mask, …) come from tokenizer_config.json and
special_tokens_map.json, and where these are silent from the family's class, if the
vocabulary has such a token.

Without tokenizer.json, transformers' class of the family reads vocab.txt, vocab.json
with merges.txt, or a SentencePiece file, whatever its name is, for which the package
`sentencepiece` has to be installed. LLaMA, Mistral and Gemma then have BOS in front of
every text unless tokenizer_config.json says `"add_bos_token": false`.
"""

import contextlib
import functools
import importlib.util
import inspect
import json
import logging
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from jmat.checkpoint.gguf_files import find_gguf, holds_tokenizer
from jmat.data.encoding import Tokenizer, encode, special_id, special_tokens
from jmat.data.panics import TokenizerError, panics_as_errors
from jmat.models.config import ModelConfig
from jmat.runtime.annotations import JsonObject
from jmat.runtime.errors import readable_errors
from jmat.runtime.json_files import read_json_object
from jmat.runtime.transformers_package import transformers_package

# Glob patterns of all files that a tokenizer may consist of.
TOKENIZER_FILES = (
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
    ),
    *(
        "merges.txt",
        "vocab.txt",
        "*.model",
        "*.spm",
        "*.tiktoken",
        "tekken.json",
        "chat_template.jinja",
    ),
)
_NAMED = (
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "spm.model",
    "*.model",
    "*.spm",
    "*.tiktoken",
)
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
_BOS_BY_DEFAULT = ("llama", "mistral", "gemma")  # model types
_TRIED = "The first of 3 words, naïve: 数!"  # every tokenizer is tried on it when it is loaded
_MOST_BYTES = 1 << 27  # of a tokenizer's files; that of Gemma 3, with 262,144 tokens, has 33 MB
_LONG = 1 << 20  # tokens: more than the text above can have


@readable_errors()
def load_tokenizer(folder: pathlib.Path) -> Tokenizer | None:
    """Returns the tokenizer of a folder or GGUF file, one of transformers; None if
    there are no tokenizer files.

    The tokenizer of a GGUF file lies beside it, or in it.

    Raises:
      ValueError: the tokenizer is damaged or incomplete, fails on a plain text, or
        needs a package that is not installed.
    """
    gguf = find_gguf(folder)
    folder = folder if gguf is None else gguf.parent
    says = f"the tokenizer in {folder} does not load"
    _check_sizes(folder, says)
    if (folder / "tokenizer.json").is_file():
        read = _from_tokenizer_json
    elif any(_present(folder, *names) for names in (("vocab.txt",), ("vocab.json", "merges.txt"))):
        read = _from_vocabulary
    elif _model_file(folder) is not None:
        read = _from_model_file
    elif any(_present(folder, name) for name in ("vocab.json", "merges.txt", "tekken.json")):
        read = _by_class if _present(folder, "tekken.json") else _half
    elif gguf is not None and holds_tokenizer(gguf):
        read = functools.partial(_by_class, gguf_file=gguf.name)
    else:
        return None
    with panics_as_errors(says):
        tokenizer = read(folder)
        _without_dropout(tokenizer, folder)
        try:
            encode([_TRIED], tokenizer, _LONG, special_tokens(tokenizer, masked=True))
        except TokenizerError:
            raise
        except ValueError:
            pass  # a small vocabulary may lack these letters and have no token for unknown ones
    return tokenizer


def _check_sizes(folder: pathlib.Path, says: str) -> None:
    """Raises ValueError for a file that is larger than any tokenizer's: reading it
    would take the machine's memory.
    """
    for path in (path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        size = path.stat().st_size if path.is_file() else 0
        if size > _MOST_BYTES:
            raise ValueError(
                f"{says}: {path.name} has {size} bytes, and no tokenizer needs more than "
                f"{_MOST_BYTES}."
            )


def _without_dropout(tokenizer: Tokenizer, folder: pathlib.Path) -> None:
    """Turns off the random omission of merges, which is for training: a text always
    becomes the same tokens.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and getattr(backend.model, "dropout", None):
        logging.getLogger(__name__).warning(
            "the tokenizer in %s leaves out %g of its merges at random (dropout), as is done in "
            "training: here all are made, so that a text always becomes the same tokens.",
            folder,
            backend.model.dropout,
        )
        backend.model.dropout = None


def check_tokenizer(tokenizer: Tokenizer | None, config: ModelConfig, name: str) -> None:
    """Raises ValueError for a tokenizer with ids that the model does not have.

    Args:
      tokenizer: one of transformers, or None.
      config: of the model, whose embedding may have more rows than there are tokens.
      name: of the model, for the error.
    """
    if tokenizer is None:
        return
    # Tokens that were added later may lie beyond the embedding: no text has them unless it spells
    # them out.
    added, vocabulary = (
        getattr(tokenizer, "added_tokens_decoder", {}),
        tokenizer.get_vocab().values(),
    )
    before, after = special_tokens(tokenizer, masked=not config.causal)
    mask_token = special_id(tokenizer, "mask")
    mask = [] if config.causal or mask_token is None else [mask_token]
    largest = max(
        *before, *after, *mask, *(token for token in vocabulary if token not in added), 0, 0
    )
    if largest >= config.vocab_size:
        raise ValueError(
            f"the tokenizer of {name} has ids up to {largest}, but the model's embedding has "
            f"{config.vocab_size} rows: it is the tokenizer of another model; put the model's own "
            "beside its weights."
        )


def _from_tokenizer_json(folder: pathlib.Path) -> Tokenizer:
    transformers = transformers_package()  # before any part of it is imported
    try:
        names: dict[str, Any] = _names_by_class(folder)
        return transformers.PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True, **names
        )
    except Exception:
        # says better than the package that it is no JSON object
        _config(folder / "tokenizer.json", _MOST_BYTES)
        raise


def _names_by_class(folder: pathlib.Path) -> dict[str, str]:
    """Returns default special tokens of the family's class that no file names and that
    the vocabulary holds.
    """
    from transformers.models.auto import tokenization_auto

    given, config = _config(folder / "tokenizer_config.json"), _config(folder / "config.json")
    mapped = _config(folder / "special_tokens_map.json")
    named = given.get("tokenizer_class") or config.get("tokenizer_class")
    named = named or tokenization_auto.TOKENIZER_MAPPING_NAMES.get(str(config.get("model_type")))
    family = (
        tokenization_auto.tokenizer_class_from_name(named.removesuffix("Fast")) if named else None
    )
    if family is None:
        return {}
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(family.__init__).parameters.items()
        if name.endswith("_token") and isinstance(parameter.default, str)
    }
    defaults = {
        name: token for name, token in defaults.items() if name not in given and name not in mapped
    }
    if not defaults:
        return {}
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    vocabulary = content["model"]["vocab"]
    tokens = {token["content"] for token in content.get("added_tokens") or ()}
    tokens |= (
        set(vocabulary) if isinstance(vocabulary, dict) else {token for token, _ in vocabulary}
    )
    return {name: token for name, token in defaults.items() if token in tokens}


def _present(folder: pathlib.Path, *names: str) -> bool:
    return all((folder / name).is_file() for name in names)


def _half(folder: pathlib.Path) -> Tokenizer:
    present, missing = (
        ("vocab.json", "merges.txt")
        if _present(folder, "vocab.json")
        else ("merges.txt", "vocab.json")
    )
    raise ValueError(
        f"there is {present}, but no {missing} beside it; download the tokenizer again."
    )


def _from_vocabulary(folder: pathlib.Path) -> Tokenizer:
    """Reads vocab.txt, or vocab.json with merges.txt, by the class of the family."""
    tokenizer = _by_class(folder)
    file = folder / ("vocab.json" if _present(folder, "vocab.json", "merges.txt") else "vocab.txt")
    content = file.read_text("utf-8")
    tokens = json.loads(content) if file.suffix == ".json" else map(str.strip, content.split("\n"))
    if getattr(tokenizer, "vocab_size", 0) < len(set(tokens) - {""}):
        raise ValueError(
            f"{type(tokenizer).__name__}, the class of this family, does not "
            f"read {file.name}; say which does in "
            'tokenizer_config.json, such as {"tokenizer_class": "BertTokenizer"}.'
        )
    return tokenizer


def _from_model_file(folder: pathlib.Path) -> Tokenizer:
    """Reads a SentencePiece file under any name, or a tiktoken file, by the class of
    the family.
    """
    file = _model_file(folder)
    assert file is not None
    with file.open("rb") as opened:
        package = "tiktoken" if _TIKTOKEN_LINE.match(opened.read(200)) else "sentencepiece"
    if importlib.util.find_spec(package) is None:
        kind = {"sentencepiece": "SentencePiece"}.get(package, package)
        raise ValueError(
            f"{file.name} is a {kind} file, which needs the package {package}: pip install "
            f"{package}."
        )
    options = {}
    if package == "sentencepiece":
        import sentencepiece

        try:
            sentencepiece.SentencePieceProcessor(model_file=str(file))
        except (RuntimeError, OSError):
            raise ValueError(
                f"{file.name} is not a SentencePiece file; download it again."
            ) from None
        if _config(folder / "config.json").get("model_type") in _BOS_BY_DEFAULT:
            options["add_bos_token"] = _config(folder / "tokenizer_config.json").get(
                "add_bos_token", True
            )
    with _named_model(file) as path:
        return _by_class(folder, vocab_file=str(path), **options)


def _model_file(folder: pathlib.Path) -> pathlib.Path | None:
    return next(
        (path for name in _NAMED for path in sorted(folder.glob(name)) if path.is_file()), None
    )


@contextlib.contextmanager
def _named_model(file: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a path to the file that ends with .model, by which transformers recognises
    it.
    """
    if file.suffix == ".model":
        yield file
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield pathlib.Path(shutil.copyfile(file, pathlib.Path(temporary) / f"{file.stem}.model"))


def _by_class(folder: pathlib.Path, **options: str) -> Tokenizer:
    auto = transformers_package().AutoTokenizer
    return auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)


def _config(path: pathlib.Path, most_bytes: int = 1 << 24) -> JsonObject:
    """Returns the object that a JSON file holds, by default of at most 16 MiB; empty if
    there is no such file.
    """
    if not path.is_file():
        return {}
    try:
        return read_json_object(path, most_bytes=most_bytes)
    except ValueError as error:
        raise ValueError(f"{path.name} {error}") from None
