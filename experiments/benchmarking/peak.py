"""The rate of bare matrix products, which nothing on the machine can exceed."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jmat.runtime.timing import Work


def matmul_chain(shapes: Sequence[tuple[int, int, int]], dtype: str) -> tuple[Work, float]:
    """Products [N, K] @ [K, M] one after another, and their floating-point operations.

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
