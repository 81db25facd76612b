"""Makes examples of labelled texts, and labels of tokens."""

import pathlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Shaped
from numpy import ndarray

from jmat.data.encoding import NamesTokens, Tokenizer, encode, special_tokens, token_name
from jmat.data.examples import Examples, Split
from jmat.data.json_lines import read_json_lines
from jmat.runtime.annotations import Fields


def read_labelled(path: str | pathlib.Path) -> tuple[list[str], list[str]]:
    """Reads texts and their labels from JSON lines, `{"text": …, "label": …}` each.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is something else, or there are fewer than two labels.
    """
    texts, labels = zip(
        *read_json_lines(path, _labelled, '{"text": "…", "label": "…"}'), strict=True
    )
    if len(set(labels)) < 2:
        raise ValueError(
            f"{path} has the labels {sorted(set(labels))}; a classifier needs two at least."
        )
    return list(texts), list(labels)


def _labelled(fields: Fields) -> tuple[str, str]:
    text, label = fields["text"], fields["label"]
    if not isinstance(text, str) or not text.strip() or not isinstance(label, str | int):
        raise ValueError(
            "the text should be a text, not empty, and the label a text or a whole number"
        )
    return text, str(label)


def labelled_examples(
    texts: Sequence[str],
    labels: Sequence[str],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    masked: bool,
    seed: int,
) -> tuple[Examples, dict[str, Shaped[ndarray, " N"]]]:
    """Returns three quarters of the texts to fit on, the rest to evaluate on, drawn by
    the seed; and their labels.

    A causal model is read at the last token of a text, a masked one at its first,
    [CLS].

    Raises:
      ValueError: too few texts; a masked model whose tokenizer puts no token in front
        of a text.
    """
    special = special_tokens(tokenizer, masked=masked)
    if masked and not special.before:
        raise ValueError(
            "a masked model is probed at [CLS], and its tokenizer puts no token in front of a "
            "text: it needs a tokenizer.json with a post_processor, or a tokenizer_config.json "
            "that names the class of its tokenizer."
        )
    order = np.random.default_rng(seed).permutation(len(texts))
    cut = 3 * len(texts) // 4
    splits: dict[str, Split] = {}
    kept: dict[str, Shaped[ndarray, " N"]] = {}
    for name, chosen in (("fit", order[:cut]), ("eval", order[cut:])):
        pieces = encode([texts[i] for i in chosen], tokenizer, max_length, special)
        tokens = [piece for piece in pieces if piece is not None]
        if not tokens:
            raise ValueError(
                f"{len(texts)} labelled texts leave none to {name}; give more of them."
            )
        lengths = np.asarray([len(t) for t in tokens], np.int32)
        positions = np.zeros_like(lengths) if masked else lengths - 1
        splits[name] = Split(tokens=np.concatenate(tokens), lengths=lengths, positions=positions)
        kept[name] = np.asarray(
            [labels[i] for i, piece in zip(chosen, pieces, strict=True) if piece is not None]
        )
    return Examples(**splits), kept


def token_classes(tokens: Int[ndarray, " N"], tokenizer: NamesTokens) -> Shaped[ndarray, " N"]:
    """Returns a coarse class of each token, −1 being the end of a text: end, number,
    punctuation, word, or piece of one.
    """
    names = {token: _token_class(token, tokenizer) for token in np.unique(tokens).tolist()}
    return np.asarray([names[token] for token in tokens.tolist()])


def _token_class(token: int, tokenizer: NamesTokens) -> str:
    if token < 0:
        return "end"
    piece = token_name(token, tokenizer) or ""
    text = tokenizer.convert_tokens_to_string([piece]).strip().removeprefix("##")
    if not any(c.isalnum() for c in text):
        return "punctuation"
    if text[0].isdigit():
        return "number"
    # Byte-level BPE and SentencePiece mark a beginning, WordPiece what goes on.
    marks_beginnings = piece.startswith(("Ġ", "▁"))
    goes_on = piece.startswith("##") if "##" in _prefixes(tokenizer) else not marks_beginnings
    return "piece" if goes_on else "word"


def _prefixes(tokenizer: object) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return str(getattr(getattr(backend, "model", None), "continuing_subword_prefix", "") or "")
