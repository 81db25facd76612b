"""Times all thresholds of an early exit from one pass, and all measures of a paper."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments.benchmarking.rows import Goal, Row, duration, paired_row, ratio_row, seconds_rows
from experiments.benchmarking.setup import Bench, streams_of
from jmat.capture.activations import capture
from jmat.data.examples import Split
from jmat.maps.jumps import fit_jumps
from jmat.maps.types import Identity
from jmat.models.config import ModelConfig
from jmat.models.sites import stream_sites
from jmat.runtime.timing import in_turn
from jmat.studies.early_exit.curves import calibration_rows, curve_rows, saved_rows, top_words
from jmat.studies.early_exit.rows import reading
from jmat.studies.early_exit.thresholds import (
    ID_LAMBDAS,
    LAMBDAS,
    exit_layers,
    outcome,
    paper_thresholds,
)
from jmat.studies.evaluation import evaluate, metric_rows
from jmat.studies.r2 import r2_rows, resamples

EXIT_GOAL, GRID_GOAL = Goal(50), Goal(2, at_most=True)
SUITE_GOAL = Goal(3, at_most=True)


def early_exit_rows(bench: Bench) -> list[Row]:
    """The whole grid of λ by thresholding what was read once, against a forward pass
    for each λ.
    """
    L, split = bench.config.layers, bench.eval
    last = (f"block.{L - 1}",)
    one_pass = lambda: capture(bench.model, split, last, tokens_per_batch=bench.tokens_per_batch)  # noqa: E731
    sites = stream_sites(L)
    streams = streams_of(bench, split)
    one_pass()
    shortcuts = {
        (name, l): (Identity(), streams[sites[l]]) for name in ("mat", "id") for l in range(L + 1)
    }
    read = lambda: evaluate(bench.model, streams[sites[L]], shortcuts)  # noqa: E731
    values = read()
    reads = {name: reading(values, name, bench.config) for name in ("mat", "id")}

    def grid(lambdas: Mapping[str, Sequence[float]]) -> list[Any]:
        found = []
        for name, of in reads.items():
            thresholds = paper_thresholds(
                lambdas[name], split.positions, float(np.mean(split.positions + 1))
            )
            result = outcome(
                exit_layers(of.confidence["gap"][:, :L], thresholds), of.metrics["precision@1"]
            )
            found.append((result.layers.mean(1), result.hits.mean(1)))
        return found

    whole = {"mat": LAMBDAS, "id": ID_LAMBDAS}
    works = {
        "jmat": lambda: grid(whole),
        "one": lambda: grid({"mat": LAMBDAS[:1], "id": ()}),
        "pass": one_pass,
    }
    taken = in_turn({**works, "reading": read}, bench.repeats)
    count, best = (
        sum(map(len, whole.values())),
        {name: min(values) for name, values in taken.items()},
    )
    rows = seconds_rows("early_exit", taken, examples=split.num_examples)
    words = f" ({count} passes, from 1 timed)"
    rows.append(paired_row("early_exit", taken, "pass", EXIT_GOAL, scale=count, words=words))
    shared = best["pass"] + best["reading"]
    ratio = (shared + best["jmat"]) / (shared + best["one"])
    ours, one = duration(shared + best["jmat"]), f"1 lambda {duration(shared + best['one'])}"
    rows.append(ratio_row("early_exit", "35 lambdas", ratio, ours, one, GRID_GOAL))
    passes = count * best["pass"]
    words = f"{count} passes {duration(passes)}"
    return [
        *rows,
        ratio_row("early_exit", "all included", passes / (shared + best["jmat"]), ours, words),
    ]


def suite_rows(bench: Bench) -> list[Row]:
    """Everything in Din et al. 2023 but the sub-modules, one capture included, against
    that capture alone.
    """
    taken: dict[str, list[float]] = {"jmat": [], "one capture": []}
    for turn in range(2):  # the first compiles
        steps = suite(bench)
        if turn:
            taken["jmat"].append(sum(steps.values()))
            taken["one capture"].append(steps["capture"])
    rows = [
        {"map": "suite", "metric": "seconds", "of": step, "value": value}
        for step, value in steps.items()
    ]
    ratio = taken["jmat"][0] / taken["one capture"][0]
    ours, other = duration(taken["jmat"][0]), f"one capture {duration(taken['one capture'][0])}"
    return [*rows, ratio_row("suite", "ratio", ratio, ours, other, SUITE_GOAL)]


def suite(bench: Bench) -> dict[str, float]:
    """Seconds by step, composed as a user would: what is captured once serves every
    figure.
    """
    L, sites, took = bench.config.layers, stream_sites(bench.config.layers), {}

    def step(name: str, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = jax.block_until_ready(work())
        took[name] = time.perf_counter() - begin
        return result

    fit_acts, eval_acts = step(
        "capture", lambda: [streams_of(bench, split) for split in (bench.fit, bench.eval)]
    )
    maps, _ = step("maps", lambda: fit_jumps([fit_acts[site] for site in sites]))
    streams = [eval_acts[site] for site in sites]
    of = {
        "mat": {i: maps[i, L] for i in range(L)} | {L: Identity()},
        "id": dict.fromkeys(range(L + 1), Identity()),
    }
    shortcuts = {
        (name, i): (shortcut[i], streams[i]) for name, shortcut in of.items() for i in range(L + 1)
    }
    words = step("short list", lambda: top_words(bench.model, fit_acts[sites[L]], 512))
    values = step("predictions", lambda: evaluate(bench.model, streams[L], shortcuts, words=words))
    step("layer_jump", lambda: metric_rows(values, L, groups=bench.eval.rows))
    step("r2", lambda: r2_rows(streams, maps, resamples(bench.eval.positions, bench.eval.rows)))
    step("early_exit", lambda: _exits(bench.config, values, bench.eval, len(words)))
    return took


def _exits(config: ModelConfig, values: Any, split: Split, words: int) -> list[Row]:
    rows, outcomes = curve_rows(
        config, values, split, "din2023", {"check_every": 2, "words": words}
    )
    rows += saved_rows(outcomes, config.layers, split.rows)
    return [dict(row) for row in rows + calibration_rows(outcomes, split.rows, 0.1, 0.05)]
