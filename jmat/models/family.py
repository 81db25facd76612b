"""Defines `Family`: how to read the config of an architecture, build it, and find its
weights.
"""

import dataclasses
import html
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jmat.models.config import ModelConfig
from jmat.models.config_reader import ConfigReader
from jmat.runtime.errors import printable


class Transformer(nnx.Module):
    """Holds a model: embed → blocks → final norm → head (None where the checkpoint has
    none).
    """

    def __init__(self, config: ModelConfig, family: "Family", *, rngs: nnx.Rngs):
        self.name = ""  # as `jmat.load` was given it; for results and maps
        self.config = config
        self.embed = family.embed(config, rngs=rngs)
        self.blocks = nnx.List([family.block(config, rngs=rngs) for _ in range(config.layers)])
        self.final_norm = family.final_norm(config)
        self.head = family.head(config, rngs=rngs) if config.has_head else None

    def __repr__(self) -> str:
        config, leaves = self.config, jax.tree.leaves(self)
        size, bytes_ = sum(leaf.size for leaf in leaves), sum(leaf.nbytes for leaf in leaves)
        kind = "causal" if config.causal else "masked"
        heads = f"{config.heads} heads of {config.head_width}"
        lines = [
            f"{self.name or 'Transformer'}: {kind} language model of the family {config.family}",
            f"  {config.layers} blocks, width {config.width}, {heads}, feed-forward "
            f"{config.ffn_width}",
            f"  vocabulary {config.vocab_size:,}, up to {config.num_positions:,} positions",
            f"  {size:,} parameters, {bytes_ / 1e6:,.1f} MB, {self.embed.tokens.table.dtype}",
            f"  {'language-model head' if self.head is not None else 'no language-model head'}",
            f"  sites: embed, block.0 … block.{config.layers - 1} and their parts, final_norm, "
            "logits (jmat.sites)",
        ]
        return "\n".join(lines)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Returns the same lines for a notebook; names out of files are escaped."""
        return (
            '<pre style="white-space: pre; overflow-x: '
            f'auto">{html.escape(printable(repr(self)))}</pre>'
        )


def check_model(model: object) -> None:
    """Raises ValueError for what is no model."""
    if not isinstance(model, Transformer):
        hint = "jmat.load returns a model and its tokenizer: model, tokenizer = jmat.load(name)"
        raise ValueError(
            f"model is of type {type(model).__name__}; expected a Transformer ({hint})."
        )


Shape = tuple[int, ...]


class Layout(NamedTuple):
    """Turns one tensor of a file into our parameters, and back. Both directions take
    and give tuples of arrays.
    """

    load: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    save: Callable[[tuple[np.ndarray, ...]], np.ndarray]
    # of the file's tensor, by the shapes of our parameters
    shape: Callable[[tuple[Shape, ...]], Shape]


PLAIN = Layout(lambda tensor: (tensor,), lambda params: params[0], lambda shapes: shapes[0])
TRANSPOSED = Layout(
    lambda tensor: (tensor.T,), lambda params: params[0].T, lambda shapes: shapes[0][::-1]
)


def fused(parts: int) -> Layout:
    """Returns the layout of several parameters that lie side by side along the last
    axis of the file's tensor.
    """
    return Layout(
        lambda tensor: tuple(np.split(tensor, parts, axis=-1)),
        lambda params: np.concatenate(params, axis=-1),
        lambda shapes: (*shapes[0][:-1], sum(shape[-1] for shape in shapes)),
    )


def interleaved(parts: int, heads: int) -> Layout:
    """Returns the layout of several parameters that lie head by head along the first
    axis of the file's tensor: q of head 0, k of head 0, …
    """

    def load(tensor: np.ndarray) -> tuple[np.ndarray, ...]:
        by_head = tensor.reshape(heads, parts, -1, *tensor.shape[1:])
        return tuple(by_head[:, part].reshape(-1, *tensor.shape[1:]).T for part in range(parts))

    def save(params: tuple[np.ndarray, ...]) -> np.ndarray:
        by_head = [param.T.reshape(heads, -1, *param.shape[:-1]) for param in params]
        return np.stack(by_head, axis=1).reshape(-1, *params[0].shape[:-1])

    return Layout(
        load, save, lambda shapes: (sum(shape[-1] for shape in shapes), *shapes[0][-2::-1])
    )


@dataclasses.dataclass(frozen=True)
class Key:
    """Names one tensor of a checkpoint (`file`) and the parameters of ours that it
    holds, by dotted path.
    """

    file: str
    params: tuple[str, ...]
    layout: Layout = PLAIN
    # other names for the same tensor; the first present is read, copies are ignored
    aliases: tuple[str, ...] = ()


def dense_keys(file: str, ours: str, *, bias: bool = True) -> list[Key]:
    """Returns the keys of the kernel, [out, in] in the file, and the bias of a `Dense`."""
    kernel = Key(f"{file}.weight", (f"{ours}.kernel",), TRANSPOSED)
    return [kernel, Key(f"{file}.bias", (f"{ours}.bias",))] if bias else [kernel]


def norm_keys(file: str, ours: str, *, bias: bool = True) -> list[Key]:
    """Returns the keys of the scale and bias of a norm."""
    scale = Key(f"{file}.weight", (f"{ours}.scale",))
    return [scale, Key(f"{file}.bias", (f"{ours}.bias",))] if bias else [scale]


# Heads for other tasks than predicting tokens, as transformers and trainers by rewards (`v_head`)
# store them.
OTHER_HEADS = r"(score|classifier|pre_classifier|qa_outputs|multiple_choice_head|v_head|value_head|reward_head)\..*"  # noqa: E501


@dataclasses.dataclass(frozen=True)
class Family:
    """Describes an architecture."""

    config: Callable[[ConfigReader], ModelConfig]
    # Each is called with (config, rngs=…), `final_norm` with (config).
    embed: Callable[..., Any]
    block: Callable[..., Any]
    final_norm: Callable[..., Any]
    head: Callable[..., Any]
    keys: Callable[[ModelConfig], list[Key]]
    # of the keys of a model saved with a head (the first is written); a bare model's lack it
    prefixes: tuple[str, ...]
    head_prefixes: tuple[str, ...]  # keys that never carry the prefix
    # the head's and the embedding's keys, which are one tensor where the head is tied
    tied: tuple[str, str]
    # Other names of config fields → the usual ones.
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # beginnings of keys (regular expressions) → what we call them
    renamed: tuple[tuple[str, str], ...] = ()
    # regular expressions of keys that hold no weights of ours, besides OTHER_HEADS
    ignored: tuple[str, ...] = ()
