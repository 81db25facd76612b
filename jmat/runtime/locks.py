"""Locks a folder until the process that holds the lock ends, however that happens."""

import errno
import os
import pathlib
import socket

try:
    import fcntl
except ImportError:  # there are no such locks on Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".jmat-lock"
# What `flock` says where a file system has no locks, as some network file systems.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class FolderLock:
    """Locks a folder: while one process holds it, no other can take it.

    It is an operating system's lock (`flock`) on the file `.jmat-lock` in the folder,
    so a process that is killed holds it no longer. A child that the process forks holds
    it, too, as long as it lives; one that runs another program does not.

    Attributes:
      works: False where the file system has no locks. Then nothing keeps other
        processes out.
    """

    def __init__(self, folder: pathlib.Path, holder: str) -> None:
        """Takes the lock.

        Args:
          folder: must exist.
          holder: who has it, for the errors of others, such as the name of an
            experiment.

        Raises:
          BlockingIOError: another process has it; the message says which.
          OSError: the folder cannot be written.
        """
        self._path, self.works = folder / LOCK, fcntl is not None
        while True:
            self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if self.works:
                    fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                who = os.read(self._handle, 1000).decode(errors="replace").strip()
                os.close(self._handle)
                raise BlockingIOError(errno.EWOULDBLOCK, who or "another process") from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    os.close(self._handle)
                    raise
                self.works = False
            if self._is_there():  # else its last holder has deleted it between our two calls
                break
            os.close(self._handle)
        self._owner = os.getpid()
        os.ftruncate(self._handle, 0)
        os.pwrite(
            self._handle, f"{holder}, process {self._owner} on {socket.gethostname()}\n".encode(), 0
        )

    def release(self) -> None:
        """Gives the lock back and deletes its file; in a forked child, only closes it."""
        if self._owner == os.getpid() and self._is_there():
            self._path.unlink(missing_ok=True)
        os.close(self._handle)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._handle), os.stat(self._path))
        except OSError:
            return False
