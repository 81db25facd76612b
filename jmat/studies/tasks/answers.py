"""Writes the answers that tasks of the LM Evaluation Harness ask for."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32
from numpy import ndarray

from jmat.data.encoding import Tokenizer, special_tokens, text_tokens
from jmat.decode.generate import generate
from jmat.models.family import Transformer
from jmat.models.sites import Site
from jmat.runtime.annotations import Fields
from jmat.runtime.checks import check_whole

_MOST = 256  # tokens of an answer where a task does not say
# Options of a request, and what they are called here.
_LAW = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_OTHERS = ("until", "max_gen_toks", "max_new_tokens", "do_sample")


def answers(
    model: Transformer,
    tokenizer: Tokenizer,
    requests: Sequence[tuple[str, Fields]],
    prefix: tuple[int, ...],
    *,
    sites: Mapping[str, Site],
    tokens_per_batch: int,
) -> list[str]:
    """Returns the text that the model writes behind each context.

    An answer ends before the first of the texts in `until`. Of a context that is too
    long, the end is read; how many were cut is logged.

    Args:
      model: a causal model.
      tokenizer: the model's.
      requests: contexts and their options, as the harness gives them: `until`,
        `max_gen_toks` (256), `do_sample`, `temperature`, `top_k`, `top_p`, `min_p`.
      prefix: tokens before a context that the tokenizer puts none in front of, where it
        is empty.
      sites: edits of parts, or what stands in for them.
      tokens_per_batch: tokens of contexts and answers that are written at a time.

    Raises:
      ValueError: an option that is not implemented; as `jmat.generate`.
    """
    special = special_tokens(tokenizer, masked=False)
    own = text_tokens([context for context, _ in requests], tokenizer, special)
    settings = [_settings(options, model.config.num_positions) for _, options in requests]
    prompts, cut = [], 0
    for row, (_, new) in zip(own, settings, strict=True):
        before = special.before if row else prefix
        room = model.config.num_positions - new - len(before)
        cut += len(row) > room
        prompts.append(np.asarray([*before, *row[max(len(row) - room, 0) :]], np.int32))
    if cut:
        logging.getLogger(__name__).warning(
            "%d of %d contexts were cut, so that their answers fit the model's positions.",
            cut,
            len(prompts),
        )
    texts = [""] * len(prompts)
    for rows in _batches(prompts, settings, tokens_per_batch):
        options, new = settings[rows[0]]
        written = generate(
            model,
            [prompts[row] for row in rows],
            tokenizer=tokenizer,
            max_new_tokens=new,
            sites=sites,
            **options,
        )
        assert written.texts is not None
        for number, text in zip(rows, written.texts, strict=True):
            texts[number] = text
    return texts


def _settings(options: Fields, positions: int) -> tuple[dict[str, Any], int]:
    """Returns the options for `jmat.generate`, and the number of tokens of an answer:
    at most half of the model's positions, so that the context has the others.
    """
    if unknown := sorted(options.keys() - {*_LAW, *_OTHERS}):
        raise ValueError(f"the option {unknown[0]!r} of a request is not implemented.")
    new = options.get("max_gen_toks", options.get("max_new_tokens", _MOST))
    check_whole("max_gen_toks", new, 1)
    until = options.get("until") or ()
    strings = (until,) if isinstance(until, str) else tuple(until)
    chosen: dict[str, Any] = {"stop_strings": tuple(string for string in strings if string)}
    if options.get("do_sample", bool(options.get("temperature"))):
        law = {"temperature": 1.0, **options}
        chosen |= {ours: law[name] for name, ours in _LAW.items() if name in law}
    return chosen, min(new, max(positions // 2, 1))


def _batches(
    prompts: Sequence[Int32[ndarray, " _"]],
    settings: Sequence[tuple[dict[str, Any], int]],
    tokens_per_batch: int,
) -> list[list[int]]:
    """Returns the numbers of requests that are written together: of the same options,
    and of similar lengths.
    """

    def options(row: int) -> str:
        return repr(settings[row])

    order = sorted(range(len(prompts)), key=lambda row: (options(row), -len(prompts[row])))
    batches = []
    for _, group in itertools.groupby(order, key=options):
        rows = list(group)
        while rows:
            size = len(prompts[rows[0]]) + settings[rows[0]][1]
            count = max(tokens_per_batch // size, 1)
            batches.append(rows[:count])
            rows = rows[count:]
    return batches
