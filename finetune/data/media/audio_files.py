"""Sound files: measured by their header, read in blocks, mixed down and resampled. `stored_files.py` locates them.

Mixing down (mean of the channels) and resampling (soxr's HQ, as many samples as fit in the time, rounded up) are those
of `transformers.audio_utils.load_audio`, so that a model hears what its own processor would be given.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.data.media.stored_files import check_copy, part_of_file, printable, source_of
from finetune.data.samples import BadRow, Clip
from finetune.errors import UserError
from finetune.recipe.schema import Audio

FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3")
MAX_CHANNELS = 8  # of 7.1; more are recordings of arrays, whose mean is no recording
RATES = (4_000, 384_000)  # samples a second that recordings have; others are taken for a damaged header
_BLOCK = 1 << 18  # samples of a channel that are read at a time
_OF_FLOATS = ("FLOAT", "DOUBLE")


@dataclass(frozen=True)
class StoredClip:
    """A sound file as it is stored."""

    source: str | bytes  # path of its file, or the file itself
    samples: int  # of one channel
    rate: int  # samples a second


def check_samples(clip: StoredClip) -> None:
    """Reads all of a clip, in blocks. Raises `broken` errors, ValueError if it is cut, silent, or no sound."""
    with _opened(clip.source) as file:
        for _ in _checked(file, clip.samples):
            pass


def find_clip(
    reference: str | bytes, rules: Audio, data_file: str, check: Callable[[StoredClip], None] = check_samples
) -> StoredClip:
    """Returns the clip that a row of `data_file` names. check: what reads all of it, under `verify: samples`. Raises
    BadRow with the problem."""
    source = source_of(reference, "audio", rules, data_file)
    try:
        clip = StoredClip(source, *_length(source, rules.max_seconds))
        if rules.verify == "samples":
            check(clip)
    except broken() as error:
        name = "its bytes" if isinstance(source, bytes) else printable(source)
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise BadRow(f"the sound file cannot be used ({name}): {reason}") from None
    return clip


def broken() -> tuple[type[Exception], ...]:
    """Returns the errors that reading raises for a file that is not sound, is cut off, or needs too much memory."""
    return (_package("soundfile").SoundFileError, OSError, ValueError, TypeError, EOFError, MemoryError)


def _package(name: str) -> Any:
    """Returns a module of the extra `audio`. Raises UserError if it is missing."""
    try:
        return __import__(name)
    except ImportError:
        raise UserError(
            f"data.audio: {name} is not installed, which reads sound files. Fix: pip install "
            "'finetune-recipes[audio]', or soundfile and soxr"
        ) from None


@contextlib.contextmanager
def _opened(source: str | bytes) -> Iterator[Any]:
    """The file as soundfile opens it, by its content and never by its name. Raises `broken` errors."""
    # A number in place of a name, or soundfile would take `.raw` for samples without a header.
    stream: Any = io.BytesIO(source) if isinstance(source, bytes) else os.fdopen(os.open(source, os.O_RDONLY), "rb")
    with stream, _package("soundfile").SoundFile(stream) as file:
        if file.format not in FORMATS:
            raise ValueError(f"{file.format} is not a kind that is read (wav, flac, ogg and mp3 are)")
        yield file


def _length(source: str | bytes, max_seconds: float) -> tuple[int, int]:
    """Returns (samples of a channel, rate) by the header. Raises ValueError for what is not plausible."""
    with _opened(source) as file:
        samples, rate, channels, format = file.frames, file.samplerate, file.channels, file.format
    if not RATES[0] <= rate <= RATES[1]:
        raise ValueError(f"{rate:,} samples a second; recordings have {RATES[0]:,} to {RATES[1]:,}")
    if channels > MAX_CHANNELS:
        raise ValueError(f"{channels} channels; at most {MAX_CHANNELS} are mixed down")
    if samples <= 0:
        raise ValueError("empty: it has no samples")
    if samples > max_seconds * rate:
        raise ValueError(
            f"{samples / rate:,.0f} s; `data.audio.max_seconds` is {max_seconds:g}: cut it into pieces, or raise that"
        )
    if format in ("WAV", "WAVEX"):
        _check_whole(source)
    return samples, rate


def _check_whole(source: str | bytes) -> None:
    """Raises ValueError for a RIFF file that is shorter than its header says, which libsndfile reads without a word."""
    head = part_of_file(source, 8)
    stated = int.from_bytes(head[4:8], "little" if head[:4] == b"RIFF" else "big") + 8
    size = len(source) if isinstance(source, bytes) else os.stat(source).st_size
    # Streams that could not go back to their header state the most that fits, or nothing.
    if size < stated < 0xFFFFFF00:
        raise ValueError(f"cut off: {size:,} of {stated:,} bytes")


def _checked(file: Any, samples: int) -> Iterator[NDArray[np.float32]]:
    """Yields the blocks of a clip. Raises ValueError, at its end at the latest, if it is cut, silent, or no sound."""
    read, peak = 0, 0.0
    for block in _blocks(file, samples):
        read += len(block)
        peak = max(peak, float(np.abs(block).max(initial=0.0)))
        if not math.isfinite(peak) or np.isnan(block).any():
            raise ValueError("it has samples that are no numbers")
        yield block
    if read != samples:
        raise ValueError(f"cut off, or damaged: {read:,} of {samples:,} samples can be read")
    if peak == 0:
        raise ValueError("silent: every sample is zero")
    if file.subtype in _OF_FLOATS and peak > 1:
        raise ValueError(f"its samples are floats up to {peak:.3g}, and full scale is 1: save it scaled down")


def _blocks(file: Any, samples: int) -> Iterator[NDArray[np.float32]]:
    """Yields blocks (n, channels) of a file, one sample more than `samples` at most."""
    left = samples + 1
    while left > 0 and len(block := file.read(min(_BLOCK, left), dtype="float32", always_2d=True)):
        left -= len(block)
        yield block


def resampled_length(samples: int, rate: int, to: int) -> int:
    """Returns the samples of a clip at another rate."""
    return samples if rate == to else math.ceil(samples * to / rate)


def _mixed_down(block: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns (n,), the mean over the channels of a block (n, channels)."""
    if block.shape[1] == 2:  # `mean` gives the same bits, and takes longer than to decode them
        return np.float32(0.5) * (block[:, 0] + block[:, 1])
    return block.mean(axis=1) if block.shape[1] > 1 else np.ascontiguousarray(block[:, 0])


def load_clip(source: str | bytes, samples: int, rate: int, to: int, checks: bool = False) -> NDArray[np.float32]:
    """Returns a clip, mixed down and at rate `to`. samples, rate: as it was found. Raises `broken` errors, ValueError
    if the file is another one. checks: also as `check_samples`."""
    check_copy(source)
    wave = np.zeros(resampled_length(samples, rate, to), np.float32)
    read = written = 0
    # By blocks, whose bits are those of the whole: an hour takes the memory of what it becomes.
    resampler = None if rate == to else _package("soxr").ResampleStream(rate, to, 1, dtype="float32", quality="HQ")
    with _opened(source) as file:
        if file.samplerate != rate:
            raise ValueError(f"{file.samplerate:,} samples a second, but it had {rate:,} when its row was tokenized")
        for block in _checked(file, samples) if checks else _blocks(file, samples):
            read += len(block)
            if read > samples:  # the file is another one; a resampler takes nothing after its last block
                continue
            mono = _mixed_down(block)
            piece = mono if resampler is None else resampler.resample_chunk(mono, last=read == samples)
            piece = piece[: len(wave) - written]
            wave[written : written + len(piece)] = piece
            written += len(piece)
    if read != samples:
        raise ValueError(f"not the {samples:,} samples that it had when its row was tokenized")
    return wave


_PLAYED = (16_000, 60)  # samples a second, and seconds


def playable(clip: Clip) -> bytes:
    """Returns the beginning of a clip as a small WAV file, for people; the rest is not read. Raises `broken` errors."""
    rate, seconds = _PLAYED
    check_copy(clip.source)
    with _opened(clip.source) as file:
        beginning = min(clip.samples, seconds * clip.rate)
        wave = np.concatenate([_mixed_down(block) for block in _blocks(file, beginning - 1)])
    if clip.rate != rate:
        wave = _package("soxr").resample(wave, clip.rate, rate, quality="HQ")
    content = io.BytesIO()
    _package("soundfile").write(content, np.clip(wave, -1, 1), rate, format="WAV", subtype="PCM_16")
    return content.getvalue()
