"""The loop over batches through which everything that runs a model over a corpus goes.

    plan = packed_batches(split, …)                       # batches on the host, of few shapes
    values = sweep(plan, lambda batch: run(model, batch.tokens, …)[1])

Every batch is split over the devices of this process, and the batches are shared out
among the processes. Devices compute asynchronously: while they work on one batch the
host prepares the next one, and copies back the values of the last one. Each value goes
to the place of its example, so the order of the batches does not show.
"""

import collections
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int, Shaped
from numpy import ndarray

from jmat.runtime import hosts
from jmat.runtime.annotations import PyTree
from jmat.runtime.mesh import local_mesh, shard_batch
from jmat.runtime.progress import track

IN_FLIGHT = 2  # batches that the devices may have before the values of the first are fetched


@runtime_checkable
class HoldsExamples(Protocol):
    """Describes a batch on the host, which knows its examples."""

    @property
    def examples(self) -> Int[Array | ndarray, "*places"]:
        """Returns the number of the example at each place of the batch; −1 where there
        is none.
        """


Item = TypeVar("Item", bound=HoldsExamples)


class Rows(NamedTuple):
    """Holds a batch of stored vectors, which `take` reads out of their arrays."""

    examples: Int[ndarray, " B"]

    def take(self, values: Shaped[ndarray, "N *rest"]) -> Shaped[ndarray, "B *rest"]:
        """Returns the rows of the examples; where there is none, some other row."""
        return values[self.examples]


def sweep(
    plan: Sequence[Item],
    compute: Callable[[PyTree], PyTree],
    *,
    inputs: Callable[[Item], PyTree] | None = None,
    mesh: Mesh | None = None,
    progress: str | None = None,
) -> PyTree:
    """Computes values for every example of some batches, on all devices and all
    processes.

    Args:
      plan: batches, the same on every process; their rows are a multiple of the
        devices.
      compute: function from a batch's inputs, sharded over the devices, to a pytree of
        arrays whose first axes are those of `examples`. It is no `jax.jit` program
        itself, but calls some, and waits for none of them.
      inputs: function from a batch to the arrays that `compute` takes; by default the
        batch. It is called when it is the batch's turn, so that no more than one is
        prepared ahead.
      mesh: the devices; by default all of this process.
      progress: label of the progress bar; by default none is shown.

    Returns:
      The pytree of `compute`, as numpy arrays with one row an example in the order of
      their numbers; half precision becomes float32. Every process gets the values of
      all.
    """
    numbers = example_numbers(plan)
    share = own_share(plan)
    pending: collections.deque[tuple[Int[ndarray, "*places"], list[jax.Array]]] = (
        collections.deque()
    )
    values: list[ndarray] = []
    structure = None

    def fetch() -> None:
        examples, leaves = pending.popleft()
        real = examples >= 0
        at = np.searchsorted(numbers, examples[real])
        for k, leaf in enumerate(leaves):
            got = np.asarray(leaf)
            if len(values) == k:
                kept = (
                    np.float32
                    if jnp.issubdtype(got.dtype, jnp.floating) and got.itemsize < 4
                    else got.dtype
                )
                values.append(_empty((len(numbers), *got.shape[examples.ndim :]), np.dtype(kept)))
            values[k][at] = got[real]

    for item, batch in on_devices(share, inputs=inputs, mesh=mesh, progress=progress):
        leaves, structure = jax.tree.flatten(compute(batch))
        for leaf in leaves:
            leaf.copy_to_host_async()
        pending.append((np.asarray(item.examples), leaves))
        if len(pending) > IN_FLIGHT:
            fetch()
    while pending:
        fetch()
    mine = np.searchsorted(numbers, example_numbers(share))
    for value in values:
        hosts.fill_in(value, mine)
    return jax.tree.unflatten(structure, values)


def on_devices(
    plan: Sequence[Item],
    *,
    inputs: Callable[[Item], PyTree] | None = None,
    mesh: Mesh | None = None,
    progress: str | None = None,
) -> Iterator[tuple[Item, PyTree]]:
    """Yields every batch with its inputs, sharded over the devices; for loops that
    carry a state.

    Takes the arguments of `sweep`. All batches come on every process: `own_share`
    leaves some out.
    """
    mesh = mesh or local_mesh()
    for item in track(plan, progress):
        yield item, shard_batch(mesh, item if inputs is None else inputs(item))


def own_share(plan: Sequence[Item]) -> list[Item]:
    """Returns the batches that this process computes; the first one where there are too
    few.
    """
    return hosts.share(plan) or list(plan[:1])


def example_numbers(plan: Sequence[HoldsExamples]) -> Int[ndarray, " N"]:
    """Returns the numbers of all examples in the batches, in rising order."""
    given = [np.asarray(item.examples).reshape(-1) for item in plan]
    numbers = np.sort(np.concatenate([np.empty(0, np.int32), *given]))
    return numbers[np.searchsorted(numbers, 0) :]


def stored_rows(count: int, most: int, *, mesh: Mesh | None = None) -> list[Rows]:
    """Returns a plan over stored vectors: batches of one shape, of at most `most` rows.

    Few vectors get a smaller batch, of the next power of two.

    Args:
      count: number of vectors.
      most: rows of a batch, unless there are more devices.
      mesh: the devices; by default all of this process.
    """
    devices = (mesh or local_mesh()).size
    size = min(most, 1 << max(count - 1, 0).bit_length())
    size = -(-size // devices) * devices
    places = np.arange(-(-count // size) * size, dtype=np.int32).reshape(-1, size)
    return [Rows(np.where(row < count, row, np.int32(-1))) for row in places]


# bytes; a CPU device of XLA's reads arrays that begin there without a copy of its own
_ALIGNMENT = 64


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> Shaped[ndarray, "*shape"]:
    """Returns an array as `np.empty` does, aligned for XLA."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
