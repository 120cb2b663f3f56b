"""Tokenised examples on disk: entries that are complete or absent, made by one process while the others wait.

An entry is a folder of flat arrays (`T` tokens and `N` examples of one source) that numpy maps:

    input_ids.npy  (T,) int32         offsets.npy      (N + 1,) int64, example i is [offsets[i], offsets[i + 1])
    trained.npy    (T,) bool          num_trained.npy  (N,) int64
    report.json                       hashes.npy       (N,) uint64, of its tokens
                                      files.npy        (N,) int32, number in the report's `files`
                                      rows.npy         (N,) int64
                                      parts.npy        (N,) int8: 0 whole, 1 chosen, 2 rejected

Its name is the key: a hash of everything that its tokens depend on, so that nothing stale can be found. Beside it lie
`<key>.lock`, held while it is built or removed, `<key>.builder`, who builds, and `<key>.*.tmp`, what is being written.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import filelock
import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from finetune.data.building.chunk import Flat
from finetune.data.report import SourceReport
from finetune.data.sources.files import cache_root
from finetune.errors import RunFailure, UserError

ARRAYS = {
    "input_ids": np.dtype(np.int32),
    "trained": np.dtype(bool),
    "offsets": np.dtype(np.int64),
    "num_trained": np.dtype(np.int64),
    "hashes": np.dtype(np.uint64),
    "files": np.dtype(np.int32),
    "rows": np.dtype(np.int64),
    "parts": np.dtype(np.int8),
}
_OF_TOKENS = ("input_ids", "trained")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """One source's examples, mapped into memory; only what is asked for is read."""

    input_ids: NDArray[np.int32]  # (T,)
    trained: NDArray[np.bool_]  # (T,)
    offsets: NDArray[np.int64]  # (N + 1,)
    num_trained: NDArray[np.int64]  # (N,)
    hashes: NDArray[np.uint64]  # (N,)
    files: NDArray[np.int32]  # (N,)
    rows: NDArray[np.int64]  # (N,)
    parts: NDArray[np.int8]  # (N,)
    names: tuple[str, ...]  # of files
    report: SourceReport

    def __len__(self) -> int:
        return len(self.rows)


def entries_folder() -> Path:
    return cache_root() / "data"


def load(folder: Path) -> Entry | None:
    """A complete entry; None where there is none, or something of it is missing, cut or of the wrong size."""
    try:
        about = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        arrays = {name: _map(folder, name, about["arrays"][name]) for name in ARRAYS}
        entry = Entry(**arrays, names=tuple(about["files"]), report=SourceReport(**about["report"]))
        whole = entry.offsets[0] == 0 and entry.offsets[-1] == len(entry.input_ids)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    if not whole:
        return None
    with contextlib.suppress(OSError):  # a cache on read-only storage is as good
        os.utime(folder / "report.json")
    return entry


def _map(folder: Path, name: str, count: int) -> np.ndarray:
    """Raises ValueError where the file is not of `count` items of its type, which reads nothing but its header."""
    path, dtype = folder / f"{name}.npy", ARRAYS[name]
    header = _header(dtype, count)
    with path.open("rb") as file:
        written = file.read(len(header))
    if written != header or path.stat().st_size != len(header) + count * dtype.itemsize:
        raise ValueError(f"{path}: not what was written")
    return np.memmap(path, dtype, "r", len(header), (count,))


def _header(dtype: np.dtype, count: int) -> bytes:
    """Of a .npy file of one dimension; as long for any count, since numpy leaves room for it to grow."""
    written = io.BytesIO()
    described = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    npy.write_array_header_1_0(written, described)
    return written.getvalue()


# --- building: one process builds, the others wait


def find_or_build(folder: Path, of: dict[str, Any], build: Callable[[Writer], None]) -> tuple[Entry, float | None]:
    """The entry, and the seconds that building it took; None where it was found.

    build: fills a Writer. of: what the entry is of, for people. Any number of processes may ask at once: one builds,
    the others wait for it. Raises UserError where the cache cannot be written, and whatever `build` raises.
    """
    if (entry := load(folder)) is not None:
        return entry, None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder, of):
            if (entry := load(folder)) is not None:
                return entry, None
            begun = time.monotonic()
            _build(folder, of, build)
    except OSError as error:
        raise UserError(
            f"{error.filename or folder}: the data cache cannot be written: {error.strerror or error}; "
            "set FINETUNE_CACHE to a folder with room"
        ) from None
    if (entry := load(folder)) is None:
        raise RunFailure(f"{folder}: was written a moment ago and cannot be read; is the disk in order?")
    return entry, time.monotonic() - begun


def lock_of(folder: Path) -> filelock.BaseFileLock:
    # The file stays behind on purpose: to remove it would let a third process lock another file of the same name.
    return filelock.FileLock(folder.with_suffix(".lock"))


@contextlib.contextmanager
def _locked(folder: Path, of: dict[str, Any]) -> Iterator[None]:
    """Holds the entry's lock; says once for whom it waits. A process that dies leaves the lock free."""
    lock, builder = lock_of(folder), folder.with_suffix(".builder")
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        log.warning("waiting for %s, which tokenises %s", _name_of(builder), of.get("source", folder.name))
        lock.acquire()
    except NotImplementedError:
        raise UserError(f"{folder.parent}: this file system has no locks; set FINETUNE_CACHE to a local disk") from None
    try:
        builder.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}), encoding="utf-8")
        yield
    finally:
        builder.unlink(missing_ok=True)
        lock.release()


def _name_of(builder: Path) -> str:
    try:
        by = json.loads(builder.read_text(encoding="utf-8"))
        return f"process {by['pid']} on {by['host']}"
    except (OSError, ValueError, KeyError):
        return "another process"


def _build(folder: Path, of: dict[str, Any], build: Callable[[Writer], None]) -> None:
    """Write an entry beside its place, then move it there."""
    for dead in unfinished(folder):  # we hold the lock: whoever wrote them is gone
        shutil.rmtree(dead, ignore_errors=True)
    temporary = temporary_beside(folder)
    try:
        with Writer(temporary) as writer:
            build(writer)
            writer.finish(of)
        if folder.exists():  # damaged, or deleted in part
            discard(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def temporary_beside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.tmp")


def unfinished(folder: Path) -> list[Path]:
    """What builds of an entry have begun, or a removal has not ended."""
    return sorted(folder.parent.glob(f"{folder.name}.*.tmp"))


def discard(folder: Path) -> None:
    """Renamed first, so that no process finds half of it; one that has mapped it keeps what it mapped."""
    aside = temporary_beside(folder)
    folder.rename(aside)
    shutil.rmtree(aside)


class Writer:
    """An entry's files as they grow: nothing of it is kept in memory."""

    def __init__(self, folder: Path):
        folder.mkdir()
        self.folder = folder
        self.report = SourceReport("")
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}  # of names
        self._tokens = 0
        self._begun = time.monotonic()
        self._files = {name: _ArrayFile(folder / f"{name}.npy", dtype) for name, dtype in ARRAYS.items()}
        self._files["offsets"].append(np.zeros(1, np.int64))

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a full disk was said by the write before
                file.close()

    def append(self, flat: Flat) -> None:
        """The examples of a chunk behind those before it. Raises OSError."""
        numbers = np.array([self._number(label) for label in flat.labels], np.int32)
        columns = {name: getattr(flat, name) for name in ARRAYS if name not in ("offsets", "files")}
        columns["offsets"] = self._tokens + np.cumsum(flat.lengths)
        columns["files"] = numbers[flat.files] if len(flat.files) else flat.files
        for name, array in columns.items():
            self._files[name].append(array)
        self._tokens += len(flat.input_ids)

    def finish(self, of: dict[str, Any]) -> None:
        """Count what can only be counted at the end, and close every file, flushed to the disk."""
        counts = {name: file.finish() for name, file in self._files.items()}
        hashes = np.load(self.folder / "hashes.npy", mmap_mode="r", allow_pickle=False)
        self.report.duplicates = len(hashes) - len(np.unique(hashes))
        about = {
            "of": of,
            "made": {
                "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "host": socket.gethostname(),
                "seconds": round(time.monotonic() - self._begun, 1),
            },
            "arrays": counts,
            "files": self.names,
            "report": asdict(self.report),
        }
        with (self.folder / "report.json").open("w", encoding="utf-8") as file:
            json.dump(about, file, indent=1, ensure_ascii=False)
            _flush(file)

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]


class _ArrayFile:
    """A .npy file of one dimension whose length is known at the end, when its header is written again."""

    def __init__(self, path: Path, dtype: np.dtype):
        self._file, self._dtype, self._count = path.open("wb"), dtype, 0
        self._file.write(_header(dtype, 0))

    def append(self, array: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(array, self._dtype).data)
        self._count += len(array)

    def finish(self) -> int:
        """Items written. The file is whole then, and on the disk."""
        self._file.seek(0)
        self._file.write(_header(self._dtype, self._count))
        _flush(self._file)
        self.close()
        return self._count

    def close(self) -> None:
        self._file.close()


def _flush(file: Any) -> None:
    """A rename may reach the disk before what was written, unless that was flushed."""
    file.flush()
    os.fsync(file.fileno())
