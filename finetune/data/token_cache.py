"""Tokenized examples on disk: entries of the cache (`cache_entries.py`) that numpy maps.

An entry is a folder of flat arrays (`T` tokens in `M` sequences of `N` examples of one source):

    input_ids.npy        (T,) int32
    loss_mask.npy        (T,) bool
    sequence_offsets.npy (M + 1,) int64, sequence j is tokens [sequence_offsets[j], sequence_offsets[j + 1])
    targets.npy          (M,) int64, trained tokens
    example_offsets.npy  (N + 1,) int64, example i is sequences [example_offsets[i], example_offsets[i + 1])
    hashes.npy           (N,) uint64, of its tokens
    files.npy            (N,) int32, index in the report's `files`
    rows.npy             (N,) int64
    numbers.npy          (N * C,) float64, the report's `columns` of each example
    image_numbers.npy    (I * 6,) int64, of each of `I` files of media, see `ExampleArrays`; the last: its source's end
    image_sources.npy    (B,) uint8, paths of their files, or the files themselves if rows have them; no pixels
    example_checksums.npy (N,) uint32, of all that is read of an example, see `CacheEntry.checksum`
    report.json          counts, and checksums of the arrays

Small arrays are verified when an entry is opened, large ones then or example by example (`checksums.py`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.data.cache_entries import load_or_write, made_now, removed, replacing
from finetune.data.checksums import (
    VERIFIED_AT_ONCE,
    ArrayFile,
    Damaged,
    checksum,
    map_array,
    npy_header,
    sealed,
    unsealed,
    verify,
)
from finetune.data.samples import Clip, Example, ExampleSizes, Image, Medium, Sequence, Video, files_of
from finetune.data.tokenizing import SOURCE_IN_ROW, SOURCE_OF_CLIP, SOURCE_OF_VIDEO, VIDEO_NUMBERS, ChunkResult
from finetune.errors import RunFailure
from finetune.utils import fsync


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
    no_other_answer: int = 0  # examples dropped because no other row's answer fits next to them
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
        return self.folder.name

    def __len__(self) -> int:
        return len(self.rows)

    def sizes(self) -> ExampleSizes:
        return ExampleSizes(self.example_offsets, np.diff(self.sequence_offsets), self.targets, self.shared)

    def example(self, i: int, source: int) -> Example:
        """Returns example `i`, of the recipe's source with this index. Raises RunFailure if it differs from the one
        written."""
        if not self.is_verified and self.checksum(i) != self.example_checksums[i]:
            raise RunFailure(
                f"{removed(self.folder)}: the cached tokens of {self.names[self.files[i]]}:{self.rows[i]} are not what "
                "was written. Fix: start again; they are made again, and the run resumes"
            )
        first, end = int(self.example_offsets[i]), int(self.example_offsets[i + 1])
        media: dict[int, list[Medium]] = defaultdict(list)  # by sequence
        table = self.image_numbers.reshape(-1, 6)
        for n in range(*np.searchsorted(table[:, 0], (first, end)).tolist()):
            media[int(table[n, 0])].append(self._medium(n))
        sequences = []
        for j in range(first, end):
            tokens = slice(self.sequence_offsets[j], self.sequence_offsets[j + 1])
            # Copies: torch wants memory it may write to.
            ids, mask = np.array(self.input_ids[tokens]), np.array(self.loss_mask[tokens])
            sequences.append(Sequence(ids, mask, tuple(media[j])))
        numbers = self.numbers[i * len(self.columns) : (i + 1) * len(self.columns)].tolist()
        columns = dict(zip(self.columns, numbers, strict=True))
        return Example(self.names[self.files[i]], int(self.rows[i]), source, tuple(sequences), columns)

    def checksum(self, i: int) -> int:
        """Returns the checksum of the tokens, mask, numbers and images of an example."""
        first, end = int(self.example_offsets[i]), int(self.example_offsets[i + 1])
        tokens = slice(self.sequence_offsets[first], self.sequence_offsets[end])
        numbers = self.numbers[i * len(self.columns) : (i + 1) * len(self.columns)]
        images = self.image_numbers.reshape(-1, 6)
        begin, stop = np.searchsorted(images[:, 0], (first, end)).tolist()
        sources = slice(int(images[begin - 1, 5]) if begin else 0, int(images[stop - 1, 5]) if stop else 0)
        return checksum(
            self.input_ids[tokens],
            self.loss_mask[tokens],
            numbers,
            images[begin:stop, 1:5],
            self.image_sources[sources],
        )

    def _stored_source(self, i: int) -> bytes:
        ends = self.image_numbers.reshape(-1, 6)[:, 5]
        return self.image_sources[int(ends[i - 1]) if i else 0 : int(ends[i])].tobytes()

    def _medium(self, i: int) -> Medium:
        _, first_size, second_size, begin, end, _ = self.image_numbers.reshape(-1, 6)[i].tolist()
        source, stored = self._image_source(i), self._stored_source(i)
        if stored[0] & SOURCE_OF_VIDEO:
            frames, *rate, seen = VIDEO_NUMBERS.unpack_from(stored, 1)
            return Video(source, frames, Fraction(*rate), first_size, second_size, seen, begin, end)
        return (Clip if stored[0] & SOURCE_OF_CLIP else Image)(source, first_size, second_size, begin, end)

    def _image_source(self, i: int) -> str | bytes:
        stored = self._stored_source(i)
        source = stored[1 + (VIDEO_NUMBERS.size if stored[0] & SOURCE_OF_VIDEO else 0) :]
        return source if stored[0] & SOURCE_IN_ROW else os.fsdecode(source)

    def media(self) -> Iterator[Medium]:
        """Yields the files of all examples, in order."""
        return map(self._medium, range(len(self.image_numbers) // 6))

    def image_list(self) -> list[str | bytes]:
        """Returns the path of each image, or the image itself if the row has it."""
        return [self._image_source(i) for i in range(len(self.image_numbers) // 6)]

    def media_files(self) -> set[str]:
        """Returns the paths of images that are files of their own."""
        return {path for source in self.image_list() if isinstance(source, str) for path in files_of(source)}


def load(folder: Path) -> CacheEntry | None:
    """Returns a complete entry; None if it is absent or damaged."""
    with contextlib.suppress(Damaged):
        return open_entry(folder)
    return None


def open_entry(folder: Path) -> CacheEntry | None:
    """Returns a complete entry; None if it is absent. Raises Damaged if a part is missing, or differs from what was
    written."""
    if not folder.is_dir():
        return None
    try:
        metadata = unsealed(folder / "report.json")
        counts = metadata["arrays"]
        arrays = {
            name: map_array(folder / f"{name}.npy", dtype, (counts[name],), npy_header(dtype, counts[name]))
            for name, dtype in ARRAYS.items()
        }
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


# --- building


def find_or_build(
    folder: Path, metadata: dict[str, Any], build: Callable[[EntryWriter], object]
) -> tuple[CacheEntry, float | None]:
    """Returns the entry, and the seconds that building it took; None if it already existed.

    build: fills an EntryWriter. metadata: for people, see `cache list`. Raises UserError if the cache cannot be
    written, and the errors of `build`.
    """

    def write() -> None:
        with replacing(folder) as temporary, EntryWriter(temporary) as writer:
            build(writer)
            writer.finish(metadata)

    what = f"tokenizes {metadata.get('source', folder.name)}"
    return load_or_write(folder, lambda: open_entry(folder), write, what)


class EntryWriter:
    """An entry's files as they grow, in an empty folder, without a copy in memory."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.report = SourceReport("")
        self.columns: tuple[str, ...] = ()
        self._file_indices: dict[str, int] = {}  # by name
        self._num_tokens = self._num_sequences = self._num_image_bytes = 0
        self._begun = time.monotonic()
        self._files = {name: ArrayFile(folder / f"{name}.npy", dtype) for name, dtype in ARRAYS.items()}
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
        images = chunk.image_numbers.copy()
        images[:, 0] += self._num_sequences
        images[:, 5] = self._num_image_bytes + np.cumsum(images[:, 5])
        arrays["image_numbers"] = images.reshape(-1)
        for name, array in arrays.items():
            self._files[name].append(array)
        width = len(self.columns)
        # (N,), see `CacheEntry.checksum`
        ends = np.concatenate(([0], np.cumsum(chunk.sizes)))  # of sequences
        places = np.concatenate(([0], np.cumsum(chunk.lengths)))[ends]  # of tokens
        of_image = chunk.image_numbers
        image_ends = np.searchsorted(of_image[:, 0], ends)
        byte_ends = np.concatenate(([0], np.cumsum(of_image[:, 5])))[image_ends]
        checksums = [
            checksum(
                chunk.input_ids[places[i] : places[i + 1]],
                chunk.loss_mask[places[i] : places[i + 1]],
                chunk.numbers[i * width : (i + 1) * width],
                of_image[image_ends[i] : image_ends[i + 1], 1:5],
                chunk.image_sources[byte_ends[i] : byte_ends[i + 1]],
            )
            for i in range(len(chunk.sizes))
        ]
        self._files["example_checksums"].append(np.array(checksums, np.uint32))
        self._num_image_bytes += len(chunk.image_sources)
        self._num_tokens += len(chunk.input_ids)
        self._num_sequences += len(chunk.lengths)

    def finish(self, metadata: dict[str, Any]) -> None:
        """Writes the report, and closes every file, flushed to the disk."""
        for file in self._files.values():
            file.finish()
        hashes = np.load(self.folder / "hashes.npy", mmap_mode="r", allow_pickle=False)
        self.report.duplicates = len(hashes) - len(np.unique(hashes))
        everything = {
            "of": metadata,
            "made": made_now(time.monotonic() - self._begun),
            "arrays": {name: file.count for name, file in self._files.items()},
            "checksums": {name: file.checksum for name, file in self._files.items()},
            "files": list(self._file_indices),
            "columns": list(self.columns),
            "report": asdict(self.report),
        }
        (self.folder / "report.json").write_text(sealed(everything), encoding="utf-8")
        fsync(self.folder / "report.json")
