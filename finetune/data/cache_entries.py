"""Entries of the cache: folders that are complete or absent, written by one process while the others wait.

An entry holds tokens, a reference's log-probabilities or a teacher's predictions, with a report.json that says of what
(`of`), by whom (`made`) and how much (`report`). Its name is the key: a hash of everything that its content depends on,
so that a stale entry is never used. Next to it are `<key>.lock`, held while it is written or removed, `<key>.builder`,
its writer, and `<key>.*.tmp`, unfinished folders.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import filelock

from finetune.data.checksums import Damaged
from finetune.data.sources.files import cache_fix, cache_root
from finetune.errors import RunFailure, UserError

Entry = TypeVar("Entry")

log = logging.getLogger(__name__)


def entries_folder() -> Path:
    return cache_root() / "data"


def load_or_write(
    folder: Path, load: Callable[[], Entry | None], write: Callable[[], None], what: str
) -> tuple[Entry, float | None]:
    """Returns the entry in `folder`, and the seconds of `write` if it had to be written first.

    Any number of processes may call it at once: one writes, the others wait for it and log that it `what`. A Damaged
    entry is logged, and written again. Raises UserError if the cache cannot be written, and the errors of `write`.
    """
    with contextlib.suppress(Damaged):
        if (entry := load()) is not None:
            return entry, None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder, what):
            try:
                if (entry := load()) is not None:
                    return entry, None
            except Damaged as damage:
                log.warning("%s: damaged on the disk (%s); it is made again", folder, damage)
            for leftover in _unfinished(folder):  # we hold the lock: its writer is gone
                shutil.rmtree(leftover, ignore_errors=True)
            begun = time.monotonic()
            write()
    except OSError as error:
        raise UserError(
            f"{error.filename or folder}: the data cache cannot be written: {error.strerror or error}. Fix: set "
            f"FINETUNE_CACHE to {cache_fix(error)}"
        ) from None
    with contextlib.suppress(Damaged):
        if (entry := load()) is not None:
            return entry, time.monotonic() - begun
    raise RunFailure(f"{folder}: was written a moment ago and cannot be read. Fix: check the disk, and start again")


def lock_of(folder: Path) -> filelock.BaseFileLock:
    # The file is never removed: a third process could then lock another file of the same name.
    return filelock.FileLock(folder.with_suffix(".lock"))


@contextlib.contextmanager
def _locked(folder: Path, what: str) -> Iterator[None]:
    """Holds the entry's lock; logs once which process it waits for. A process that dies releases its lock."""
    lock, builder = lock_of(folder), folder.with_suffix(".builder")
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        holder = "another process"
        with contextlib.suppress(OSError, ValueError, KeyError):
            written = json.loads(builder.read_text(encoding="utf-8"))
            holder = f"process {written['pid']} on {written['host']}"
        log.warning("waiting for %s, which %s", holder, what)
        lock.acquire()
    except NotImplementedError:
        raise UserError(
            f"{folder.parent}: this file system has no locks. Fix: set FINETUNE_CACHE to a local disk"
        ) from None
    try:
        builder.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}), encoding="utf-8")
        yield
    finally:
        builder.unlink(missing_ok=True)
        lock.release()


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yields an empty folder that replaces `folder` at the end, or is removed after an error. Raises OSError."""
    temporary = _temporary(folder)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if folder.exists():  # damaged, or deleted in part
            _discard(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def made_now(seconds: float) -> dict[str, Any]:
    """Returns `made` of a report. seconds: that writing took."""
    at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"at": at, "host": socket.gethostname(), "seconds": round(seconds, 1)}


def removed(folder: Path) -> str:
    """Removes an entry that turned out damaged in use, so that the next start writes it again; returns a message."""
    try:
        _discard(folder)
    except FileNotFoundError:  # another process was first
        pass
    except OSError as error:
        return f"{folder}: damaged on the disk; remove it ({error.strerror or error})"
    return f"{folder}: damaged on the disk, and removed"


def _temporary(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.tmp")


def _unfinished(folder: Path) -> list[Path]:
    return sorted(folder.parent.glob(f"{folder.name}.*.tmp"))


def _discard(folder: Path) -> None:
    """Renamed first, so that no process reads half of it; one that has mapped it keeps its mapping."""
    aside = _temporary(folder)
    folder.rename(aside)
    shutil.rmtree(aside)


# --- `cache list` and `cache clean`

_UNIT_S = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True)
class CachedEntry:
    """One entry, or an unfinished one. Fields read from its report are None if it cannot be read."""

    key: str
    path: str
    bytes: int
    used: float  # seconds since the epoch
    is_whole: bool  # false: being written, or left by a process that was killed
    of: dict[str, Any] | None = None  # source, format, tokenizer, template, max_length, ...
    made: dict[str, Any] | None = None  # at (UTC), host, seconds
    examples: int | None = None
    tokens: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def list_entries() -> list[CachedEntry]:
    """Returns the entries, the last used first, without those that are removed or renamed meanwhile."""
    root = entries_folder()
    entries = []
    for folder in [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []:
        report, content = folder / "report.json", {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            written = json.loads(report.read_text(encoding="utf-8"))
            counts = {name: written["report"][name] for name in ("examples", "tokens")}
            content = {"of": written["of"], "made": written["made"], **counts}
        with contextlib.suppress(FileNotFoundError):
            used = (report if report.exists() else folder).stat().st_mtime
            size = sum(file.stat().st_size for file in folder.iterdir())
            key, _, rest = folder.name.partition(".")
            entries.append(CachedEntry(key, str(folder), size, used, not rest and report.exists(), **content))
    return sorted(entries, key=lambda entry: (-entry.used, entry.path))


def age_in_seconds(text: str) -> int:
    """
    >>> age_in_seconds("30d")
    2592000

    Raises UserError for text that is not a number and a unit.
    """
    match = re.fullmatch(r"(\d+)([mhdw])", text.strip())
    if match is None:
        raise UserError(f"--older-than {text}: expected a number and a unit (m, h, d, w). Fix: give one, such as 12h")
    return int(match[1]) * _UNIT_S[match[2]]


def not_used_for(entries: list[CachedEntry], seconds: float) -> list[CachedEntry]:
    now = time.time()
    return [entry for entry in entries if now - entry.used >= seconds]


def remove(entries: list[CachedEntry]) -> list[CachedEntry]:
    """Returns the entries that were not removed because some process is writing them. Raises UserError."""
    kept = []
    for entry in entries:
        folder = Path(entry.path).with_name(entry.key)
        try:
            with lock_of(folder).acquire(blocking=False):
                for leftover in _unfinished(folder):
                    shutil.rmtree(leftover)
                if entry.path == str(folder) and folder.is_dir():
                    _discard(folder)
        except filelock.Timeout:
            kept.append(entry)
        except OSError as error:
            raise UserError(
                f"{error.filename or folder}: cannot be removed: {error.strerror or error}. Fix: check its "
                "permissions, and start again"
            ) from None
    return kept
