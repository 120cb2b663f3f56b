"""One launch writes a run's folder: it locks .lock, and continues while that path is the file it locked.

A launch after .lock was removed locks another file of the same name. The first launch notices after its next
step, and stops without writing; without another launch, it locks a new file instead.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from filelock import FileLock, Timeout

from finetune.engine.base import Engine
from finetune.engine.launch import hosts_without_shared_folder
from finetune.errors import RunFailure, UserError
from finetune.training.run_dir import disk_failure
from finetune.utils import write_atomically

log = logging.getLogger(__name__)

_WAIT_S = 60  # for a launch that is stopping and saving


class RunLock:
    """Lock of a run's folder, for rank 0; the system releases it at the end of the process."""

    def __init__(self, folder: Path):
        self._folder, self._path, self._launch = folder, folder / ".lock", folder / ".launch.json"
        self._locks: list[FileLock] = []
        self._file: tuple[int, int] | None = None  # device and inode of the locked file; None: locks are not supported
        self._written = ""  # this launch's content of .launch.json
        self._checking = threading.Lock()  # shared with the saving thread

    def acquire(self) -> str | None:
        """Takes the lock, or returns its holder for a message. Raises RunFailure if the disk refuses."""
        for seconds in (0, _WAIT_S):
            try:
                self._lock(seconds)
                about = {"host": socket.gethostname(), "process": os.getpid(), "id": uuid.uuid4().hex}
                since = datetime.now(timezone.utc).isoformat(timespec="seconds")
                self._written = json.dumps({**about, "since": since}) + "\n"
                write_atomically(self._launch, self._written)
                return None
            except Timeout:
                if seconds == 0:
                    log.warning("%s is locked by another launch: waiting up to %d s for its end", self._path, _WAIT_S)
            except NotImplementedError:
                log.warning("%s: this file system has no locks: make sure that a run is launched only once", self._path)
                return None
            except OSError as error:
                self.release()
                raise disk_failure(self._folder, error) from error
        return self._holder()

    def is_lost(self) -> bool:
        """Returns whether another launch has taken the folder since .lock was removed. Locks a missing file again."""
        with self._checking:
            if self._file is None or _identity(self._path) == self._file:
                return False
            if self._launch_text() != self._written:  # another launch was here, even if it is gone
                return True
            try:
                self._lock(0)
            except (Timeout, OSError):
                return self._path.exists()  # else the folder is gone: the next write reports it
            log.warning("%s was removed while this run trains: it is locked again", self._path)
            return False

    def failure(self) -> RunFailure:
        """Returns the error of a launch that has lost its folder."""
        return RunFailure(
            f"{self._path} was removed and another launch{self._holder()} has taken {self._folder}. This one stops and "
            "leaves the folder to it. Fix: stop a launch before another one begins, or use another `run.name`"
        )

    def release(self) -> None:
        for lock in self._locks:
            lock.release()
        self._locks, self._file = [], None

    def _lock(self, seconds: float) -> None:
        lock = FileLock(self._path, thread_local=False)
        lock.acquire(timeout=seconds)
        self._locks.append(lock)
        self._file = _identity(self._path)

    def _launch_text(self) -> str | None:
        try:
            return self._launch.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None

    def _holder(self) -> str:
        try:
            holder = json.loads(self._launch_text() or "")
            return f" (process {holder['process']} on {holder['host']}, since {holder['since']})"
        except (ValueError, LookupError, TypeError):
            return " (which one is unknown)"


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


@contextlib.contextmanager
def in_use(engine: Engine, folder: Path) -> Iterator[RunLock]:
    """Holds the run's lock, on rank 0. Collective.

    Raises UserError on all ranks if another launch of the same run holds it, or if the path is a different folder on
    other machines.
    """
    lock = RunLock(folder)
    if holder := engine.ranks.gather(lock.acquire() if engine.is_main else None)[0]:
        raise UserError(
            f"another launch is training in {folder}{holder}. Fix: stop it, or use another `run.name`; if it is gone, "
            f"remove {folder / '.lock'}"
        )
    several_machines = engine.local_processes < engine.world_size
    if several_machines and (hosts := hosts_without_shared_folder(engine.ranks.gather, engine.rank, folder)):
        raise UserError(
            f"run.dir: {folder.resolve()} is not the same folder on {', '.join(hosts)} and on rank 0's machine. A "
            "checkpoint has a file of every rank. Fix: choose a `run.dir` on a file system that all machines share"
        )
    try:
        yield lock
    finally:
        lock.release()
