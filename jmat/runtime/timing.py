"""Wall clock: contenders run in turn, so that a machine that is busy with something
else slows all of them.
"""

import statistics
import time
from collections.abc import Callable, Mapping

import jax

from jmat.runtime.annotations import PyTree

Work = Callable[[], PyTree]


def seconds(work: Work) -> float:
    """Returns the seconds of one call, until its results are there."""
    begin = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - begin


def in_turn(
    works: Mapping[str, Work], repeats: int, *, budget: float | int = float("inf")
) -> dict[str, list[float]]:
    """Returns the seconds of every call: each contender once, then each again,
    `repeats` times.

    Once `budget` seconds have gone by, no further round begins; the first one always
    runs.
    """
    taken: dict[str, list[float]] = {name: [] for name in works}
    began = time.perf_counter()
    for k in range(repeats):
        if k and time.perf_counter() - began > budget:
            break
        for name, work in works.items():
            taken[name].append(seconds(work))
    return taken


def medians(
    works: Mapping[str, Work], *, repeats: int = 5, budget: float | int = 60
) -> dict[str, float]:
    """Returns the median time of each, in seconds, after a first call that compiles."""
    for work in works.values():
        work()
    return {
        name: statistics.median(values)
        for name, values in in_turn(works, repeats, budget=budget).items()
    }
