"""Video files: measured by their packets, decoded frame by frame, turned upright. `stored_files.py` locates them.

A video is a file, or its frames as pictures: a folder in the order of their numbers, or a list. Of a file the kind is
told by its first bytes and never by its name, and its demuxer alone may read it: others follow addresses in a file.
No more than one frame is in memory at its stored size.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from finetune.data.media.frame_index import are_far_apart, index_of, sought
from finetune.data.media.image_files import BROKEN, decode, side_by_side, size_of
from finetune.data.media.mp4_boxes import check_sample_counts
from finetune.data.media.stored_files import check_copy, part_of_file, printable, source_of
from finetune.data.samples import LISTED, BadRow, Video, files_of, listed
from finetune.errors import UserError
from finetune.recipe.schema import Videos

MAX_PIXELS = 1 << 24  # of a frame as it is stored; a decoder holds some twenty of them
MAX_LISTED = 10_000  # frames of a folder or a list
RATES = (Fraction(1, 100), Fraction(1000))  # frames a second of recordings; others are taken for a damaged header
_KINDS: tuple[tuple[int, bytes, str], ...] = (  # (place, bytes there, FFmpeg's demuxer)
    (4, b"ftyp", "mov"),
    (4, b"moov", "mov"),
    (4, b"mdat", "mov"),
    (4, b"wide", "mov"),
    (4, b"free", "mov"),
    (0, b"\x1aE\xdf\xa3", "matroska"),
    (8, b"AVI ", "avi"),
    (0, b"GIF8", "gif"),
    (188, b"G", "mpegts"),
)
NAMED = "mp4, mov, webm, mkv, avi, gif and ts"


@dataclass(frozen=True)
class StoredVideo:
    """A video as it is stored, with the size that it is seen in."""

    source: str | bytes  # see `samples.Video`
    frames: int
    rate: Fraction  # frames a second, on average
    height: int
    width: int


def find_video(reference: str | bytes, rules: Videos, data_file: str, listed_rate: float) -> StoredVideo:
    """Returns the video that a row of `data_file` names. listed_rate: frames a second of one that is pictures.

    Raises BadRow with the problem.
    """
    source = _source(reference, rules, data_file)
    try:
        if is_listed(source):
            return _measured_pictures(source, rules, Fraction(str(listed_rate)))
        stored = _measured(source, rules.max_seconds)
        return _decoded(stored) if rules.verify == "frames" else stored
    except broken() as error:
        name = "its bytes" if isinstance(source, bytes) else printable(files_of(source)[0])
        raise BadRow(f"the video cannot be used ({name}): {reason(error)}") from None


def broken() -> tuple[type[Exception], ...]:
    """Returns the errors that reading raises for a file that is no video, is cut off, or needs too much memory."""
    try:
        return (importlib.import_module("av").FFmpegError, *BROKEN)
    except ImportError:  # pictures need no package
        return BROKEN


def reason(error: Exception) -> str:
    """Returns the text of an error in one line, without FFmpeg's numbers."""
    text = re.sub(r"^\[Errno -?\d+\] ", "", " ".join(str(error).split()))
    return text.split(": '<")[0][:200] or type(error).__name__


def is_listed(source: str | bytes) -> bool:
    """Returns whether a video is pictures."""
    return isinstance(source, str) and source.startswith(LISTED)


def _av() -> Any:
    """Returns the package of the extra `video`. Raises UserError if it is missing."""
    try:
        return importlib.import_module("av")
    except ImportError:
        raise UserError(
            "data.video: av is not installed, which reads videos. Fix: pip install 'finetune-recipes[video]', or av"
        ) from None


# --- which file


def _source(reference: str | bytes, rules: Videos, data_file: str) -> str | bytes:
    """Returns `samples.Video.source` of a reference; a folder becomes the list of its files."""
    if is_listed(reference):
        assert isinstance(reference, str)
        return listed(_picture(path, rules, data_file) for path in _few(files_of(reference), data_file))
    source = source_of(reference, "video", rules, data_file)
    if isinstance(source, bytes) or not Path(source).is_dir():
        return source
    paths = [str(path) for path in Path(source).iterdir() if not path.name.startswith(".")]
    if not paths:
        raise BadRow(f"{printable(source)}: the folder has no files, which would be the frames of a video")
    # A link in it may not lead out of it, either.
    inside = rules if rules.outside else rules.model_copy(update={"folder": source})
    return listed(_picture(path, inside, data_file) for path in sorted(_few(paths, source), key=_by_number))


def _few(paths: list[str], name: str) -> list[str]:
    if len(paths) > MAX_LISTED:
        raise BadRow(f"{printable(name)}: a video of {len(paths):,} pictures; at most {MAX_LISTED:,} are read")
    return paths


def _picture(path: str, rules: Videos, data_file: str) -> str:
    source = source_of(path, "video", rules, data_file)
    if isinstance(source, bytes) or Path(source).is_dir():
        raise BadRow(f"{printable(path[:60])}: the frames of a video have to be files of pictures")
    return source


def _by_number(path: str) -> list[tuple[int, str]]:
    """Sorts 2.png before 10.png."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", Path(path).name)]


# --- its size


def _measured_pictures(source: str | bytes, rules: Videos, rate: Fraction) -> StoredVideo:
    assert isinstance(source, str)
    paths = files_of(source)
    if len(paths) > rules.max_seconds * rate:
        raise ValueError(_too_long(len(paths) / rate, rules.max_seconds))
    sizes = {size_of(path): path for path in reversed(paths)}
    if len(sizes) > 1:
        shown = " and ".join(f"{width} x {height}" for height, width in list(sizes)[:2])
        raise ValueError(f"frames of different sizes ({shown}): scale them to one")
    ((height, width),) = sizes
    _check_size(height, width)
    if rules.verify == "frames":
        for path in paths:
            decode(path)
    return StoredVideo(source, len(paths), rate, height, width)


def _measured(source: str | bytes, max_seconds: float) -> StoredVideo:
    """Returns a file's size by its packets and its first frame. Raises `broken` errors."""
    with _opened(source) as (container, stream):
        if container.duration and container.duration > max_seconds * 1e6:
            raise ValueError(_too_long(container.duration / 1e6, max_seconds))
        count, first, last = 0, None, None
        for packet in container.demux(stream):
            if not packet.size or packet.is_discard:  # the end, and frames that an edit list leaves out
                continue
            if packet.is_corrupt:
                raise ValueError("cut off, or damaged")
            count += 1
            if packet.pts is not None:
                first = packet.pts if first is None else min(first, packet.pts)
                last = packet.pts if last is None else max(last, packet.pts)
            if count > max_seconds * RATES[1]:
                raise ValueError(_too_long(count / RATES[1], max_seconds))
        if not count:
            raise ValueError("empty: it has no frames")
        spans = None if first is None or last is None else (last - first) * stream.time_base
        rate = stream.average_rate or (Fraction(count - 1) / spans if spans else None)
    if rate is None or not RATES[0] <= rate <= RATES[1]:
        stated = "an unknown number of" if rate is None else f"{float(rate):,.3g}"
        raise ValueError(f"{stated} frames a second; videos have {float(RATES[0])} to {int(RATES[1])}")
    if count > max_seconds * rate:
        raise ValueError(_too_long(count / rate, max_seconds))
    with _opened(source) as (container, stream):
        height, width = upright(next(container.decode(stream))).shape[:2]
    return StoredVideo(source, count, rate.limit_denominator(10**6), height, width)


def _too_long(seconds: Any, most: float) -> str:
    return f"{float(seconds):,.0f} s; `data.video.max_seconds` is {most:g}: cut it into pieces, or raise that"


def _decoded(stored: StoredVideo) -> StoredVideo:
    """Returns a file with the number of frames that its decoder gives. Raises `broken` errors for a damaged one."""
    count = 0
    with _opened(stored.source) as (container, stream):
        for frame in container.decode(stream):
            if frame.is_corrupt:
                raise ValueError(f"damaged: frame {count + 1} of {stored.frames} cannot be decoded whole")
            count += 1
    # Half of them are gone if two packets are a frame, as in interlaced recordings.
    if count < stored.frames // 2:
        raise ValueError(f"damaged: {count:,} of {stored.frames:,} frames can be decoded")
    return replace(stored, frames=count)


def _check_size(height: int, width: int) -> None:
    if height * width > MAX_PIXELS:
        raise ValueError(f"{width} x {height} pixels; at most {MAX_PIXELS:,} of a frame are read: scale it down")


@contextlib.contextmanager
def _opened(source: str | bytes) -> Iterator[tuple[Any, Any]]:
    """The file as (container, video stream). What belongs to them is gone with them. Raises `broken` errors."""
    head = part_of_file(source, 189)
    kind = next((name for at, mark, name in _KINDS if head[at : at + len(mark)] == mark), None)
    if kind is None:
        raise ValueError(f"not a video of a kind that is read ({NAMED} are)")
    if kind == "mov":
        with io.BytesIO(source) if isinstance(source, bytes) else Path(source).open("rb") as content:
            check_sample_counts(content, content.seek(0, io.SEEK_END))
    # Its path is absolute, and the demuxer is given: no name is an address or a pattern.
    file: Any = io.BytesIO(source) if isinstance(source, bytes) else source
    with _av().open(file, format=kind, metadata_errors="ignore") as container:
        if not container.streams.video:
            raise ValueError("it has no pictures, only sound or text")
        stream = container.streams.video[0]
        _check_size(stream.codec_context.height, stream.codec_context.width)
        stream.codec_context.options = {"max_pixels": str(MAX_PIXELS)}  # if the frames are larger than is said
        stream.codec_context.thread_count = 1  # several files are decoded at once
        yield container, stream


# --- its frames


def frames_at(video: Video, indices: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yields the frames (H, W, 3) in RGB at ascending places, as displayed.

    Raises `broken` errors, ValueError if the video is another one than that which was tokenized.
    """
    wanted, given = set(indices), 0
    for picture in _pictures(video, wanted) if is_listed(video.source) else _of_file(video, wanted):
        if picture.shape[:2] != (video.height, video.width):
            height, width = picture.shape[:2]
            raise ValueError(
                f"{width} x {height} pixels, but it had {video.width} x {video.height} when its row was tokenized"
            )
        given += 1
        yield picture
    if given != len(wanted):
        raise ValueError(f"not the {video.frames:,} frames that it had when its row was tokenized")


def _pictures(video: Video, wanted: set[int]) -> Iterator[NDArray[np.uint8]]:
    assert isinstance(video.source, str)
    for i, path in enumerate(files_of(video.source)):
        if i in wanted:
            yield np.array(decode(path))  # torch wants memory that it may write to


def _of_file(video: Video, wanted: set[int]) -> Iterator[NDArray[np.uint8]]:
    check_copy(video.source)
    left, index = deque(sorted(wanted)), None
    if are_far_apart([-1, *left]):
        with _opened(video.source) as (container, stream):
            index = index_of(container, stream, video.frames)
    # If decoding behind a key is not as the index says, what is left comes from the beginning.
    for decoded in (_from_beginning,) if index is None else (partial(sought, index=index, left=left), _from_beginning):
        with _opened(video.source) as (container, stream):
            for i, frame in decoded(container, stream):
                if i == left[0]:
                    yield upright(frame)
                    left.popleft()
                if not left:
                    return


def _from_beginning(container: Any, stream: Any) -> Iterator[tuple[int, Any]]:
    return enumerate(container.decode(stream))


_SHOWN = 8  # frames


def film(video: Video, indices: Sequence[int]) -> bytes:
    """Returns some of the frames at these places, from the first to the last, small and side by side, as a PNG file.

    Raises `broken` errors.
    """
    places = np.linspace(0, len(indices) - 1, min(len(indices), _SHOWN)).round().astype(int)
    return side_by_side([Image.fromarray(frame) for frame in frames_at(video, [indices[i] for i in places])], 160)


def upright(frame: Any) -> NDArray[np.uint8]:
    """Returns a frame (H, W, 3) in RGB, turned as its file says (counter-clockwise, in quarters)."""
    _check_size(frame.height, frame.width)
    picture = frame.to_ndarray(format="rgb24")
    turns = round(frame.rotation / 90) % 4
    return np.ascontiguousarray(np.rot90(picture, turns)) if turns else picture
