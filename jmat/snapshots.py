"""What a killed pass over text goes on from: its sums and the number of batches in them, on disk every few minutes."""

import contextlib
import dataclasses
import hashlib
import logging
import os
import pathlib
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Float64

from jmat import resume
from jmat.data.packing import Batch

State = TypeVar("State")

_ROW = 2**16  # a snapshot is one array [R, 65536]: of many, Orbax tells about errors in the threads of all


class Terminated(Exception):  # noqa: N818 (nothing went wrong)
    """SIGTERM came. What was done by then is on disk; the message says how far that is."""


@dataclasses.dataclass(frozen=True)
class Snapshots:
    """Where a pass over text writes its snapshots, how often, and whose they are.

    A snapshot holds every device's own sums (`jmat.moments.Moments` states their size); the newest two are kept.

    Attributes:
        folder: of this pass alone: several passes, or several hosts, have one each.
        every: seconds between two.
        owner: what decides the sums, by name, such as the model's hash; all of it must be the same to go on.
        say: is told where a pass goes on.
    """

    folder: pathlib.Path
    every: float | int
    owner: Mapping[str, Any]
    say: Callable[[str], Any] = lambda _: None


def text_hash(batches: Sequence[Batch]) -> str:
    """Fingerprint of what a pass reads, in its order."""
    return short_hash(*(np.ascontiguousarray(field).data for batch in batches for field in batch))


def short_hash(*content: Any) -> str:
    """16 hex digits of SHA-256 over bytes."""
    digest = hashlib.sha256()
    for part in content:
        digest.update(part)
    return digest.hexdigest()[:16]


def go_on(states: Callable[[int, State], Iterator[State]], start: State, total: int, snapshots: Snapshots) -> State:
    """The state after the last batch, from the newest snapshot on, if there is one; writes snapshots on the way.

    After the last batch there is another snapshot if there was one before: what comes next may be killed, too.

    Args:
        states: (number of batches done, the state after them) → the state after each further batch. Each may be used
            up when the next one is asked for.
        start: the state before the first batch, float64, placed on the devices.
        total: number of batches.
        snapshots: where and how often.

    Raises:
        Terminated: SIGTERM came; the state after the batch that was read then is on disk.
        ValueError: the snapshots there belong to something else, or are damaged.
        OSError: a snapshot cannot be written, at once or in the background. Those before it are untouched.
    """
    with _opened(snapshots.folder) as manager, resume.sigterm_received() as received:
        done, state = _newest(manager, start, snapshots)
        if done:
            snapshots.say(f"going on after batch {done} of {total}, from {snapshots.folder}")
        last, written, stopped = time.monotonic(), done > 0, False
        for now in states(done, state):
            state, done, stopped = now, done + 1, bool(received)
            due = time.monotonic() - last >= snapshots.every or (done == total and written)
            with _told_in_one_sentence(snapshots.folder):
                resume.raise_errors(manager)
                if due or stopped:
                    resume.save(manager, done, {"sums": _flat(state)}, about=snapshots.owner)
                    last, written = time.monotonic(), True
            if stopped:
                break
        with _told_in_one_sentence(snapshots.folder):
            manager.wait_until_finished()
    if stopped:
        raise Terminated(
            f"stopped by SIGTERM after batch {done} of {total}; start again with the same flags to go on from there."
        )
    if received:  # after the last batch: as if it had come a moment later
        signal.raise_signal(signal.SIGTERM)
    return state


def discard(folder: pathlib.Path) -> None:
    """Deletes the snapshots of a run that has finished; killed in the middle of it, none is left that is half there."""
    trash = folder.with_name(f".{folder.name}.finished")
    shutil.rmtree(trash, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def _newest(manager: Any, start: State, snapshots: Snapshots) -> tuple[int, State]:
    """(batches done, the state after them) of the newest snapshot; (0, start) where there is none."""
    step = manager.latest_step()
    if step is None:
        return 0, start
    theirs, mine = resume.about(manager, step), dict(snapshots.owner)
    differing = [
        f"{name} was {theirs.get(name)} and is {mine[name]}" for name in mine if theirs.get(name) != mine[name]
    ]
    if differing:
        raise ValueError(
            f"the snapshots in {snapshots.folder} are of another run ({'; '.join(differing)}): make that as it "
            "was, choose another --out, or --overwrite to begin anew."
        )
    leaves, structure = jax.tree.flatten(start)
    empty = np.broadcast_to(np.zeros(1), (_rows(leaves), _ROW))
    flat = resume.restore(manager, {"sums": empty}, step)["sums"].reshape(-1)
    ends = np.cumsum([leaf.size for leaf in leaves])
    with jax.enable_x64(True):
        parts = [flat[end - leaf.size : end].reshape(leaf.shape) for leaf, end in zip(leaves, ends, strict=True)]
        placed = [jax.device_put(part, leaf.sharding) for part, leaf in zip(parts, leaves, strict=True)]
    return step, jax.tree.unflatten(structure, placed)


def _flat(state: Any) -> Float64[np.ndarray, "R 65536"]:
    """All numbers of a state on the host, one leaf after another; zeros fill the last row."""
    leaves = jax.tree.leaves(state)
    flat, start = np.zeros((_rows(leaves), _ROW)), 0
    for leaf in leaves:
        flat.reshape(-1)[start : start + leaf.size] = np.asarray(leaf).reshape(-1)
        start += leaf.size
    return flat


def _rows(leaves: Sequence[Any]) -> int:
    return -(-sum(leaf.size for leaf in leaves) // _ROW)


@contextlib.contextmanager
def _opened(folder: pathlib.Path) -> Iterator[Any]:
    """The manager of a folder's snapshots. Orbax logs pages about errors that it raises as well: not shown."""
    logger, quiet = logging.getLogger("absl"), lambda record: "orbax" not in record.pathname
    logger.addFilter(quiet)
    try:
        with _told_in_one_sentence(folder):
            manager = resume.open_checkpoints(folder)
        try:
            yield manager
        finally:
            with contextlib.suppress(Exception):  # what went wrong in the background was raised before
                manager.close()
    finally:
        logger.removeFilter(quiet)


@contextlib.contextmanager
def _told_in_one_sentence(folder: pathlib.Path) -> Iterator[None]:
    """Orbax and TensorStore raise errors of many kinds."""
    try:
        yield
    except Exception as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        number = int(code[1]) if code else error.errno if isinstance(error, OSError) else None
        reason = os.strerror(number) if number else " ".join(str(error).split())[:300]
        raise OSError(
            f"cannot write a snapshot in {folder}: {reason}; those written before are kept. Start again when this is "
            "mended, or with --snapshot_every=0, which neither writes nor reads any."
        ) from error
