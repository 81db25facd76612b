"""Checks the options of `jmat.generate`, before any work."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32
from numpy import ndarray

from jmat.data.encoding import Tokenizer, special_id
from jmat.data.reading import check_texts
from jmat.models.config import ModelConfig
from jmat.models.edits import At
from jmat.models.family import Transformer
from jmat.models.inputs import check_ids
from jmat.models.site_checks import checked_sites
from jmat.models.sites import Site
from jmat.runtime.arrays import on_host
from jmat.runtime.checks import check_several


def writing_sites(model: Transformer, sites: Mapping[str, Site] | None) -> dict[str, Site]:
    """Returns `sites=` without patterns.

    Raises ValueError as `checked_sites` does, and for positions that count from the end.
    """
    named = checked_sites(sites, model.config, 0, model.config.layers)
    for name, site in named.items():
        if isinstance(site, At):
            positions = on_host(site.positions)
            if isinstance(positions, np.ndarray) and (positions < 0).any():
                raise ValueError(
                    f"site {name!r}: At position {positions[positions < 0].ravel()[0]} counts from "
                    "the end of a text that is still to be written: count from its first token."
                )
    return named


def checked_strings(given: object, on_text: object, tokenizer: Tokenizer | None) -> tuple[str, ...]:
    """Returns the stop strings. Raises ValueError for what is none, and for these or
    `on_text` without a tokenizer.
    """
    several: Any = (given,) if isinstance(given, str) else given
    check_several("stop_strings", several)
    strings = tuple(several)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop_strings has {string!r}: expected texts, none of them empty.")
    if on_text is not None and not callable(on_text):
        raise ValueError(
            f"on_text is of type {type(on_text).__name__}; expected a function of the prompt's "
            "number and a piece of text."
        )
    wanted = "stop_strings" if strings else "on_text" if on_text is not None else None
    if wanted and tokenizer is None:
        raise ValueError(
            f"{wanted} needs a tokenizer to write text with: give tokenizer=, as jmat.load returns "
            "it."
        )
    if tokenizer is not None:
        check_texts(["text"], tokenizer)
    return strings


def checked_stops(
    given: object, tokenizer: Tokenizer | None, config: ModelConfig
) -> tuple[int, ...]:
    """Returns the ids that end a text; by default those of the config and of the
    tokenizer.
    """
    if given is None:
        named = config.to_hf().get("eos_token_id")
        ids = [*(named if isinstance(named, list) else [named]), special_id(tokenizer, "eos")]
        return tuple(
            dict.fromkeys(
                each
                for each in ids
                if isinstance(each, int)
                and not isinstance(each, bool)
                and 0 <= each < config.vocab_size
            )
        )
    try:
        array = np.asarray(given)
    except ValueError:  # lists of several lengths
        array = np.zeros((1, 1))
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"stop_tokens={given!r}: expected a list of token ids.")
    array = array.astype(np.int64)
    check_ids("stop_tokens: token id", array, config.vocab_size)
    return tuple(dict.fromkeys(array.tolist()))


def check_lengths(
    ids: Sequence[Int32[ndarray, " _"]], max_new_tokens: int, config: ModelConfig
) -> None:
    """Raises ValueError for a prompt that, alone or with the new tokens, is longer than
    the model's positions.
    """
    number = int(np.argmax([len(row) for row in ids]))
    longest, most = len(ids[number]), config.num_positions
    if longest >= most:
        raise ValueError(
            f"prompt {number} has {longest} tokens; the model has positions for {most}, one of "
            f"which a new token needs: cut the prompt to {most - 1}."
        )
    if longest + max_new_tokens > most:
        raise ValueError(
            f"prompt {number} has {longest} tokens, and max_new_tokens={max_new_tokens} more would "
            f"be {longest + max_new_tokens}; the model has positions for {most}: ask for at most "
            f"{most - longest}."
        )
