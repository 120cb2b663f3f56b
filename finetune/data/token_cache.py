"""Tokenized examples on disk: entries that are complete or absent, built by one process while the others wait.

An entry is a folder of flat arrays (`T` tokens in `M` sequences of `N` examples of one source) that numpy maps:

    input_ids.npy        (T,) int32
    loss_mask.npy        (T,) bool
    sequence_offsets.npy (M + 1,) int64, sequence j is tokens [sequence_offsets[j], sequence_offsets[j + 1])
    targets.npy          (M,) int64, trained tokens
    example_offsets.npy  (N + 1,) int64, example i is sequences [example_offsets[i], example_offsets[i + 1])
    hashes.npy           (N,) uint64, of its tokens
    files.npy            (N,) int32, index in the report's `files`
    rows.npy             (N,) int64
    numbers.npy          (N * C,) float64, the report's `columns` of each example
    image_numbers.npy    (I * 6,) int64, of each of `I` images, see `ImageArrays`; the last: where its source ends
    image_sources.npy    (B,) uint8, paths of their files, or the files themselves if rows have them; no pixels
    example_checksums.npy (N,) uint32, of all that is read of an example, see `CacheEntry.checksum`
    report.json          counts, and checksums of the arrays

Its name is the key: a hash of everything that its tokens depend on, so that a stale entry is never used. Small arrays
are verified when an entry is opened, large ones then or example by example (`checksums.py`). Next to it are
`<key>.lock`, held while it is built or removed, `<key>.builder`, its builder, and `<key>.*.tmp`, unfinished files.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import filelock
import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from finetune.data.checksums import VERIFIED_AT_ONCE, Damaged, checksum, sealed, unsealed, verify
from finetune.data.samples import Example, ExampleSizes, Image, Sequence
from finetune.data.sources.files import cache_root
from finetune.data.tokenizing import ChunkResult, ExampleArrays
from finetune.errors import RunFailure, UserError

Entry = TypeVar("Entry")


@dataclass
class SourceReport:
    """Counts of one source. rows = bad + overlong dropped + the rest; counts before `weight`."""

    path: str
    name: str = ""  # in metrics
    format: str = ""  # the one that was chosen, if the recipe says auto
    rows: int = 0  # read, the bad ones too
    bad: int = 0  # skipped under on_bad_row: skip
    dropped_overlong: int = 0
    truncated: int = 0
    split: int = 0  # rows cut into pieces
    no_supervised_token: int = 0  # examples (or pieces) dropped because they have no trained token
    no_other_answer: int = 0  # kto: examples dropped because no other row's answer fits next to them
    unrolled: int = 0  # conversations that became several examples, because the template rewrites history
    duplicates: int = 0  # examples whose tokens are those of an earlier one of this source; kept
    examples: int = 0  # the remaining ones
    tokens: int = 0
    supervised_tokens: int = 0
    bad_rows: list[str] = field(default_factory=list)  # the first `BAD_ROWS_LISTED`, with place and reason
    weight: float = 1.0
    passes: float = 1.0  # over this source in an epoch
    taken: int = 0  # examples of an epoch


@dataclass(frozen=True)
class DataReport:
    """Counts of all sources; `totals` sums them, `as_dict` is for JSON."""

    sources: tuple[SourceReport, ...]

    def totals(self) -> dict[str, int]:
        """Every count, over all sources."""
        names = [name for name, value in asdict(SourceReport("")).items() if isinstance(value, int)]
        return {name: sum(getattr(source, name) for source in self.sources) for name in names}

    def as_dict(self) -> dict[str, Any]:
        return {**self.totals(), "sources": [asdict(source) for source in self.sources]}


ARRAYS = {
    "input_ids": np.dtype(np.int32),
    "loss_mask": np.dtype(bool),
    "sequence_offsets": np.dtype(np.int64),
    "targets": np.dtype(np.int64),
    "example_offsets": np.dtype(np.int64),
    "shared": np.dtype(np.int64),
    "hashes": np.dtype(np.uint64),
    "files": np.dtype(np.int32),
    "rows": np.dtype(np.int64),
    "numbers": np.dtype(np.float64),
    "image_numbers": np.dtype(np.int64),
    "image_sources": np.dtype(np.uint8),
    "example_checksums": np.dtype(np.uint32),
}
_LARGE = ("input_ids", "loss_mask", "image_sources")

BAD_ROWS_LISTED = 10

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheEntry:
    """One source's examples, mapped into memory: read only when used."""

    input_ids: NDArray[np.int32]  # (T,)
    loss_mask: NDArray[np.bool_]  # (T,)
    sequence_offsets: NDArray[np.int64]  # (M + 1,)
    targets: NDArray[np.int64]  # (M,)
    example_offsets: NDArray[np.int64]  # (N + 1,)
    shared: NDArray[np.int64]  # (N,) see `ExampleSizes`
    hashes: NDArray[np.uint64]  # (N,)
    files: NDArray[np.int32]  # (N,)
    rows: NDArray[np.int64]  # (N,)
    numbers: NDArray[np.float64]  # (N * C,)
    image_numbers: NDArray[np.int64]  # (I * 6,)
    image_sources: NDArray[np.uint8]  # (B,)
    example_checksums: NDArray[np.uint32]  # (N,)
    names: tuple[str, ...]  # of files
    columns: tuple[str, ...]  # names of the `C` numbers of each example
    report: SourceReport
    folder: Path
    checksums: Mapping[str, int]  # of each array: equal for equal content
    is_verified: bool  # if not, each example is when it is read

    @property
    def key(self) -> str:
        """The key of all that the arrays depend on."""
        return self.folder.name

    def __len__(self) -> int:
        return len(self.rows)

    def sizes(self) -> ExampleSizes:
        return ExampleSizes(self.example_offsets, np.diff(self.sequence_offsets), self.targets, self.shared)

    def example(self, i: int, source: int) -> Example:
        """Example `i`, of the recipe's source with this index. Raises RunFailure if it differs from the one written."""
        if not self.is_verified and self.checksum(i) != self.example_checksums[i]:
            self._remove(i)
        first, end = self.example_offsets[i], self.example_offsets[i + 1]
        places = [slice(self.sequence_offsets[j], self.sequence_offsets[j + 1]) for j in range(first, end)]
        # Copies: torch wants memory it may write to.
        images = self._images(int(first), int(end))
        sequences = [
            Sequence(np.array(self.input_ids[place]), np.array(self.loss_mask[place]), of_sequence)
            for place, of_sequence in zip(places, images, strict=True)
        ]
        numbers = self.numbers[i * len(self.columns) : (i + 1) * len(self.columns)].tolist()
        columns = dict(zip(self.columns, numbers, strict=True))
        return Example(self.names[self.files[i]], int(self.rows[i]), source, tuple(sequences), columns)

    def checksum(self, i: int) -> int:
        """Returns the checksum of the tokens, mask, numbers and images of an example."""
        first, end = int(self.example_offsets[i]), int(self.example_offsets[i + 1])
        tokens = slice(self.sequence_offsets[first], self.sequence_offsets[end])
        width = len(self.columns)
        content = (self.input_ids[tokens], self.loss_mask[tokens], self.numbers[i * width : (i + 1) * width])
        if not len(self.image_numbers):
            return checksum(*content)
        images = self.image_numbers.reshape(-1, 6)
        begin, stop = np.searchsorted(images[:, 0], (first, end)).tolist()
        ends = images[begin:stop, 5]
        sources = self.image_sources[int(images[begin - 1, 5]) if begin else 0 : int(ends[-1])] if len(ends) else b""
        return checksum(*content, images[begin:stop, 1:5], sources)

    def _remove(self, i: int) -> NoReturn:
        place = f"the cached tokens of {self.names[self.files[i]]}:{self.rows[i]} are not what was written"
        raise RunFailure(f"{removed(self.folder)}: {place}. Start again: they are made again, and the run resumes")

    def _images(self, first: int, end: int) -> list[tuple[Image, ...]]:
        """Returns the images of each of the sequences [first, end)."""
        numbers = self.image_numbers.reshape(-1, 6)
        if not len(numbers):
            return [()] * (end - first)
        found: list[list[Image]] = [[] for _ in range(first, end)]
        for i in range(*np.searchsorted(numbers[:, 0], (first, end)).tolist()):
            sequence, height, width, begin, stop, _ = numbers[i].tolist()
            found[sequence - first].append(Image(self._image_source(i), height, width, begin, stop))
        return [tuple(of_sequence) for of_sequence in found]

    def _image_source(self, i: int) -> str | bytes:
        ends = self.image_numbers.reshape(-1, 6)[:, 5]
        stored = self.image_sources[int(ends[i - 1]) if i else 0 : int(ends[i])].tobytes()
        return stored[1:] if stored[:1] == b"\1" else os.fsdecode(stored[1:])

    def image_list(self) -> list[str | bytes]:
        """Returns the path of each image, or the image itself if the row has it."""
        return [self._image_source(i) for i in range(len(self.image_numbers) // 6)]

    def image_files(self) -> set[str]:
        """Returns the paths of images that are files of their own."""
        return {source for source in self.image_list() if isinstance(source, str)}


def entries_folder() -> Path:
    return cache_root() / "data"


def load(folder: Path) -> CacheEntry | None:
    """A complete entry; None if it is absent or damaged."""
    try:
        return open_entry(folder)
    except Damaged:
        return None


def open_entry(folder: Path) -> CacheEntry | None:
    """A complete entry; None if it is absent. Raises Damaged if a part is missing, or differs from what was written."""
    if not folder.is_dir():
        return None
    try:
        metadata = unsealed(folder / "report.json")
        arrays = {name: _map(folder, name, metadata["arrays"][name]) for name in ARRAYS}
        checksums = {name: int(metadata["checksums"][name]) for name in ARRAYS}
        is_small = sum(arrays[name].nbytes for name in _LARGE) <= VERIFIED_AT_ONCE
        for name, array in arrays.items():
            if name not in _LARGE or is_small:
                verify(folder / f"{name}.npy", array, checksums[name])
        names, columns = tuple(metadata["files"]), tuple(metadata["columns"])
        report = SourceReport(**metadata["report"])
    except OSError as error:
        raise Damaged(f"{Path(error.filename or folder).name}: {error.strerror or error}") from None
    with contextlib.suppress(OSError):  # a cache on read-only storage is as good
        os.utime(folder / "report.json")
    return CacheEntry(
        **arrays, names=names, columns=columns, report=report, folder=folder, checksums=checksums, is_verified=is_small
    )


def _map(folder: Path, name: str, count: int) -> np.ndarray:
    """Raises Damaged if the file is not of `count` items of its type; reads only its header."""
    path, dtype = folder / f"{name}.npy", ARRAYS[name]
    header = _header(dtype, count)
    with path.open("rb") as file:
        written = file.read(len(header))
    if written != header or path.stat().st_size != len(header) + count * dtype.itemsize:
        raise Damaged(f"{path.name}: its header or its size differs")
    return np.memmap(path, dtype, "r", len(header), (count,))


def _header(dtype: np.dtype, count: int) -> bytes:
    """Header of a .npy file of one dimension; as long for any count, since numpy leaves room for it to grow."""
    written = io.BytesIO()
    described = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    npy.write_array_header_1_0(written, described)
    return written.getvalue()


# --- building: one process builds, the others wait


def find_or_build(
    folder: Path, metadata: dict[str, Any], build: Callable[[EntryWriter], None]
) -> tuple[CacheEntry, float | None]:
    """Returns the entry, and the seconds that building it took; None if it already existed.

    build: fills an EntryWriter. metadata: for people, see `cache list`. Raises UserError if the cache cannot be
    written, and the errors of `build`.
    """
    what = f"tokenises {metadata.get('source', folder.name)}"
    return load_or_write(folder, lambda: open_entry(folder), lambda: _build(folder, metadata, build), what)


def load_or_write(
    folder: Path, load: Callable[[], Entry | None], write: Callable[[], None], what: str
) -> tuple[Entry, float | None]:
    """Returns the result of `load` in a folder of the cache, and the seconds of `write` if it had to be written first.

    Any number of processes may ask at once: one writes, the others wait for it and log that it `what`. What is Damaged
    is logged, and written again. Raises UserError if the cache cannot be written, and the errors of `write`.
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
            begun = time.monotonic()
            write()
    except OSError as error:
        raise UserError(
            f"{error.filename or folder}: the data cache cannot be written: {error.strerror or error}; "
            "set FINETUNE_CACHE to a folder with room"
        ) from None
    with contextlib.suppress(Damaged):
        if (entry := load()) is not None:
            return entry, time.monotonic() - begun
    raise RunFailure(f"{folder}: was written a moment ago and cannot be read; is the disk in order?")


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
        log.warning("waiting for %s, which %s", _builder_name(builder), what)
        lock.acquire()
    except NotImplementedError:
        raise UserError(f"{folder.parent}: this file system has no locks; set FINETUNE_CACHE to a local disk") from None
    try:
        builder.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}), encoding="utf-8")
        yield
    finally:
        builder.unlink(missing_ok=True)
        lock.release()


def _builder_name(builder: Path) -> str:
    try:
        by = json.loads(builder.read_text(encoding="utf-8"))
        return f"process {by['pid']} on {by['host']}"
    except (OSError, ValueError, KeyError):
        return "another process"


def _build(folder: Path, metadata: dict[str, Any], build: Callable[[EntryWriter], None]) -> None:
    """Write an entry under a temporary name, then rename it."""
    for dead in unfinished(folder):  # we hold the lock: whoever wrote them is gone
        shutil.rmtree(dead, ignore_errors=True)
    temporary = temporary_folder(folder)
    try:
        with EntryWriter(temporary) as writer:
            build(writer)
            writer.finish(metadata)
        if folder.exists():  # damaged, or deleted in part
            discard(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def temporary_folder(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.tmp")


def unfinished(folder: Path) -> list[Path]:
    """Folders of builds and removals of an entry that have not ended."""
    return sorted(folder.parent.glob(f"{folder.name}.*.tmp"))


def discard(folder: Path) -> None:
    """Renamed first, so that no process finds half of it; one that has mapped it keeps its mapping."""
    aside = temporary_folder(folder)
    folder.rename(aside)
    shutil.rmtree(aside)


def removed(folder: Path) -> str:
    """Removes an entry that turned out damaged in use, so that the next start rebuilds it; returns a message."""
    try:
        discard(folder)
    except FileNotFoundError:  # another process was first
        pass
    except OSError as error:
        return f"{folder}: damaged on the disk; remove it ({error.strerror or error})"
    return f"{folder}: damaged on the disk, and removed"


class EntryWriter:
    """An entry's files as they grow, without a copy in memory."""

    def __init__(self, folder: Path):
        folder.mkdir()
        self.folder = folder
        self.report = SourceReport("")
        self.columns: tuple[str, ...] = ()
        self._file_indices: dict[str, int] = {}  # by name
        self._num_tokens = self._num_sequences = self._num_image_bytes = 0
        self._begun = time.monotonic()
        self._files = {name: _ArrayFile(folder / f"{name}.npy", dtype) for name, dtype in ARRAYS.items()}
        for name in ("sequence_offsets", "example_offsets"):
            self._files[name].append(np.zeros(1, np.int64))

    def __enter__(self) -> EntryWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # the write before has raised it
                file.close()

    def append(self, result: ChunkResult) -> None:
        """Writes the examples of a chunk after those before it, and counts them in the report. Raises OSError."""
        chunk, report = result.arrays, self.report
        for name, count in result.counts.items():
            setattr(report, name, getattr(report, name) + count)
        report.bad_rows += result.bad_rows[: BAD_ROWS_LISTED - len(report.bad_rows)]
        report.examples += len(chunk.sizes)
        report.tokens += len(chunk.input_ids)
        report.supervised_tokens += int(chunk.targets.sum())
        indices = np.array([self._file_indices.setdefault(n, len(self._file_indices)) for n in chunk.labels], np.int32)
        arrays = {name: getattr(chunk, name) for name in ARRAYS if hasattr(chunk, name)}
        arrays["files"] = indices[chunk.files] if len(chunk.files) else chunk.files
        arrays["sequence_offsets"] = self._num_tokens + np.cumsum(chunk.lengths)
        arrays["example_offsets"] = self._num_sequences + np.cumsum(chunk.sizes)
        images = chunk.images.numbers.copy()
        images[:, 0] += self._num_sequences
        images[:, 5] = self._num_image_bytes + np.cumsum(images[:, 5])
        arrays["image_numbers"], arrays["image_sources"] = images.reshape(-1), chunk.images.sources
        for name, array in arrays.items():
            self._files[name].append(array)
        self._files["example_checksums"].append(_example_checksums(chunk, len(self.columns)))
        self._num_image_bytes += len(chunk.images.sources)
        self._num_tokens += len(chunk.input_ids)
        self._num_sequences += len(chunk.lengths)

    def finish(self, metadata: dict[str, Any]) -> None:
        """Count what can only be counted at the end, and close every file, flushed to the disk."""
        parts = {name: file.finish() for name, file in self._files.items()}
        hashes = np.load(self.folder / "hashes.npy", mmap_mode="r", allow_pickle=False)
        self.report.duplicates = len(hashes) - len(np.unique(hashes))
        everything = {
            "of": metadata,
            "made": {
                "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "host": socket.gethostname(),
                "seconds": round(time.monotonic() - self._begun, 1),
            },
            "arrays": {name: count for name, (count, _) in parts.items()},
            "checksums": {name: of_array for name, (_, of_array) in parts.items()},
            "files": list(self._file_indices),
            "columns": list(self.columns),
            "report": asdict(self.report),
        }
        with (self.folder / "report.json").open("w", encoding="utf-8") as file:
            file.write(sealed(everything))
            _flush(file)


def _example_checksums(chunk: ExampleArrays, width: int) -> NDArray[np.uint32]:
    """(N,) see `CacheEntry.checksum`; width: numbers of an example."""
    ends = np.concatenate(([0], np.cumsum(chunk.sizes)))  # of sequences
    places = np.concatenate(([0], np.cumsum(chunk.lengths)))[ends]  # of tokens
    images = chunk.images.numbers
    image_ends = np.searchsorted(images[:, 0], ends)
    byte_ends = np.concatenate(([0], np.cumsum(images[:, 5])))[image_ends]
    checksums = [
        checksum(
            chunk.input_ids[places[i] : places[i + 1]],
            chunk.loss_mask[places[i] : places[i + 1]],
            chunk.numbers[i * width : (i + 1) * width],
            images[image_ends[i] : image_ends[i + 1], 1:5],
            chunk.images.sources[byte_ends[i] : byte_ends[i + 1]],
        )
        for i in range(len(chunk.sizes))
    ]
    return np.array(checksums, np.uint32)


class _ArrayFile:
    """A .npy file of one dimension whose length is only available at the end, when its header is written again."""

    def __init__(self, path: Path, dtype: np.dtype):
        self._file, self._dtype, self._count, self._checksum = path.open("wb"), dtype, 0, 0
        self._file.write(_header(dtype, 0))

    def append(self, array: np.ndarray) -> None:
        items = np.ascontiguousarray(array, self._dtype)
        self._file.write(items.data)
        self._count += len(items)
        self._checksum = checksum(items, before=self._checksum)

    def finish(self) -> tuple[int, int]:
        """Returns the number of items, and their checksum. The file is complete then, and on the disk."""
        self._file.seek(0)
        self._file.write(_header(self._dtype, self._count))
        _flush(self._file)
        self.close()
        return self._count, self._checksum

    def close(self) -> None:
        self._file.close()


def _flush(file: Any) -> None:
    """A rename may reach the disk before the data, unless that was flushed."""
    file.flush()
    os.fsync(file.fileno())
