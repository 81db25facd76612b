"""Early exit: stop at the first layer whose shortcut is confident enough (Din et al.
2023, section 6).

Everything here works on confidences and hits that were read once, for all layers
(`jmat.studies.evaluation.evaluate`): another threshold is a comparison of arrays, not
another forward pass. Axis letters: S settings (thresholds), N examples, L blocks, and
L1 = L + 1 layers, the embedding among them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from jmat.metrics.bootstrap import bootstrap_counts, percentiles
from jmat.metrics.confidence import falling_threshold

# The paper's grid: the first always exits at layer 1, the last never.
LAMBDAS = (-1.112, *(round(0.1 * k, 1) for k in range(11)), 1.112)
# `id` is over-confident: the released code looks more closely just above 1.
ID_LAMBDAS = (*LAMBDAS[:-1], *(1 + 0.0112 * k for k in range(1, 10)), LAMBDAS[-1])
# PROTOCOL din2023: the released code for BERT does not pass the position on; it fixes it.
BERT_POSITION = 3


class Outcome(NamedTuple):
    """Holds the exit of each example at each threshold."""

    layers: Int[ndarray, "S N"]  # blocks run
    hits: Float[ndarray, "S N"]  # precision@1 at the exit


def paper_thresholds(
    lambdas: Sequence[float], positions: Int[ndarray, " N"], mean_length: float
) -> Float[ndarray, "S N"]:
    """Returns `0.9 λ + 0.1 exp(−4 t / N)` for every λ and every example's 0-based
    position t; N is the mean of t + 1.
    """
    return falling_threshold(
        np.asarray(lambdas, np.float64), positions.astype(np.float64), mean_length
    )


def exit_layers(
    confidence: Float[ndarray, "N L"], thresholds: Float[ndarray, "S #N"], *, check_every: int = 1
) -> Int[ndarray, "S N"]:
    """Returns the first of layers 1 .. L − 1 whose confidence is above the threshold,
    strictly; L where there is none.

    Args:
      confidence: before running block l + 1, for l = 0 .. L − 1. Layer 0, the
        embedding, never exits.
      thresholds: one row a setting.
      check_every: look only at layers that are multiples of this.
    """
    L = confidence.shape[1]
    checked = [l for l in range(1, L) if l % check_every == 0]
    exits = np.full(np.broadcast_shapes(thresholds.shape, (1, len(confidence))), L)
    for l in reversed(checked):
        exits = np.where(confidence[:, l] > thresholds, l, exits)
    return exits


def outcome(exits: Int[ndarray, "S N"], hits: Float[ndarray, "N L1"]) -> Outcome:
    """Looks up what the shortcut from the exit layer got right."""
    return Outcome(exits, at_exit(hits, exits))


def at_exit(values: Float[ndarray, "N L1"], exits: Int[ndarray, "S N"]) -> Float[ndarray, "S N"]:
    """Returns each example's value at the layer at which it leaves."""
    return values[np.arange(len(values)), exits]


def fixed_exit(hits: Float[ndarray, "N L1"]) -> Outcome:
    """Returns the exits of the comparison curve: every example leaves at the same
    layer, 0 .. L.
    """
    N, layers = hits.shape
    return outcome(np.broadcast_to(np.arange(layers)[:, None], (layers, N)), hits)


def patience(top_1: Int[ndarray, "N L1"]) -> Int[ndarray, "N L1"]:
    """Returns how many layers in a row, up to each one, agree with the one before on
    the top token.
    """
    runs = np.zeros(top_1.shape, np.int64)
    for l in range(1, top_1.shape[1]):
        runs[:, l] = np.where(top_1[:, l] == top_1[:, l - 1], runs[:, l - 1] + 1, 0)
    return runs


def layers_at(
    outcome: Outcome, level: float, weights: Float[ndarray, "K N"]
) -> Float[ndarray, " K"]:
    """Returns the number of blocks run where precision@1 reaches `level`, by linear
    interpolation of the (blocks, precision) curve.

    The curve is read from few blocks to many, and precision taken as the best so far,
    so that the crossing is the first. `weights` [K, N] weigh the examples (bootstrap
    counts); one answer a row.
    """
    weights = weights / weights.sum(1, keepdims=True)
    layers, precision = weights @ outcome.layers.T, weights @ outcome.hits.T
    answers = np.empty(len(weights))
    for k in range(len(weights)):
        order = np.lexsort((precision[k], layers[k]))
        best = np.maximum.accumulate(precision[k][order])
        answers[k] = _first_crossing(best, layers[k][order], level)
    return answers


def _first_crossing(
    rising: Float[ndarray, " S"], layers: Float[ndarray, " S"], level: float
) -> float:
    after = int(np.searchsorted(rising, level, side="left"))
    if after == 0:
        return float(layers[0])
    # precision at L is 1 by definition, so only a curve without that point ends here
    if after == len(rising):
        return float(layers[-1])
    share = (level - rising[after - 1]) / (rising[after] - rising[after - 1])
    return float(layers[after - 1] + share * (layers[after] - layers[after - 1]))


def layers_saved(
    outcomes: Mapping[str, Outcome],
    blocks: int,
    level: float,
    *,
    groups: Int[ndarray, " N"] | None = None,
    samples: int = 1000,
    seed: int = 0,
) -> dict[str, tuple[float, float, float]]:
    """Returns the share of the blocks that is saved at a precision, per map, and
    pairwise differences (`mat - id`): mean, low, high.

    Intervals are 95 % percentile bootstrap over examples, or whole groups of them, the
    same resamples for all maps, so differences are paired. The ends are NaN where there
    is but one example or group.
    """
    n = next(iter(outcomes.values())).hits.shape[1]
    weights = np.concatenate(
        [np.ones((1, n)), bootstrap_counts(n, groups=groups, samples=samples, seed=seed)]
    )
    # The mean of equal numbers may differ from them by rounding: nothing saved is 0, not -1e-16.
    saved = {
        name: np.round(1 - layers_at(result, level, weights) / blocks, 12) + 0.0
        for name, result in outcomes.items()
    }
    names = list(outcomes)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            saved[f"{a} - {b}"] = saved[a] - saved[b]
    return {name: (float(v[0]), *percentiles(v[1:], weights[1:])) for name, v in saved.items()}


def calibrate(
    outcome: Outcome, thresholds: Sequence[float], *, delta: float, epsilon: float
) -> float | None:
    """Returns the lowest threshold that keeps disagreement with the full model under
    `delta` with confidence 1 − `epsilon`.

    Learn then Test (Angelopoulos et al. 2021): thresholds are tested from the safest
    down, each with Hoeffding's p-value `exp(−2 n (δ − risk)²)`; the first that is not
    rejected ends the sequence. None: not even the safest passes.

    Args:
      outcome: at each threshold, in the order of `thresholds`, on calibration data.
      thresholds: rising.
      delta: bound on the share of examples whose prediction differs from the full
        model's.
      epsilon: chance that the bound fails.
    """
    n = outcome.hits.shape[1]

    def tested(k: int) -> float:
        risk = 1 - outcome.hits[k].mean()
        p_value = np.exp(-2 * n * max(delta - risk, 0.0) ** 2)
        return float(p_value)

    return fixed_sequence(thresholds, tested, epsilon)


def fixed_sequence(
    thresholds: Sequence[float], p_value: Callable[[int], float], level: float
) -> float | None:
    """Returns the last threshold, from the safest down, whose hypothesis is rejected
    with all before it; None where that of the safest is not.

    Args:
      thresholds: rising, the last one the safest.
      p_value: of the hypothesis that the k-th threshold is not safe; called until one is
        above `level`.
      level: chance at most that a threshold is returned that is not safe.
    """
    chosen = None
    for k in reversed(range(len(thresholds))):
        if p_value(k) > level:
            break
        chosen = thresholds[k]
    return chosen
