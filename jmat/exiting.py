"""A forward pass that truly stops: blocks after the exit are never run. For measuring what an early exit is worth in
time.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy import ndarray

from jmat.forward import logits, run
from jmat.metrics import top_2_gap
from jmat.sites import gather


@dataclasses.dataclass(frozen=True)
class ExitRule:
    """When to stop, and how that is found out."""

    maps: Mapping[int, Any]  # layer → map to the final stream; the layers at which confidence is checked
    check_model: (
        Any  # the model whose final norm and head the check reads with: the model itself, or `short_list` of it
    )


def short_list(model: Any, words: Int[ndarray, " W"]) -> Any:
    """The same model with a head over some words only: what a check needs, at W/V of the cost."""
    V = model.config.vocab_size
    if model.config.width == V:
        raise ValueError(f"the width and the vocabulary are both {V}: the head's word axis cannot be told apart.")
    short = jax.tree.map(lambda leaf: leaf, model)
    short.head = jax.tree.map(lambda leaf: leaf[..., words] if leaf.shape[-1] == V else leaf, model.head)
    short.embed = jax.tree.map(lambda leaf: leaf[words] if leaf.shape[0] == V else leaf, model.embed)
    return short


def run_until_sure(
    model: Any,
    tokens: Int[ndarray, "B T"],
    lengths: Int[ndarray, " B"],
    positions: Int[ndarray, " B"],
    thresholds: Float[ndarray, " B"],
    rule: ExitRule,
) -> tuple[Int[ndarray, " B"], Int[ndarray, " B"]]:
    """Predicts at one position of each row; a row leaves the batch at the first check that is above its threshold.

    The rows that stay are packed together, up to the next power of two, so the number of compiled programs stays small.

    Returns:
      The layer at which each row left (L: ran to the end), and the predicted token, read with the whole head.
    """
    L, B = model.config.layers, len(tokens)
    layers, predicted = np.full(B, L), np.zeros(B, np.int64)
    rows = np.arange(B)  # which row of the input each row of the stream is
    mask = np.arange(tokens.shape[1]) < lengths[:, None]
    x = jnp.asarray(tokens)
    start = 0
    for layer in (*sorted(rule.maps), L):
        x, _ = run(model, x, start=start, stop=layer, mask=mask[rows])
        start = layer
        here = gather(x, jnp.asarray(positions[rows]))
        if layer == L:
            leaving = np.ones(len(rows), bool)
            stand_in = here
        else:
            stand_in = _apply(rule.maps[layer], here)
            leaving = np.asarray(top_2_gap(logits(rule.check_model, stand_in))) > thresholds[rows]
        if leaving.any():
            top = np.asarray(_top_1(logits(model, stand_in)))
            layers[rows[leaving]], predicted[rows[leaving]] = layer, top[leaving]
            if leaving.all():
                break
            stay = np.flatnonzero(~leaving)
            size = 1 << int(len(stay) - 1).bit_length()
            stay = np.resize(stay, size)  # filled up with repeats, which come to the same answers
            x, rows = x[jnp.asarray(stay)], rows[stay]
    return layers, predicted


def time_passes(passes: Mapping[str, Any], *, repeats: int = 5) -> dict[str, float]:
    """Median wall-clock seconds of each function, run in turn `repeats` times after one warm-up: ratios survive a busy
    machine.
    """
    for run_pass in passes.values():
        run_pass()
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(repeats):
        for name, run_pass in passes.items():
            begin = time.perf_counter()
            run_pass()
            seconds[name].append(time.perf_counter() - begin)
    return {name: float(np.median(values)) for name, values in seconds.items()}


@jax.jit
def _apply(shortcut: Any, x: Float[Array, "B D"]) -> Float[Array, "B D"]:
    return shortcut(x)


@jax.jit
def _top_1(scores: Float[Array, "B V"]) -> Int[Array, " B"]:
    return scores.argmax(-1)
