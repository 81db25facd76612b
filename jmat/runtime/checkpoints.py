"""Saves and restores Orbax checkpoints of a run's state, from which a killed run goes
on.
"""

import pathlib
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from jmat.runtime.annotations import PyTree
from jmat.runtime.digests import model_hash

State = TypeVar("State")

_HASH = "hash"  # of all arrays: Orbax reads a file with a flipped bit as it is
_CHUNK = 2**26  # bytes that are compressed at once


def open_checkpoints(folder: pathlib.Path, keep: int = 2) -> ocp.CheckpointManager:
    """Opens the manager of the checkpoints in `folder`; the last `keep` stay, each
    written whole or not at all.
    """
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
    return ocp.CheckpointManager(folder.resolve(), options=options)


def save(manager: ocp.CheckpointManager, step: int, state: PyTree) -> None:
    """Saves all arrays of a state, by path. Returns once they are copied; the writing
    goes on in the background.
    """
    if manager.latest_step() != step:
        arrays = _by_path(state)
        chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK), arrays)
        manager.save(
            step,
            args=ocp.args.StandardSave(arrays, chunks),
            custom_metadata={_HASH: model_hash(arrays)},
        )


def restore(
    manager: ocp.CheckpointManager,
    state: State,
    step: int | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> State:
    """Returns the newest checkpoint, or that of a step; `state` where there is none.

    It is placed as the arrays of `state` are; where those are numpy's, it is in numpy
    arrays. Where the state has a `step` that is not the checkpoint's, somebody has
    renamed or copied it; where its arrays are not those that were saved, a file is
    damaged. Then the newest is left out with a line to `say`, and deleted.

    Raises:
      ValueError: the checkpoint's arrays are not those of `state`; that of `step` is
        damaged, or another one's under its number.
    """
    for number in sorted(manager.all_steps(), reverse=True) if step is None else [step]:
        restored, problem = _restore(manager, state, number)
        if problem is None:
            return restored
        if step is not None:
            raise ValueError(f"{problem}: delete it, and start again.")
        say(f"{problem}: it is left out")
        manager.delete(number)
    return state


def _restore(manager: ocp.CheckpointManager, state: State, step: int) -> tuple[State, str | None]:
    """Returns a checkpoint, and a sentence where it is not what was saved under its
    number.
    """
    arrays = _by_path(state)
    abstract = jax.tree.map(_abstract, arrays)
    try:
        restored = manager.restore(step, args=ocp.args.StandardRestore(abstract))
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise ValueError(
            f"checkpoint {step} in {manager.directory} cannot be restored ({error}): it is damaged "
            "or of another version; delete it to go on from the one before, or start afresh with "
            "another --out."
        ) from error
    name = f"checkpoint {step} in {manager.directory}"
    problem = None
    # which older checkpoints lack
    written = (manager.metadata(step).custom_metadata or {}).get(_HASH)
    if written is not None and written != model_hash({path: restored[path] for path in arrays}):
        problem = f"{name} is damaged: its arrays are not those that were saved"
    elif "step" in arrays and (held := int(restored["step"])) != step:
        problem = f"{name} is that of step {held} under another number"
    return jax.tree.unflatten(
        jax.tree.structure(state), [restored[path] for path in arrays]
    ), problem


def mean(manager: ocp.CheckpointManager, state: State, count: int) -> State:
    """Returns the mean of the last `count` checkpoints (of all, where there are fewer),
    array by array.
    """
    states = [restore(manager, state, step) for step in sorted(manager.all_steps())[-count:]]
    return jax.tree.map(
        lambda *leaves: (sum(leaves) / len(leaves)).astype(leaves[0].dtype), *states
    )


def _by_path(state: PyTree) -> dict[str, jax.Array | np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _abstract(array: jax.Array | np.ndarray) -> np.ndarray | jax.ShapeDtypeStruct:
    if isinstance(array, np.ndarray):
        return array
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
