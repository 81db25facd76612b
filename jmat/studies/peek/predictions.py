"""Reads what every layer already predicts at every position of a sentence: the top
tokens, read by several kinds of maps.

A `Peek` is plain data, as JSON has it. Letters: T tokens of a sentence, N positions of
all sentences, K top tokens.
"""

from collections.abc import Mapping, Sequence
from typing import NotRequired, TypedDict

import numpy as np
import rich.box
import rich.console
import rich.table
import rich.text
from jaxtyping import Float, Int
from numpy import ndarray

from jmat.data import Split
from jmat.data.encoding import (
    KnowsSpecialTokens,
    Tokenizer,
    encode,
    special_id,
    special_tokens,
)
from jmat.models.config import ModelConfig
from jmat.models.family import Transformer
from jmat.models.sites import Site
from jmat.report.notes import OVERFLOWS, with_note
from jmat.report.rows import Row
from jmat.studies.peek.measures import MEASURES, Reading, read_layers
from jmat.studies.peek.token_texts import TokenTexts, Top, rounded, visible

_LONG = 10_000  # tokens of a sentence that are counted, for the error


class Sentence(TypedDict):
    """Holds a sentence and what is predicted there: map → layer (in the order of the
    `Peek`) → position → top tokens; and likewise map → measure → layer → position →
    value (`jmat.studies.peek.measures`), None where it is not finite.
    """

    text: str
    tokens: list[str]
    # the position that a table in a terminal shows: the mask if the text has one, else the last
    # word
    shown: int
    predictions: dict[str, list[list[Top]]]
    measures: NotRequired[dict[str, dict[str, list[list[float | None]]]]]


class Peek(TypedDict):
    """Holds predictions of one model. The last of `layers` is `blocks`, where every map
    reads the full model's prediction.
    """

    model: str
    # `next`: the token after each position; `masked`: the token at each position while it is masked
    task: str
    blocks: int
    layers: list[int]
    sentences: list[Sentence]


# --------------------------------------------------------------------------------------------------
# Sentences → predictions


def all_positions(
    sentences: Sequence[str], tokenizer: Tokenizer, *, max_length: int, masked: bool
) -> Split:
    """Returns every position of every sentence as an example, those of special tokens
    included.

    Raises:
      ValueError: a sentence without tokens, or longer than the model's positions.
    """
    lists = []
    special = special_tokens(tokenizer, masked=masked)
    for text in sentences:
        (tokens,) = encode([text], tokenizer, max(max_length, _LONG), special)
        if tokens is None or len(tokens) > max_length:
            size = (
                "no"
                if tokens is None
                else f"{_LONG} or more"
                if len(tokens) >= _LONG
                else len(tokens)
            )
            raise ValueError(
                f"the sentence {text[:60]!r} has {size} tokens; expected 1 to {max_length}."
            )
        lists.append(tokens)
    if not lists:
        raise ValueError("there is no sentence; give at least one.")
    lengths = np.array([len(tokens) for tokens in lists], np.int32)
    return Split(
        tokens=np.concatenate(lists),
        lengths=lengths,
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        rows=np.repeat(np.arange(len(lists), dtype=np.int32), lengths),
    )


def check_top(top: int, config: ModelConfig) -> None:
    """Raises ValueError for more tokens than the vocabulary has."""
    if not 1 <= top <= config.vocab_size:
        raise ValueError(
            f"top={top}: expected 1 to {config.vocab_size}, the size of the vocabulary."
        )


def peek(
    model: Transformer,
    tokenizer: Tokenizer,
    sentences: Sequence[str],
    split: Split,
    streams: Sequence[Float[ndarray, "N D"]],
    shortcuts: Mapping[str, Mapping[int, Site]],
    *,
    name: str,
    top: int = 5,
) -> Peek:
    """Reads the streams of `all_positions` through maps to the final stream.

    Args:
      model: its final norm and head read out predictions.
      tokenizer: names the tokens.
      sentences: the texts, for show.
      split: their tokens, from `all_positions`.
      streams: h_0 .. h_L there.
      shortcuts: map's name → layer → map; all have the same layers, the last of which
        is L, which is read as it is.
      name: of the model.
      top: how many tokens to name, K.

    Raises:
      ValueError: the vocabulary is smaller than `top`.
    """
    check_top(top, model.config)
    texts = TokenTexts(tokenizer)
    layers = sorted(next(iter(shortcuts.values())))
    by_kind = read_layers(model, shortcuts, streams, top)
    readings = {kind: [by_kind[kind][layer] for layer in layers] for kind in shortcuts}

    def named(kind: str, positions: ndarray) -> list[list[Top]]:
        return [
            [texts.top(reading.ids[n], reading.probabilities[n]) for n in positions]
            for reading in readings[kind]
        ]

    found: list[Sentence] = []
    for row, text in enumerate(sentences):
        tokens = split.tokens[split.starts[row] : split.starts[row] + split.lengths[row]]
        positions = np.flatnonzero(split.rows == row)
        predictions = {kind: named(kind, positions) for kind in shortcuts}
        shown = _shown(tokens, tokenizer)
        found.append(
            {
                "text": text,
                "tokens": [*map(texts, tokens.tolist())],
                "shown": shown,
                "predictions": predictions,
                "measures": {
                    kind: _values(by_layer, positions) for kind, by_layer in readings.items()
                },
            }
        )
    task = "next" if model.config.causal else "masked"
    return {
        "model": name,
        "task": task,
        "blocks": model.config.layers,
        "layers": layers,
        "sentences": found,
    }


def _values(by_layer: Sequence[Reading], positions: ndarray) -> dict[str, list[list[float | None]]]:
    """Returns measures at some positions, to four digits."""
    return {
        name: [
            [rounded(value, 4) for value in reading.measures[name][positions].tolist()]
            for reading in by_layer
        ]
        for name in MEASURES
    }


def agrees(top: Top, full: Top) -> bool | None:
    """Returns whether the most probable token is the full model's; None where one of
    the two is no prediction.
    """
    if top[0][1] is None or full[0][1] is None:
        return None
    return top[0][0] == full[0][0]


def _shown(tokens: Int[ndarray, " T"], tokenizer: KnowsSpecialTokens) -> int:
    mask = special_id(tokenizer, "mask")
    masks = np.flatnonzero(tokens == (-1 if mask is None else mask))
    words = np.flatnonzero(~np.isin(tokens, tokenizer.all_special_ids))
    return int(masks[0] if len(masks) else words[-1] if len(words) else len(tokens) - 1)


# --------------------------------------------------------------------------------------------------
# Results


def peek_rows(peek: Peek) -> list[Row]:
    """Returns rows of results.json, one for each sentence, position, map and layer.

    `top_1`, `top_2`, … are the most probable tokens and `probability_1`, … their
    probabilities; `full` is the full model's top token. The metric is `precision@1` of
    this one prediction: whether `top_1` is `full`; None, with a note, where
    one of them is no prediction.
    """
    rows: list[Row] = []
    for number, sentence in enumerate(peek["sentences"]):
        for kind, by_layer in sentence["predictions"].items():
            for layer, by_position in zip(peek["layers"], by_layer, strict=True):
                for position, top in enumerate(by_position):
                    full = by_layer[-1][position]
                    same = agrees(top, full)
                    row = {
                        "sentence": number,
                        "position": position,
                        "token": sentence["tokens"][position],
                    }
                    row |= {"map": kind, "layer": layer, "target": peek["blocks"]}
                    value = None if same is None else float(same)
                    row |= {"metric": "precision@1", "value": value, "n": 1}
                    row |= {"full": full[0][0]}
                    for rank, (token, probability) in enumerate(top, 1):
                        row |= {f"top_{rank}": token, f"probability_{rank}": probability}
                    rows.append(with_note(row, OVERFLOWS if same is None else None))
    return rows


def format_peek(peek: Peek, number: int, *, width: int = 100) -> str:
    """Returns the paper's table for one sentence, at its `shown` position: layers up,
    the maps' top tokens side by side.
    """
    sentence = peek["sentences"][number]
    at = sentence["shown"]
    token = visible(sentence["tokens"][at])
    what = f"after {token!r}" if peek["task"] == "next" else f"with {token!r} masked"
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("layer", justify="right")
    for kind in sentence["predictions"]:
        table.add_column(kind)
    columns = [
        _aligned([by_position[at] for by_position in maps])
        for maps in sentence["predictions"].values()
    ]
    for layer, *cells in reversed([*zip(peek["layers"], *columns, strict=True)]):
        table.add_row(str(layer), *(rich.text.Text(cell, overflow="fold") for cell in cells))
    console = rich.console.Console(width=width, no_color=True, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(f"“{sentence['text']}”, position {at}, {what}:", soft_wrap=True)
        console.print(table)
    return capture.get().rstrip("\n")


def _aligned(tops: Sequence[Top]) -> list[str]:
    """Returns the tokens of each row, one below the other in columns as wide as the
    longest.
    """
    table = [[visible(token) for token, _ in top] for top in tops]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(token.ljust(width) for token, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
