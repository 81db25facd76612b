"""What an architecture tells the rest of jmat: how to read its config, build it, and find its weights."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jmat.config import ModelConfig


class Layout(NamedTuple):
    """How one tensor of a file becomes our parameters, and back. Both directions take and give tuples of arrays."""

    load: Callable[[Any], tuple[Any, ...]]
    save: Callable[[tuple[Any, ...]], Any]


PLAIN = Layout(lambda tensor: (tensor,), lambda params: params[0])
TRANSPOSED = Layout(lambda tensor: (tensor.T,), lambda params: params[0].T)


def fused(parts: int) -> Layout:
    """Several parameters lie side by side along the last axis of the file's tensor."""
    return Layout(
        lambda tensor: tuple(np.split(tensor, parts, axis=-1)), lambda params: np.concatenate(params, axis=-1)
    )


@dataclasses.dataclass(frozen=True)
class Key:
    """One tensor of a checkpoint (`file`) and the parameters of ours that it holds, by dotted path."""

    file: str
    params: tuple[str, ...]
    layout: Layout = PLAIN
    aliases: tuple[str, ...] = ()  # other names for the same tensor; the first present is read, copies are ignored


@dataclasses.dataclass(frozen=True)
class Family:
    """An architecture."""

    config: Callable[[Mapping[str, Any], tuple[str, ...]], ModelConfig]  # (config.json, ignored fields) → config
    model: Callable[..., Any]  # (config, rngs=…) → model
    keys: Callable[[ModelConfig], list[Key]]
    prefix: str  # of the keys of a model saved with a head; a bare model's keys lack it
    head_prefixes: tuple[str, ...]  # keys that never carry the prefix
    tied: tuple[str, str]  # the head's and the embedding's keys, which are one tensor where the head is tied
    ignored: tuple[str, ...]  # regular expressions of keys that hold no weights of ours
