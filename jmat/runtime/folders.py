"""Claims output folders: a lock keeps a second run out, and run.json says whose the
folder is.

Only what run.json lists is ever replaced or moved: everything else in the folder is the
user's.
"""

import contextlib
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Collection, Iterator
from types import TracebackType

import numpy as np

from jmat.runtime.annotations import Fields
from jmat.runtime.files import discard_temporary, is_temporary, local_path
from jmat.runtime.locks import FolderLock
from jmat.runtime.replaced import REPLACED, is_half_moved, move_aside, move_back
from jmat.runtime.run_file import RESULTS, RUN, Owner, not_ours, read_owner, to_json, write_owner

_FINISHED = ".checkpoints.finished"  # snapshots that are being deleted


class OutputFolder:
    """Holds the claim of a run on its output folder, from before its first file until
    `release`.

    It is a context manager.

    Attributes:
      folder: its path.
      moved: the folder into which another run's files were moved, if there were any.
      locked: False where the file system has no locks: then nothing keeps a second run
        out.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        owner: Owner,
        writes: Collection[str],
        lock: FolderLock,
        made: Collection[pathlib.Path],
    ) -> None:
        """Takes the fields of a claim; called by `claim_output_folder` alone."""
        self.folder, self.locked = folder, lock.works
        self.moved: pathlib.Path | None = None
        self._owner, self._writes, self._lock, self._made = owner, {RESULTS, *writes}, lock, made

    def path(self, name: str) -> pathlib.Path:
        """Returns the path of a file or folder that is to be written next, and lists it
        in run.json.

        Raises:
          ValueError: the run had not said that it writes this; or somebody else has put
            such a file there meanwhile.
        """
        if name not in self._writes:
            raise ValueError(f"{self._owner.experiment} writes {name}, which it had not claimed.")
        if name not in self._owner.wrote:
            if os.path.lexists(self.folder / name):
                raise ValueError(not_ours(self.folder, name))
            self._owner.wrote.append(name)
            write_owner(self.folder, self._owner)
        return self.folder / name

    def release(self) -> None:
        """Lets others use the folder. Where nothing was written, all is as it was
        before the run.
        """
        with contextlib.suppress(OSError):
            written = [name for name in self._owner.wrote if os.path.lexists(self.folder / name)]
            if written:
                if written != self._owner.wrote:
                    write_owner(self.folder, self._owner._replace(wrote=written))
            elif (self.folder / REPLACED / RUN).is_file():
                move_back(self.folder)
            else:
                (self.folder / RUN).unlink(missing_ok=True)
        _let_go(self._lock, self._made)

    def __enter__(self) -> "OutputFolder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def claim_output_folder(
    out: str | os.PathLike[str],
    experiment: str,
    config: Fields,
    *,
    writes: Collection[str] = (),
    reads: Collection[str] = (),
    overwrite: bool = False,
) -> OutputFolder:
    """Claims the folder `out` for this run before any long work starts, and returns the
    claim.

    A folder of the same experiment with the same flags is taken over as it is, so that
    a run can be resumed. Temporary files that killed runs left are deleted.

    Args:
      out: the folder; made if it is not there.
      experiment: its name.
      config: its flags, without those that do not matter to the results.
      writes: names of the files and folders that the run may write there, beside
        results.json.
      reads: names of the flags that can name files.
      overwrite: take the folder from another run. What that run wrote moves to
        OUT/.replaced, and is deleted when there are new results.

    Raises:
      ValueError: a flag is not a finite number, or names something that the run would
        replace; another run is working in the folder; it belongs to another experiment
        or to other flags (all of them named), holds files that no run wrote where this
        one would write, or cannot be written.
    """
    for name, value in config.items():
        if isinstance(value, float) and not np.isfinite(value):
            raise ValueError(f"--{name}={value}: expected a finite number.")
    folder = output_path(out)
    mine = Owner(experiment, json.loads(to_json(dict(config))), [])
    with _in_one_sentence(out):
        made, lock = _hold(folder, experiment)
        try:
            if is_half_moved(folder):
                move_back(folder)  # a process was killed while it moved files there, or back
            owner = read_owner(folder, overwrite=overwrite)
            ours = {RESULTS, *writes, *owner.wrote}
            _sweep(folder, ours, owner.wrote)
            _check_reads(folder, config, reads, ours)
            resumed, replaced = _check_owner(folder, owner, mine, overwrite=overwrite)
            if foreign := [
                n
                for n in (RESULTS, *writes)
                if os.path.lexists(folder / n) and n not in owner.wrote
            ]:
                raise ValueError(not_ours(folder, foreign[0]))
            own = [RESULTS, *(name for name in owner.wrote if resumed and name != RESULTS)]
            claim = OutputFolder(folder, mine._replace(wrote=own), writes, lock, made)
            if replaced:
                claim.moved = move_aside(folder, replaced)
            write_owner(folder, claim._owner)
            return claim
        except BaseException:
            _let_go(lock, made)
            raise


def check_output_folder(out: str | os.PathLike[str]) -> None:
    """Raises ValueError where `out` cannot be written, is not a run's folder, or
    another run is working in it.

    It is for what takes long and comes before a run can claim its folder; all stays as
    it is.
    """
    folder = output_path(out)
    with _in_one_sentence(out):
        made, lock = _hold(folder, "a run that begins")
        try:
            if not (folder / REPLACED / RUN).exists():
                read_owner(folder, overwrite=True)
        finally:
            _let_go(lock, made)


def output_path(out: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path of an output folder, `~` expanded. Raises ValueError where `out`
    is empty or names no user.
    """
    if not os.fspath(out):
        raise ValueError("--out is empty; expected a folder, or leave it out.")
    try:
        return pathlib.Path(out).expanduser()
    except RuntimeError:
        raise ValueError(f"--out={out}: there is no such user.") from None


@contextlib.contextmanager
def _in_one_sentence(out: str | os.PathLike[str]) -> Iterator[None]:
    """Turns errors of the operating system into ValueError with a sentence about --out."""
    try:
        yield
    except BlockingIOError as error:
        raise ValueError(
            f"another run is working in {out} ({error.strerror}): wait until it has ended, or "
            "choose another --out."
        ) from None
    except OSError as error:
        reason = (error.strerror or str(error)).rstrip(".")
        raise ValueError(
            f"cannot use {out} as output folder: {reason}; choose another --out."
        ) from None


def _hold(folder: pathlib.Path, holder: str) -> tuple[list[pathlib.Path], FolderLock]:
    """Makes and locks a folder. Returns the folders that were not there before, the
    innermost first, and the lock.
    """
    missing: list[pathlib.Path] = []
    for path in (folder, *folder.parents):
        try:
            os.stat(path)
            break
        except FileNotFoundError:
            missing.append(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return missing, FolderLock(folder, holder)
    except BaseException:
        _let_go(None, missing)
        raise


def _let_go(lock: FolderLock | None, made: Collection[pathlib.Path]) -> None:
    """Gives the lock back, and deletes those of the folders made that are empty."""
    if lock is not None:
        lock.release()
    with contextlib.suppress(OSError):
        for path in made:
            path.rmdir()


def _check_owner(
    folder: pathlib.Path, owner: Owner, mine: Owner, *, overwrite: bool
) -> tuple[bool, list[str]]:
    """Returns whether a run goes on in its own folder, and else which files of another
    run are to be replaced.
    """
    differing = [
        key
        for key in {**owner.config, **mine.config}
        if owner.config.get(key) != mine.config.get(key)
    ]
    if owner.experiment == mine.experiment and not differing:
        return True, []
    left = [name for name in owner.wrote if os.path.lexists(folder / name)]
    # a run that failed before it wrote anything leaves nothing to protect
    if overwrite or not left:
        return False, left
    if owner.experiment != mine.experiment:
        raise ValueError(
            f"{folder} belongs to experiment {owner.experiment}, this is {mine.experiment}; choose "
            "another --out, or --overwrite to replace it."
        )
    flags = ", ".join(
        f"--{key} was {owner.config.get(key)!r} and is {mine.config.get(key)!r}"
        for key in sorted(differing)
    )
    raise ValueError(
        f"{folder} belongs to a run with other flags ({flags}); choose another --out, such as "
        f"--out={_free_beside(folder)}, or --overwrite to replace it."
    )


def _free_beside(folder: pathlib.Path) -> pathlib.Path:
    """Returns the first of FOLDER-2, FOLDER-3, … that is not there."""
    names = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(path for path in names if not os.path.lexists(path))


def _check_reads(
    folder: pathlib.Path, config: Fields, reads: Collection[str], ours: Collection[str]
) -> None:
    """Raises ValueError where a flag names a file or folder among those that runs in
    this folder write.
    """
    home = pathlib.Path(os.path.realpath(folder))
    given = [(flag, config[flag]) for flag in reads if config.get(flag)]
    for flag, name in (
        (flag, name) for flag, v in given for name in (v if isinstance(v, list | tuple) else [v])
    ):
        path = local_path(str(name))
        if path is None or not path.is_relative_to(home) or not os.path.exists(path):
            continue
        inside = path.relative_to(home).parts
        if not inside or inside[0] in (*ours, REPLACED):
            raise ValueError(
                f"--{flag}={name} lies in the output folder {folder}, which is written to: choose "
                "another --out."
            )


def _sweep(folder: pathlib.Path, ours: Collection[str], wrote: Collection[str]) -> None:
    """Deletes what killed runs left half-written: temporary files, and snapshots that
    were being deleted.
    """
    for path in folder.iterdir():
        if is_temporary(path.name) in {RUN, *ours} and path.is_file():
            path.unlink(missing_ok=True)
    if "checkpoints" in wrote:
        shutil.rmtree(folder / _FINISHED, ignore_errors=True)
    for name in {"model", "steps"} & set(wrote):
        discard_temporary((folder / name).rglob("*"))
