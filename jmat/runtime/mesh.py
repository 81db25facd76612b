"""Devices: one axis, over which batches are sharded; parameters are replicated, or
sharded where they are large.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Tree = TypeVar("Tree")

DATA_AXIS = "data"


def data_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a mesh of one axis, `data`, over `devices` (default: all of them, on all
    hosts).

    The axis type is Auto: the compiler places the collectives, as for any `jax.jit` on
    sharded inputs.
    """
    devices = jax.devices() if devices is None else list(devices)
    if not devices:
        raise ValueError("A mesh needs at least one device, got none.")
    return jax.make_mesh(
        (len(devices),), (DATA_AXIS,), axis_types=(AxisType.Auto,), devices=devices
    )


def local_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of `devices` (default: all of this process), over which batches
    are sharded.
    """
    return data_mesh(devices or jax.local_devices())


def usual_batch(devices: Sequence[jax.Device] | None = None) -> int:
    """Returns the number of tokens in one forward pass that suit the devices (default:
    all local ones): 4,096 for each accelerator.

    On a CPU 1,024 in all: its caches hold a block's activations then. With 4,096 tokens
    the same products take a quarter to a third longer, much of it in the system, which
    hands out fresh memory for every array.
    """
    devices = devices or jax.local_devices()
    return 1024 if devices[0].platform == "cpu" else 4096 * len(devices)


def replicate(mesh: Mesh, tree: Tree) -> Tree:
    """Returns the tree with a full copy of every leaf on every device of the mesh.

    A device that holds a leaf already keeps it, and a leaf that stands in several
    places is copied once.
    """
    leaves, structure = jax.tree.flatten(tree)
    several = {id(leaf): leaf for leaf in leaves}
    copies = jax.device_put(list(several.values()), NamedSharding(mesh, PartitionSpec()))
    of_leaf = dict(zip(several, copies, strict=True))
    return jax.tree.unflatten(structure, [of_leaf[id(leaf)] for leaf in leaves])


def parameter_sharding(mesh: Mesh, shape: Sequence[int]) -> NamedSharding:
    """Returns the sharding of a parameter: along the largest axis that the number of
    devices divides; a copy on each device where there is none.
    """
    divisible = [axis for axis, size in enumerate(shape) if size and size % mesh.size == 0]
    axis = max(divisible, key=lambda axis: shape[axis], default=None)
    split = () if axis is None else (*(None,) * axis, DATA_AXIS)
    return NamedSharding(mesh, PartitionSpec(*split))


def shard_parameters(mesh: Mesh, model: Tree) -> Tree:
    """Splits every parameter over the devices, for models larger than one of them
    (`parameter_sharding`).

    A block's parameters are gathered while it runs, and only then. The result goes
    wherever the model does.
    """
    return jax.device_put(
        model, jax.tree.map(lambda leaf: parameter_sharding(mesh, np.shape(leaf)), model)
    )


def place(model: Tree, mesh: Mesh | None = None) -> Tree:
    """Returns the model on all devices of a mesh, by default those of this process.

    A model that is there already, replicated or sharded, is returned itself:
    `jmat.load` places every model, and no pass copies it again. Else each device gets a
    full copy, or keeps its own.
    """
    mesh = mesh or local_mesh()
    return (
        model
        if all(_is_placed(leaf, mesh) for leaf in jax.tree.leaves(model))
        else replicate(mesh, model)
    )


def _is_placed(leaf: object, mesh: Mesh) -> bool:
    return (
        isinstance(leaf, jax.Array)
        and isinstance(leaf.sharding, NamedSharding)
        and leaf.sharding.mesh == mesh
    )


def gathered(array: object) -> NamedSharding | None:
    """Returns the sharding of a split array once each device has all of it; None if it
    is not split, or is traced.
    """
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        return None
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec())


def settled(tree: Tree, whole: NamedSharding | None) -> Tree:
    """Returns the result of a program that gathers sharded parameters; on CPU devices,
    waits for it.

    These devices share a pool of threads. A gathering program needs a thread for each
    of them at once, and one that is dispatched beside it can take the last: then both
    would wait for ever, until XLA aborts the process.
    """
    if whole is not None and whole.mesh.devices.flat[0].platform == "cpu":
        jax.block_until_ready(tree)
    return tree


def shard_batch(mesh: Mesh, tree: Tree) -> Tree:
    """Splits the first axis of every leaf over the devices of the mesh.

    Raises ValueError where the first axis is not a multiple of the number of devices.
    """
    for leaf in jax.tree.leaves(tree):
        rows = np.shape(leaf)[0] if np.ndim(leaf) else 0
        if rows == 0 or rows % mesh.size:
            raise ValueError(
                f"A batch of {rows} rows cannot be split over {mesh.size} devices: "
                "choose a batch size that is a positive multiple of the number of devices."
            )
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(DATA_AXIS)))


def row_by_row(function: Callable[[jax.Array], Tree], mesh: Mesh) -> Callable[[jax.Array], Tree]:
    """Returns the function for rows that are split over the devices: each takes its own
    rows alone.

    For what the compiler would else gather on all devices, such as `jax.lax.top_k`.
    """
    rows = PartitionSpec(DATA_AXIS)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows))
