"""Features of clips on the disk: made once, by worker processes, and found again by the clip's content.

    <cache>/data/<key>/              an entry of the cache: a model's processor, its settings, versions of what computes
        <sha256>-<samples>-<rate>    a clip: CRC-32 of the rest, 8 hex digits, then safetensors

A file that is missing or damaged is made again where it is read, so an entry may be removed at any time. What is read
is what `MediaFamily.read` returns, but that it was computed with one thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import psutil
import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.numpy import load, save

from finetune import __version__
from finetune.data.cache_entries import entries_folder, lock_of, made_now
from finetune.data.checksums import Damaged, checksum, sealed
from finetune.data.media.families import Features, MediaFamily
from finetune.data.samples import Clip, Medium
from finetune.data.sources.files import file_digest
from finetune.data.workers import worker_pool
from finetune.errors import UserError
from finetune.utils import ProgressBar, num_cores, readable_bytes, write_atomically

_COMPUTED_BY = ("transformers", "torch", "numpy", "soundfile", "soxr")
_DIGITS = 8  # of the checksum, in hex
_FEW_SECONDS = 600.0  # of sound; less is heard here: it takes about as long as to start the other processes
_BYTES_A_SAMPLE = 48  # of a clip while its features are made: samples, spectrum (complex), bands, and copies of them

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FeatureCache:
    """Features of a model's clips, in a folder."""

    family: MediaFamily
    folder: Path

    @classmethod
    def of(cls, family: MediaFamily) -> FeatureCache:
        versions = [f"{name} {metadata.version(name)}" for name in _COMPUTED_BY]
        key = hashlib.sha256("\n".join(["features 1", family.settings, *versions]).encode()).hexdigest()
        return cls(family, entries_folder() / key)

    def path(self, medium: Medium) -> Path:
        """Returns the file of a clip. Raises UserError if it cannot be read."""
        assert isinstance(medium, Clip)  # a rule of the recipe: `data.audio.cache`
        source = medium.source
        content = hashlib.sha256(source).hexdigest() if isinstance(source, bytes) else file_digest(Path(source))
        return self.folder / f"{content}-{medium.samples}-{medium.rate}"

    def read(self, medium: Medium) -> Features:
        """Returns the features of a clip, made and written if they are missing or damaged. Raises UserError."""
        path = self.path(medium)
        try:
            return _unpacked(path.read_bytes(), path)
        except FileNotFoundError:
            pass
        except Damaged as damage:
            log.warning("%s: damaged on the disk (%s); it is made again", path, damage)
        return self.make(medium, path)

    def make(self, medium: Medium, path: Path) -> Features:
        """Computes and writes the features of a clip. Raises UserError."""
        features = self.family.read(medium)
        # Of a view, such as every 160th sample's mask, safetensors would write the memory as it lies.
        content = save({name: np.ascontiguousarray(values) for name, values in features.items()})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, f"{checksum(content):0{_DIGITS}x}".encode() + content, shared=True)
        except OSError as error:
            raise UserError(
                f"{error.filename or path}: the data cache cannot be written: {error.strerror or error}. Fix: set "
                "FINETUNE_CACHE to a folder with room, or data.audio.cache to false"
            ) from None
        return features


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
    """Counts of the clips of a run, each once."""

    clips: int
    seconds: float  # of sound
    made: int  # the others were there
    took_s: float
    bytes: int  # of all features

    def __str__(self) -> str:
        how = f"{self.made:,} made in {self.took_s:,.1f} s" if self.made else "none made"
        return (
            f"data.audio.cache: {self.clips:,} clips, {self.seconds / 3600:,.2f} h of sound, {how}, "
            f"{self.clips - self.made:,} from the cache, {readable_bytes(self.bytes)}"
        )


def make_features(
    cache: FeatureCache, media: Iterable[Medium], console: Console, workers: int | None = None
) -> MadeFeatures:
    """Makes the features of these clips that are missing; any number of processes may call it at once, one works.

    workers: processes; None: one per core, as far as memory goes. Raises UserError for a clip that cannot be read, and
    RunFailure for a worker that was killed.
    """
    begun = time.monotonic()
    cache.folder.parent.mkdir(parents=True, exist_ok=True)
    with lock_of(cache.folder):
        by_path = {cache.path(one): one for one in media if isinstance(one, Clip)}
        missing = {path: one for path, one in by_path.items() if not path.is_file()}
        # The longest first, or the others would wait for it at the end.
        ordered = sorted(missing.items(), key=lambda item: -item[1].samples / item[1].rate)
        name = "computing features of sound"
        with ProgressBar(console, name, len(ordered), shown=bool(ordered), unit="clips") as progress:
            for done, _ in enumerate(_made(cache, ordered, workers or _workers(ordered)), start=1):
                progress.update(done)
        took = time.monotonic() - begun
        size = sum(path.stat().st_size for path in by_path)
        _write_report(cache, len(by_path), took)
    sound = sum(one.samples / one.rate for one in by_path.values())
    return MadeFeatures(len(by_path), sound, len(missing), took, size)


def _workers(ordered: list[tuple[Path, Clip]]) -> int:
    """Returns the processes that clips are worth, at most as many as hold the longest of them at once."""
    if sum(one.samples / one.rate for _, one in ordered) < _FEW_SECONDS:
        return 1
    longest = max(one.samples for _, one in ordered)
    room = psutil.virtual_memory().available // 2
    return max(1, min(num_cores(), len(ordered), room // (longest * _BYTES_A_SAMPLE)))


def _made(cache: FeatureCache, ordered: list[tuple[Path, Clip]], workers: int) -> Iterator[None]:
    """Yields once for each clip whose features are on the disk. Raises as `make_features`."""
    if workers == 1:
        for path, clip in ordered:
            cache.make(clip, path)
            yield
        return
    with worker_pool(workers, _begin, cache, "compute features") as pool:
        yield from pool.map(_make, ordered, chunksize=1)


def _write_report(cache: FeatureCache, clips: int, took: float) -> None:
    """Writes what `cache list` and `cache clean` read: of what the entry is, when it was last used, how large."""
    model_type = cache.family.settings.split(" ", 1)[0]
    of = {"source": f"features of sound, {model_type}", "format": "audio", "finetune": __version__}
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


def _make(item: tuple[Path, Clip]) -> None:
    assert _cache is not None  # _begin was called
    path, clip = item
    _cache.make(clip, path)
