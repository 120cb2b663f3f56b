"""Features of clips, and frames of videos, on the disk: made once, by worker processes, and found again by content.

    rows are tokenized    short clips: each is decoded once, checked, and its features are written (`FeatureCache.find`)
    before the run        what is missing: long clips, videos, and clips of rows that were tokenized before
                          (`make_features`)

    <cache>/data/<key>/              an entry of the cache: a model's processor, its settings, versions of what computes
        <sha256>-<samples>-<rate>    a clip: CRC-32 of the rest, 8 hex digits, then safetensors
        <sha256>-<frames>-...        a video

A file that is missing or damaged is made again where it is read, so an entry may be removed at any time. What is read
is what `MediaFamily.read` returns, but that it was computed with one thread. Of a video that is a folder or a list of
pictures, sizes and times of their files stand for the content.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.numpy import load, save

from finetune import __version__
from finetune.data.cache_entries import entries_folder, lock_of, made_now
from finetune.data.checksums import Damaged, checksum, sealed
from finetune.data.media.audio_files import StoredClip, check_samples, find_clip, load_clip
from finetune.data.media.families import Features, MediaFamily
from finetune.data.samples import LISTED, BadRow, Clip, Image, MediaKind, Medium, files_of, kind_of
from finetune.data.sources.files import file_digest
from finetune.data.workers import worker_pool
from finetune.errors import UserError
from finetune.utils import ProgressBar, num_cores, readable_bytes, write_atomically

_COMPUTED_BY: dict[MediaKind, tuple[str, ...]] = {
    "audio": ("transformers", "torch", "numpy", "soundfile", "soxr"),
    "video": ("torch", "numpy", "pillow", "av"),
}
_DIGITS = 8  # of the checksum, in hex
# Of sound, and of videos; less is read here: its work, some nine seconds, is about what starting the others takes.
_FEW_SECONDS: dict[MediaKind, float] = {"audio": 3600.0, "video": 60.0}
# Of a clip whose features are made where it is checked, by any number of processes; a longer one is decoded once more.
_SHORT_S = 60
_BYTES_A_PIXEL = 80  # of a frame as it is stored: a decoder holds some twenty of them

_NAMES: dict[MediaKind, str] = {"audio": "sound", "video": "videos"}
_UNITS: dict[MediaKind, str] = {"audio": "clips", "video": "videos"}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FeatureCache:
    """Features of a model's clips, in a folder."""

    family: MediaFamily
    folder: Path

    @classmethod
    def of(cls, family: MediaFamily) -> FeatureCache:
        versions = [f"{name} {_version(name)}" for name in _COMPUTED_BY[family.kind]]
        # Apart from those of clips that nothing has checked: see `find`.
        checked = ["checked"] if family.rules.verify == "samples" else []
        key = hashlib.sha256("\n".join(["features 1", family.settings, *versions, *checked]).encode()).hexdigest()
        return cls(family, entries_folder() / key)

    def path(self, medium: Medium) -> Path:
        """Returns the file of a clip or a video. Raises UserError if it cannot be read."""
        assert not isinstance(medium, Image)  # no recipe has `data.image.cache`
        source = medium.source
        if isinstance(source, bytes):
            content = hashlib.sha256(source).hexdigest()
        else:
            content = _digest_of_list(files_of(source)) if source.startswith(LISTED) else file_digest(Path(source))
        if isinstance(medium, Clip):
            return self.folder / f"{content}-{medium.samples}-{medium.rate}"
        rate = "-".join(map(str, medium.rate.as_integer_ratio()))
        return self.folder / f"{content}-{medium.frames}-{rate}-{medium.height}-{medium.width}"

    def find(self, reference: str | bytes, data_file: str) -> StoredClip:
        """Returns the clip that a row of `data_file` names, as its family does. Features of a short one are made of the
        samples by which it is checked; one that has features was checked. Raises BadRow, and UserError for a cache that
        cannot be written."""
        return find_clip(reference, self.family.rules, data_file, self._check)

    def _check(self, stored: StoredClip) -> None:
        """Raises as `check_samples`."""
        family: Any = self.family  # an `AudioFamily`
        path = self.path(family.placed(stored, 0, 0))
        if path.is_file():
            return
        if stored.samples > _SHORT_S * stored.rate or not self._can_take(stored):
            check_samples(stored)
            return
        wave = load_clip(stored.source, stored.samples, stored.rate, family.rate, checks=True)
        self._write(family.features_of(wave), path)

    def _can_take(self, stored: StoredClip) -> bool:
        try:
            self.family.written(stored)
        except BadRow:
            return False
        return True

    def read(self, medium: Medium) -> Features:
        """Returns the features of a file, made and written if they are missing or damaged. Raises UserError."""
        path = self.path(medium)
        try:
            return self.family.from_kept(_unpacked(path.read_bytes(), path), medium)
        except FileNotFoundError:
            pass
        except Damaged as damage:
            log.warning("%s: damaged on the disk (%s); it is made again", path, damage)
        return self.family.from_kept(self.make(medium, path), medium)

    def make(self, medium: Medium, path: Path) -> Features:
        """Computes and writes what is kept of a file. Raises UserError."""
        features = self.family.kept(medium)
        self._write(features, path)
        return features

    def _write(self, features: Features, path: Path) -> None:
        # Of a view, such as every 160th sample's mask, safetensors would write the memory as it lies.
        content = save({name: np.ascontiguousarray(values) for name, values in features.items()})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, f"{checksum(content):0{_DIGITS}x}".encode() + content, shared=True)
        except OSError as error:
            raise UserError(
                f"{error.filename or path}: the data cache cannot be written: {error.strerror or error}. Fix: set "
                f"FINETUNE_CACHE to a folder with room, or data.{self.family.kind}.cache to false"
            ) from None


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # of videos that are pictures
        return "-"


def _digest_of_list(paths: list[str]) -> str:
    """Returns the sha256 of sizes and times of files. Raises UserError if one cannot be read."""
    whole = hashlib.sha256()
    for path in paths:
        try:
            stat = os.stat(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}. Fix: restore it") from None
        whole.update(f"{path}\0{stat.st_size} {stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()


def _unpacked(content: bytes, path: Path) -> Features:
    """Raises Damaged."""
    body = content[_DIGITS:]
    if content[:_DIGITS] != f"{checksum(body):0{_DIGITS}x}".encode():
        raise Damaged(f"{path.name}: its checksum differs")
    try:
        return load(body)
    except SafetensorError:
        raise Damaged(f"{path.name}: is not safetensors") from None


# --- before a run


@dataclass(frozen=True)
class MadeFeatures:
    """Counts of the clips, or videos, of a run, each once, when its rows are tokenized."""

    kind: MediaKind
    clips: int
    seconds: float  # of all of them
    made: int  # that were missing
    took_s: float
    bytes: int  # of all features

    def __str__(self) -> str:
        how = f"{self.made:,} were missing, made in {self.took_s:,.1f} s" if self.made else "none was missing"
        return (
            f"data.{self.kind}.cache: {self.clips:,} {_UNITS[self.kind]}, {self.seconds / 3600:,.2f} h of "
            f"{_NAMES[self.kind]}, {readable_bytes(self.bytes)}; {how}"
        )


def make_features(
    cache: FeatureCache, media: Iterable[Medium], console: Console, workers: int | None = None
) -> MadeFeatures:
    """Makes the features of those files of the cache's kind that are missing; any number of processes may call it at
    once, one works.

    workers: processes; None: one per core, as far as memory goes. Raises UserError for a file that cannot be read, and
    RunFailure for a worker that was killed.
    """
    kind = cache.family.kind
    begun = time.monotonic()
    cache.folder.parent.mkdir(parents=True, exist_ok=True)
    with lock_of(cache.folder):
        by_path = {cache.path(one): one for one in media if kind_of(one) == kind}
        missing = {path: one for path, one in by_path.items() if not path.is_file()}
        # The longest first, or the others would wait for it at the end.
        ordered = sorted(missing.items(), key=lambda item: -_seconds(item[1]))
        name = f"computing features of {_NAMES[kind]}"
        with ProgressBar(console, name, len(ordered), shown=bool(ordered), unit=_UNITS[kind]) as progress:
            for done, _ in enumerate(_made(cache, ordered, workers or _workers(ordered, cache.family)), start=1):
                progress.update(done)
        took = time.monotonic() - begun
        size = sum(path.stat().st_size for path in by_path)
        _write_report(cache, len(by_path), took)
    seconds = sum(map(_seconds, by_path.values()))
    return MadeFeatures(kind, len(by_path), seconds, len(missing), took, size)


def _seconds(medium: Medium) -> float:
    assert not isinstance(medium, Image)  # as in `path`
    return medium.samples / medium.rate if isinstance(medium, Clip) else float(medium.frames / medium.rate)


def _bytes(medium: Medium, family: MediaFamily) -> int:
    """Returns the memory of a file while its features are made, at most."""
    assert not isinstance(medium, Image)  # as in `path`
    if isinstance(medium, Clip):
        return medium.samples * family.bytes_a_sample
    return medium.height * medium.width * (_BYTES_A_PIXEL + 3 * medium.seen)


def _workers(ordered: list[tuple[Path, Medium]], family: MediaFamily) -> int:
    """Returns the processes that files are worth, at most as many as hold the largest of them at once."""
    if sum(_seconds(one) for _, one in ordered) < _FEW_SECONDS[family.kind]:
        return 1
    largest, room = max(_bytes(one, family) for _, one in ordered), psutil.virtual_memory().available // 2
    return max(1, min(num_cores(), len(ordered), room // largest))


def _made(cache: FeatureCache, ordered: list[tuple[Path, Medium]], workers: int) -> Iterator[None]:
    """Yields once for each file whose features are on the disk. Raises as `make_features`."""
    if workers == 1:
        for path, medium in ordered:
            cache.make(medium, path)
            yield
        return
    with worker_pool(workers, _begin, cache, "compute features") as pool:
        yield from pool.map(_make, ordered, chunksize=1)


def _write_report(cache: FeatureCache, clips: int, took: float) -> None:
    """Writes what `cache list` and `cache clean` read: of what the entry is, when it was last used, how large."""
    model_type = cache.family.settings.split(" ", 1)[0]
    kind = cache.family.kind
    of = {"source": f"features of {_NAMES[kind]}, {model_type}", "format": kind, "finetune": __version__}
    report = {"of": of, "made": made_now(took), "report": {"examples": clips, "tokens": 0}}
    with contextlib.suppress(OSError):  # a cache on read-only storage is as good
        cache.folder.mkdir(exist_ok=True)
        write_atomically(cache.folder / "report.json", sealed(report), shared=True)


# --- in a worker

_cache: FeatureCache | None = None


def _begin(cache: FeatureCache) -> None:
    global _cache
    torch.set_num_threads(1)  # every core has a process already
    _cache = cache


def _make(item: tuple[Path, Medium]) -> None:
    assert _cache is not None  # _begin was called
    path, medium = item
    _cache.make(medium, path)
