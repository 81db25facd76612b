"""Turns prompts into token ids: texts, chats, ids, or a batch."""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32
from numpy import ndarray

from jmat.data.batches import Batch
from jmat.data.encoding import SpecialTokens, Tokenizer, special_tokens, text_tokens
from jmat.data.reading import check_texts
from jmat.models.config import ModelConfig
from jmat.models.inputs import check_ids
from jmat.runtime.errors import in_one_line, shortened

Message = Mapping[str, str]  # {"role": …, "content": …}
Ids = Sequence[int] | np.ndarray
Prompts = (
    str
    | Sequence[str]
    | Sequence[Message]
    | Sequence[Sequence[Message]]
    | Ids
    | Sequence[Ids]
    | Batch
)
_EXPECTED = (
    "expected texts, chats (lists of {'role': …, 'content': …}), token ids, or a batch of "
    "jmat.encode"
)


def prompt_ids(
    prompts: object, tokenizer: Tokenizer | None, config: ModelConfig
) -> list[Int32[ndarray, " _"]]:
    """Returns the token ids of each prompt.

    Texts and chats have special tokens in front where the tokenizer or its chat template
    puts them; ids are taken as they are.

    Raises:
      ValueError: no prompts; an empty one; texts or chats without a tokenizer; a chat
        without a template; ids outside the vocabulary; several texts in a row of a
        batch.
    """
    rows: Sequence[ndarray] | list[list[int]]
    if isinstance(prompts, Batch):
        rows = _batch_rows(prompts)
    else:
        several = _several(prompts)
        if not several:
            raise ValueError(f"there are no prompts; {_EXPECTED}.")
        if all(isinstance(prompt, str) for prompt in several):
            rows = _text_rows(several, tokenizer)
        elif all(_is_chat(prompt) for prompt in several):
            rows = _chat_rows(several, tokenizer)
        else:
            rows = [_id_row(prompt, number) for number, prompt in enumerate(several)]
    ids = []
    for number, row in enumerate(map(np.asarray, rows)):
        if not row.size:
            raise ValueError(
                f"prompt {number} is empty: give it at least one token for the model to go on from."
            )
        check_ids(f"prompt {number}: token id", row, config.vocab_size)
        ids.append(row.astype(np.int32))  # only now: larger ids would become others
    return ids


def padded_rows(
    ids: Sequence[Int32[ndarray, " _"]], rows: int | None = None
) -> Int32[ndarray, "B T"]:
    """Returns token ids as rows of one length, with zeros behind them; `rows` of them,
    by default as many as there are.
    """
    padded = np.zeros((len(ids) if rows is None else rows, max(map(len, ids))), np.int32)
    for row, own in enumerate(ids):
        padded[row, : len(own)] = own
    return padded


def _several(prompts: object) -> Sequence[Any]:
    """Returns a list of prompts, also where one is given by itself."""
    if isinstance(prompts, str) or _is_chat(prompts):
        return [prompts]
    if hasattr(prompts, "__array__"):
        array = np.asarray(prompts)
        return list(array) if array.ndim == 2 else [array]
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts are of type {type(prompts).__name__}; {_EXPECTED}.")
    is_ids = len(prompts) and all(isinstance(each, int | np.integer) for each in prompts)
    return [prompts] if is_ids else prompts


def _is_chat(prompt: object) -> bool:
    return (
        isinstance(prompt, Sequence)
        and bool(len(prompt))
        and all(isinstance(message, Mapping) for message in prompt)
    )


def _text_rows(texts: Sequence[str], tokenizer: Tokenizer | None) -> list[list[int]]:
    tokenizer = check_texts(texts, tokenizer)
    special = special_tokens(tokenizer, masked=False)
    own = text_tokens(texts, tokenizer, special)
    return [[*special.before, *row] if row else [] for row in own]


def _batch_rows(batch: Batch) -> list[ndarray]:
    tokens, segments = np.asarray(batch.tokens), np.asarray(batch.segments)
    if segments.max(initial=0) > 1:
        row = int(np.argwhere(segments > 1)[0, 0])
        raise ValueError(f"row {row} of the batch holds several texts; expected one prompt a row.")
    return [row[real > 0] for row, real in zip(tokens, segments, strict=True)]


def _id_row(prompt: object, number: int) -> ndarray:
    ids = np.asarray(prompt) if hasattr(prompt, "__array__") or _holds_ids(prompt) else None
    if ids is None or ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(
            f"prompt {number} is {shortened(prompt, 60)}; {_EXPECTED}, all of one kind."
        )
    return ids


def _holds_ids(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and all(
        isinstance(each, int | np.integer) and not isinstance(each, bool) for each in prompt
    )


# --- chats ----------------------------------------------------------------------------------------


def _chat_rows(chats: Sequence[Sequence[Message]], tokenizer: Tokenizer | None) -> list[list[int]]:
    """Returns the tokens of each chat as the tokenizer's template writes it, up to where
    the model's answer begins.

    Raises ValueError for messages of another form, without a tokenizer or template, and
    where the template fails or its package is missing.
    """
    for number, chat in enumerate(chats):
        for message in chat:
            if not all(isinstance(message.get(part), str) for part in ("role", "content")):
                raise ValueError(
                    f"prompt {number} has the message {shortened(dict(message), 60)}; expected "
                    "{'role': 'user', 'content': 'text'}."
                )
    tokenizer = check_texts(["chat"], tokenizer)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the tokenizer has no chat template, so chats cannot be written as this model knows "
            "them: give the prompts as texts."
        )
    if importlib.util.find_spec("jinja2") is None:
        raise ValueError("chat templates need the package jinja2: pip install jinja2.")
    texts = [_chat_text(chat, tokenizer) for chat in chats]
    return text_tokens(texts, tokenizer, SpecialTokens())  # the template writes special tokens


def _chat_text(chat: Sequence[Message], tokenizer: Tokenizer) -> str:
    write = getattr(tokenizer, "apply_chat_template")  # noqa: B009 (no part of the protocol)
    messages = [dict(message) for message in chat]
    try:
        text = write(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a small program of the checkpoint, in a sandbox
        raise ValueError(
            f"the tokenizer's chat template fails on these messages: {in_one_line(error)}"
        ) from None
    return str(text)
