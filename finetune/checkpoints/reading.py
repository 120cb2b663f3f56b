"""Reads a checkpoint while the run deletes old ones: a shared lock on its manifest protects it.

    reader    opens manifest.json, locks it shared, checks that the folder still exists
    deleter   locks it exclusively, or retries at its next turn; renames the folder before unlocking

The system releases a lock at the end of a process. A file system without locks gives no protection; readers report it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

_MANIFEST = "manifest.json"


class Held:
    """A checkpoint that is not deleted as long as this object lives."""

    def __init__(self, file: int | None):
        """file: descriptor of the locked manifest; None for a damaged checkpoint without one."""
        self._file = file

    def release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __del__(self) -> None:
        self.release()


def hold(folder: Path) -> Held | None:
    """Returns a hold on a checkpoint; None if it is gone, or being deleted."""
    try:
        file = os.open(folder / _MANIFEST, os.O_RDONLY)
    except FileNotFoundError:
        return Held(None) if folder.is_dir() else None
    except OSError:
        return Held(None)  # cannot be read: the reader reports why
    held = Held(file)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:
        pass  # no locks on this file system
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(file), os.stat(folder / _MANIFEST)):
            return held
    return None  # renamed, or replaced, before it was locked


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Yields whether no process reads a checkpoint; none can begin within."""
    try:
        file = os.open(folder / _MANIFEST, os.O_RDWR)  # over NFS, an exclusive lock needs a file opened for writing
    except OSError:
        yield True
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except BlockingIOError:
        free = False
    except OSError:
        free = True
    try:
        yield free
    finally:
        os.close(file)
