"""Early exit as rows of results.json: every threshold of every confidence, from one
reading of all layers.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from jmat.data.examples import Split
from jmat.metrics.bootstrap import bootstrap_mean
from jmat.metrics.confidence import PATIENCE, certainty
from jmat.models.config import ModelConfig
from jmat.models.flops import exit_flops, token_exit_flops
from jmat.report.notes import estimate
from jmat.report.rows import Row
from jmat.runtime.annotations import Keywords
from jmat.studies.early_exit.thresholds import BERT_POSITION, at_exit, paper_thresholds, patience

METRICS = ("precision@1", "precision@5", "precision@10", "surprisal")
# Thresholds of the confidences that the paper does not use, from safe to bold.
PROBABILITIES = tuple(float(p) for p in np.linspace(1, 0, 21))


class Reading(NamedTuple):
    """Holds the predictions of one kind of map (`mat`, `id`) from every layer, example
    by example.
    """

    metrics: Mapping[str, Float[ndarray, "N L1"]]
    confidence: Mapping[str, Float[ndarray, "N L1"]]  # rising with how sure the shortcut is


def reading(
    values: Mapping[tuple[str, int], Mapping[str, ndarray]], name: str, config: ModelConfig
) -> Reading:
    """Collects one map's values over the layers 0 .. L (from
    `jmat.studies.evaluation.evaluate`).
    """
    by_layer = [values[name, l] for l in range(config.layers + 1)]
    stack = {key: np.stack([v[key] for v in by_layer], axis=1) for key in by_layer[0]}
    confidence = {
        "gap": stack["gap"],
        "max_probability": stack["max_probability"],
        "entropy": certainty(stack["entropy"], config.vocab_size),
        PATIENCE: patience(stack["top_1"]).astype(np.float64),
    }
    if "short_gap" in stack:
        confidence["short_gap"] = stack["short_gap"]
    return Reading({key: stack[key].astype(np.float64) for key in METRICS}, confidence)


def thresholds_of(
    confidence: str,
    lambdas: Sequence[float],
    positions: Int[ndarray, " N"],
    config: ModelConfig,
    protocol: str,
) -> tuple[str, Sequence[float], Float[ndarray, "S #N"]]:
    """Returns the row key (`lambda` by the paper's rule, else `threshold`), the grid of
    thresholds, and the threshold of every example.
    """
    if confidence in ("gap", "short_gap"):
        t = positions
        if protocol == "din2023" and not config.causal:
            t = np.full_like(positions, BERT_POSITION)
        return "lambda", lambdas, paper_thresholds(lambdas, t, float(np.mean(positions + 1)))
    grid = (
        tuple(float(k) for k in range(config.layers, 0, -1))
        if confidence == PATIENCE
        else PROBABILITIES
    )
    # Patience leaves when k layers agree, others when confidence is strictly above the threshold.
    shift = 0.5 if confidence == PATIENCE else 0.0
    return "threshold", grid, np.asarray(grid, np.float64)[:, None] - shift


def exit_rows(
    config: ModelConfig,
    name: str,
    read: Reading,
    exits: Int[ndarray, "S N"],
    labels: Sequence[Row],
    split: Split,
    *,
    check_every: int = 1,
    words: int | None = None,
    seed: int = 0,
) -> list[Row]:
    """Returns rows for the exits at each setting: `layers`, precision@k, surprisal,
    `flops`, and `flops_ratio` to the full pass, over all tokens up to the one that is
    read.

    For causal models also `flops_ratio_token`, the work of one generated token against
    that of a token that runs all blocks: there the checks weigh more, since the blocks
    run over one token.
    """
    tokens = split.positions + 1
    everything = np.full((1, len(tokens)), config.layers)
    checks: Keywords = {"check_every": check_every, "words": words, "mapped": name != "id"}
    flops = exit_flops(config, exits, tokens, **checks)
    full = exit_flops(config, everything, tokens, check_every=config.layers)
    values = {metric: at_exit(read.metrics[metric], exits) for metric in METRICS}
    values |= {"layers": exits, "flops": flops, "flops_ratio": flops / full.mean()}
    if config.causal:
        token = token_exit_flops(config, exits, tokens, **checks)
        full = token_exit_flops(config, everything, tokens, check_every=config.layers)
        values["flops_ratio_token"] = token / full.mean()
    columns = np.concatenate([np.asarray(v, np.float64).T for v in values.values()], axis=1)
    mean, low, high = (
        stat.reshape(len(values), -1)
        for stat in bootstrap_mean(columns, groups=split.rows, seed=seed)
    )
    return [
        {
            "map": name,
            **label,
            "metric": metric,
            **estimate(mean[m, s], low[m, s], high[m, s]),
            "n": len(tokens),
        }
        for s, label in enumerate(labels)
        for m, metric in enumerate(values)
    ]
