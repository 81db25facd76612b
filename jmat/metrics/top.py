"""The largest of many scores, and where they are."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_SIZES = range(16, 129)  # of blocks
_USUAL = 64


def top_k(scores: Float[Array, "N V"], k: int) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
    """Returns the k largest scores of each row and their indices, as `jax.lax.top_k`:
    the largest first, and of equal ones the lower index first.

    `jax.lax.top_k` gathers rows that lie on several devices, and on a CPU it sorts the
    whole row wherever its result is sliced; `argmax` takes ten times as long as `max`
    there. So only blocks are compared as a whole: the k largest scores lie in the k
    blocks with the largest maxima, since each of these blocks holds one score that
    comes before all scores of the other blocks.
    """
    V = scores.shape[-1]
    # blocks that fill the row need no copy of it
    size = next((size for size in reversed(_SIZES) if V % size == 0), _USUAL)
    count = V // size
    if count <= k:
        ids = _first(scores, k)
        return _at(scores, ids), ids
    blocks = scores[:, : count * size].reshape(-1, count, size)
    # in the order of their indices, which decides between equal scores
    chosen = jnp.sort(_first(jnp.max(blocks, axis=-1), k), axis=-1)
    inside = jnp.arange(size, dtype=chosen.dtype)
    ids = (chosen[:, :, None] * size + inside).reshape(-1, k * size)
    rest = jnp.arange(count * size, V, dtype=ids.dtype)  # behind the last whole block
    ids = jnp.concatenate([ids, jnp.broadcast_to(rest, (len(ids), len(rest)))], axis=1)
    held = _at(scores, ids)
    places = _first(held, k)
    return _at(held, places), _at(ids, places)


def _first(values: Float[Array, "N M"], k: int) -> Int[Array, "N k"]:
    """Returns the indices of the k largest values, one by one."""
    indices = jnp.arange(values.shape[-1], dtype=jnp.int32)
    # −inf is for those that were taken
    left = jnp.maximum(values, jnp.finfo(values.dtype).min)
    taken = []
    for _ in range(k):
        at = jnp.argmax(left, axis=-1).astype(jnp.int32)
        left = jnp.where(indices == at[:, None], -jnp.inf, left)
        taken.append(at)
    return jnp.stack(taken, axis=1)


@jax.vmap
def _at(row: Array, ids: Int[Array, " k"]) -> Array:
    return row[ids]
