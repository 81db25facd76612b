"""Greedy text behind prompts, by `jmat.generate` and by transformers' `generate`."""

import functools

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from experiments.benchmarking import rivals
from experiments.benchmarking.rows import Goal, Row, missing_row, paired_row, seconds_rows
from experiments.benchmarking.setup import Bench
from jmat.decode.generate import generate
from jmat.runtime.timing import Work, in_turn, seconds

_PROMPT, _NEW = 16, 80  # tokens
_NARROW = 256  # up to this width a step of transformers is overhead
# By the number of texts at a time: of narrow models, and of others.
_GOALS = {1: (Goal(3), Goal(1)), 16: (Goal(2), Goal(1.5))}


def decoding_rows(bench: Bench) -> list[Row]:
    """Milliseconds a step of greedy text, prompts included: 80 tokens behind 1 and 16
    prompts of 16 tokens, against transformers with a cache.
    """
    rng, rows = np.random.default_rng(4), []
    for batch, goals in _GOALS.items():
        part, goal = f"decoding {batch}", goals[bench.config.width > _NARROW]
        prompts = rng.integers(bench.config.vocab_size, size=(batch, _PROMPT))
        works: dict[str, Work] = {"jmat": functools.partial(_written, bench, prompts)}
        first = seconds(works["jmat"])
        other = "transformers"
        if rivals.installed("torch"):
            works[other] = rivals.torch_generate(bench.folder, prompts, _NEW, bench.dtype)
            works[other]()
        taken = in_turn(works, bench.repeats)
        rows += seconds_rows(part, taken, tokens=_NEW * batch)
        best = min(taken["jmat"])
        figures = {"compile_seconds": max(first - best, 0.0), "step_seconds": best / _NEW}
        rows += [{"map": part, "metric": name, "value": value} for name, value in figures.items()]
        if other not in works:
            rows.append(missing_row(part, "ratio", goal, "torch is not installed."))
            continue
        rows.append(paired_row(part, taken, other, goal))
        same = np.mean(np.asarray(works["jmat"]()) == works[other]())
        rows.append({"map": part, "metric": "same_tokens", "value": float(same)})
    return rows


def _written(bench: Bench, prompts: Int[ndarray, "B T"]) -> tuple[Int[ndarray, " N"], ...]:
    return generate(bench.model, prompts, max_new_tokens=_NEW, stop_tokens=[]).tokens
