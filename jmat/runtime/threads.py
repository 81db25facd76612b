"""Works on several matrices at a time on a CPU, one thread each."""

import concurrent.futures
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import jax
from threadpoolctl import threadpool_limits

from jmat.runtime.precision import allows_float64, float64

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_AT_ONCE = 8


def in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Returns what a function makes of each item, in their order, when the device is
    done with it.

    On CPUs as many items at a time as there are cores, up to `MOST_AT_ONCE`, each in
    one thread: LAPACK's own threads make a factorisation little faster than one does,
    and many times slower where the cores have other work.
    """
    wide = allows_float64()  # a setting of this thread, which others do not inherit

    def done(item: Item) -> Result:
        with float64(wide):
            return jax.block_until_ready(work(item))

    workers = min(os.cpu_count() or 1, MOST_AT_ONCE) if jax.default_backend() == "cpu" else 1
    for start in range(0, len(items), workers):
        group = items[start : start + workers]
        with (
            threadpool_limits(1, user_api="blas"),
            concurrent.futures.ThreadPoolExecutor(len(group)) as pool,
        ):
            results = list(pool.map(done, group))
        yield from results
