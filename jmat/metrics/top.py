"""The largest of many scores, and where they are."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_SIZES = range(16, 129)  # of blocks
_USUAL = 64


def top_k(scores: Float[Array, "N V"], k: int) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
    """Returns the k largest scores of each row and their indices, as `jax.lax.top_k`:
    the largest first, and of equal ones the lower index first.

    On a CPU, XLA sorts the whole row wherever the result of `jax.lax.top_k` is sliced,
    and `argmax` takes ten times as long as `max`. So only blocks are compared as a
    whole: the k largest scores lie in the k blocks with the largest maxima, since each
    of these blocks holds one score that comes before all scores of the other blocks.
    """
    N, V = scores.shape
    # blocks that fill the row need no copy of it
    size = next((size for size in reversed(_SIZES) if V % size == 0), _USUAL)
    count = V // size
    if count <= k:
        values, places = jax.lax.top_k(scores, k)
        return values, places
    blocks = scores[:, : count * size].reshape(N, count, size)
    # in the order of their indices, which decides between equal scores
    chosen = jnp.sort(jax.lax.top_k(jnp.max(blocks, axis=-1), k)[1], axis=-1)
    held = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(N, k * size)
    offsets = jnp.arange(size, dtype=chosen.dtype)
    ids = (chosen[:, :, None] * size + offsets).reshape(N, k * size)
    rest = jnp.arange(count * size, V, dtype=ids.dtype)  # behind the last whole block
    held = jnp.concatenate([held, scores[:, count * size :]], axis=1)
    ids = jnp.concatenate([ids, jnp.broadcast_to(rest, (N, len(rest)))], axis=1)
    values, places = jax.lax.top_k(held, k)
    return values, jnp.take_along_axis(ids, places, axis=1)
