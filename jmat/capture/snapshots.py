"""Saves the sums of a pass over text every few minutes, so that a killed pass goes on
from them.

Every process of several has its own, and needs no other to write or to read them.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import shutil
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from jmat.data.batches import Batch
from jmat.runtime import stopping
from jmat.runtime.annotations import Fields
from jmat.runtime.digests import short_hash
from jmat.runtime.errors import in_one_line
from jmat.runtime.precision import float64
from jmat.runtime.stopping import Terminated

State = TypeVar("State")


@dataclasses.dataclass(frozen=True)
class Snapshots:
    """Holds the settings of a pass's snapshots: their folder, how often they are
    written, and whose they are.

    A snapshot holds every device's own sums (`Moments` states their size); the newest
    two are kept.

    Attributes:
      folder: of this pass alone: several passes, or several hosts, have one each.
      every: seconds between two.
      owner: what decides the sums, by name, such as the model's hash; all of it must be
        the same to go on.
      say: is called with a sentence where a pass goes on from a snapshot.
    """

    folder: pathlib.Path
    every: float | int
    owner: Fields
    say: Callable[[str], object] = lambda _: None


def text_hash(batches: Sequence[Batch]) -> str:
    """Returns a fingerprint of the tokens of a pass and of those that it reads, in its
    order.
    """
    fields = (field for b in batches for field in (b.tokens, b.examples, b.segments, b.positions))
    return short_hash(*(np.ascontiguousarray(field).data for field in fields))


def go_on(
    states: Callable[[int, State], Iterator[State]], start: State, total: int, snapshots: Snapshots
) -> State:
    """Returns the state after the last batch, from the newest snapshot on, if there is
    one; writes snapshots on the way.

    After the last batch there is another snapshot if there was one before: what comes
    next may be killed, too.

    Args:
      states: (number of batches done, the state after them) → the state after each
        further batch. Each may be used up when the next one is asked for.
      start: the state before the first batch, float64, placed on the devices.
      total: number of batches.
      snapshots: where and how often.

    Raises:
      Terminated: SIGTERM came; the state after the batch that was read then is on disk.
      ValueError: the snapshots there belong to something else. One that is damaged is
        told of, and deleted.
      OSError: a snapshot cannot be written. Those before it are untouched.
    """
    with _opened(snapshots.folder) as manager, stopping.sigterm_received() as received:
        done, state = _newest(manager, start, total, snapshots)
        if done:
            snapshots.say(f"going on after batch {done} of {total}, from {snapshots.folder}")
        last, written, stopped = time.monotonic(), done > 0, False
        for now in states(done, state):
            state, done, stopped = now, done + 1, bool(received)
            due = time.monotonic() - last >= snapshots.every or (done == total and written)
            if due or stopped:
                with _told_in_one_sentence(snapshots.folder):
                    manager.save(
                        done,
                        args=_Save(done, jax.tree.leaves(state)),
                        custom_metadata=dict(snapshots.owner),
                    )
                last, written = time.monotonic(), True
            if stopped:
                break
    if stopped:
        raise Terminated(
            f"stopped by SIGTERM after batch {done} of {total}; start again with the same flags to "
            "go on from there."
        )
    if received:  # after the last batch: as if it had come a moment later
        signal.raise_signal(signal.SIGTERM)
    return state


def discard(folder: pathlib.Path) -> None:
    """Deletes the snapshots of a run that has finished; killed in the middle of it,
    none is left that is half there.
    """
    trash = folder.with_name(f".{folder.name}.finished")
    shutil.rmtree(trash, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def _newest(
    manager: ocp.CheckpointManager, start: State, total: int, snapshots: Snapshots
) -> tuple[int, State]:
    """Returns (batches done, the state after them) of the newest snapshot; (0, start)
    where there is none.
    """
    step = manager.latest_step()
    if step is None:
        return 0, start
    mine = dict(snapshots.owner)
    try:
        theirs = dict(manager.metadata(step).custom_metadata or {})
    except Exception:  # whatever Orbax makes of files that are half there
        theirs = {}
    if mine and not theirs:
        return _without(step, "it does not say whose it is", manager, start, total, snapshots)
    differing = [
        f"{name} was {theirs.get(name)} and is {mine[name]}"
        for name in mine
        if theirs.get(name) != mine[name]
    ]
    if differing:
        raise ValueError(
            f"the snapshots in {snapshots.folder} are of another run ({'; '.join(differing)}): "
            "make that as it was, choose another --out, or delete that folder to begin anew."
        )
    if step > total:
        return _without(step, f"there are only {total} batches", manager, start, total, snapshots)
    leaves, structure = jax.tree.flatten(start)
    try:
        values = manager.restore(step, args=_Restore(step, [leaf.size for leaf in leaves]))
    except Exception as error:
        return _without(step, in_one_line(error), manager, start, total, snapshots)
    with float64():
        placed = [
            jax.device_put(value.reshape(leaf.shape), leaf.sharding)
            for value, leaf in zip(values, leaves, strict=True)
        ]
    return step, jax.tree.unflatten(structure, placed)


def _without(
    step: int,
    why: str,
    manager: ocp.CheckpointManager,
    start: State,
    total: int,
    snapshots: Snapshots,
) -> tuple[int, State]:
    """Returns the newest snapshot but for a damaged one, which is deleted."""
    snapshots.say(f"snapshot {step} in {snapshots.folder} is damaged ({why}): it is left out")
    with _told_in_one_sentence(snapshots.folder):
        manager.delete(step)
    return _newest(manager, start, total, snapshots)


_NUMBER = 8  # bytes


class _OneFile(ocp.CheckpointHandler):
    """Writes float64 arrays one after another into one file: nothing is copied, and no
    thread writes in the background.

    Behind them stands the number of batches (8 bytes), so that a snapshot under
    another's number is noticed; files of version 0.1 lack it. The last four bytes are
    the CRC-32 of all others.
    """

    def save(self, directory: pathlib.PurePath, args: "_Save") -> None:
        check = 0
        with open(directory / "sums", "wb") as file:
            for leaf in args.leaves:
                content = np.ascontiguousarray(leaf, np.float64).reshape(-1).view(np.uint8).data
                check = zlib.crc32(content, check)
                file.write(content)
            number = args.batches.to_bytes(_NUMBER)
            file.write(number + zlib.crc32(number, check).to_bytes(4))
            file.flush()
            os.fsync(file.fileno())

    def restore(self, directory: pathlib.PurePath, args: "_Restore") -> list[np.ndarray]:
        with open(directory / "sums", "rb") as file:
            arrays, got = 8 * sum(args.sizes), os.path.getsize(file.name)
            if got not in (arrays + _NUMBER + 4, arrays + 4):
                raise ValueError(f"expected {arrays + _NUMBER + 4} bytes, got {got}")
            values = [np.fromfile(file, np.float64, size) for size in args.sizes]
            number = file.read(got - arrays - 4)
            check = functools.reduce(
                lambda found, value: zlib.crc32(value.view(np.uint8).data, found), values, 0
            )
            if zlib.crc32(number, check) != int.from_bytes(file.read(4)):
                raise ValueError("its checksum is another one")
            if number and int.from_bytes(number) != args.batches:
                raise ValueError(
                    f"it is that after batch {int.from_bytes(number)} under another number"
                )
        return values


@ocp.args.register_with_handler(_OneFile, for_save=True)
@dataclasses.dataclass
class _Save(ocp.args.CheckpointArgs):
    batches: int
    leaves: Sequence[jax.Array]


@ocp.args.register_with_handler(_OneFile, for_restore=True)
@dataclasses.dataclass
class _Restore(ocp.args.CheckpointArgs):
    batches: int
    sizes: Sequence[int]


@contextlib.contextmanager
def _opened(folder: pathlib.Path) -> Iterator[ocp.CheckpointManager]:
    """Opens the manager of a folder's snapshots, which needs no other process.

    Orbax logs pages about errors that it raises as well: they are not shown.
    """
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process{me}"
    )
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2,
        create=False,
        cleanup_tmp_directories=True,
        enable_async_checkpointing=False,
        multiprocessing_options=alone,
    )
    logger, quiet = logging.getLogger("absl"), lambda record: "orbax" not in record.pathname
    logger.addFilter(quiet)
    try:
        with _told_in_one_sentence(folder):
            folder.mkdir(parents=True, exist_ok=True)
            manager = ocp.CheckpointManager(
                folder.resolve(), options=options, item_handlers=_OneFile()
            )
        with contextlib.closing(manager):
            yield manager
    finally:
        logger.removeFilter(quiet)


@contextlib.contextmanager
def _told_in_one_sentence(folder: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            f"cannot write a snapshot in {folder}: {error.strerror or error}; those written before "
            "are kept. Start again when this is mended, or with --snapshot_every=0, which neither "
            "writes nor reads any."
        ) from error
