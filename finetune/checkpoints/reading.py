"""Reads a checkpoint beside the run that deletes old ones: a shared lock on its manifest keeps it until it is read.

    reader    opens manifest.json, locks it shared, sees that the folder is still there
    deleter   locks it alone, or leaves the checkpoint to its next turn; renames it before it lets go

The system releases a lock at the end of a process. A file system without locks gives no protection: the reader is told.
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
        """file: descriptor of the locked manifest; None of a damaged checkpoint that has none."""
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
        return Held(None)  # cannot be read: whoever reads it says why
    held = Held(file)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:
        pass  # no locks here
    return held if _is_at(file, folder) else None


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Whether nobody reads a checkpoint, and nobody begins to within."""
    try:
        file = os.open(folder / _MANIFEST, os.O_RDWR)  # over NFS, an exclusive lock wants a file that is written to
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


def _is_at(file: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(folder / _MANIFEST))
    except OSError:
        return False
