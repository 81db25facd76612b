"""Wall clock: contenders run in turn, so that a machine that is busy with something else slows all of them."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Work = Callable[[], Any]


def seconds(work: Work) -> float:
    """Of one call, until its results are there."""
    begin = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - begin


def in_turn(works: Mapping[str, Work], repeats: int) -> dict[str, list[float]]:
    """Seconds of every call: each contender once, then each again, `repeats` times."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            taken[name].append(seconds(work))
    return taken


def matmul_chain(shapes: Sequence[tuple[int, int, int]], dtype: str) -> tuple[Work, float]:
    """Products [N, K] @ [K, M] one after another, and their floating-point operations: the machine's peak rate.

    Args:
        shapes: (N, K, M) of each product.
        dtype: of both factors; float64 too.
    """
    with jax.enable_x64(dtype == "float64"):
        keys = iter(jax.random.split(jax.random.key(0), 2 * len(shapes)))
        draw = lambda *shape: jax.random.normal(next(keys), shape, jnp.float32).astype(dtype)  # noqa: E731
        factors = [(draw(N, K), draw(K, M)) for N, K, M in shapes]

    def work() -> list[jax.Array]:
        with jax.enable_x64(dtype == "float64"):
            return [_product(a, b) for a, b in factors]

    work()
    return work, float(sum(2 * N * K * M for N, K, M in shapes))


_product = jax.jit(jnp.matmul)
