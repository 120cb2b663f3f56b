"""Where decoding may begin in a video file, so that few frames of a long one need few others decoded.

    frames             0 1 2 3 4 5 6 7 8 9 ...     in the order that they are shown in
    keys               *         *         *       nothing behind one depends on what is before it
    wanted                               ^         begin at the key before it

A packet is read, and not decoded, to know its time and whether it is such a key. What is decoded behind a key is the
frame that the decoder gives from the beginning, to the bit: only keys that reset the decoder count, and files in which
frames are shown in another order than that of whole groups are decoded from their beginning.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_FAR = 24  # frames between two that are wanted; nearer ones are decoded on the way
_CONTAINERS = ("mov", "matroska")  # whose times are those of frames
_RESETS = ("vp8", "vp9", "mjpeg")  # of which every key frame resets the decoder
# Of these the frame that resets it has a number of its own, by the standards (ITU-T H.264, table 7-1: 5; H.265, table
# 7-1: 19 and 20); its place in the unit's first byte is (shift, mask).
_NUMBERED = {"h264": ((5,), 0, 0x1F), "hevc": ((19, 20), 1, 0x3F)}
_SIZE_AT = {"h264": 4, "hevc": 21}  # byte of the header of a stream that says how long sizes of units are


@dataclass(frozen=True)
class FrameIndex:
    """Times of a file's frames, and the keys among them."""

    times: tuple[int, ...]  # of each frame, in the stream's unit, ascending
    keys: tuple[int, ...]  # frames from which decoding may begin, ascending; the first is 0

    def key_of(self, frame: int) -> int:
        """Returns the last key up to a frame."""
        return self.keys[bisect_right(self.keys, frame) - 1]


def are_far_apart(places: Sequence[int]) -> bool:
    """Returns whether frames at ascending places are worth an index."""
    return any(later - earlier > _FAR for earlier, later in pairwise(places))


def index_of(container: Any, stream: Any, frames: int) -> FrameIndex | None:
    """Returns the index of an opened file, which this reads to its end; None if it has to be decoded whole.

    frames: that it is known to have.
    """
    codec = stream.codec_context.name
    if not container.format.name.startswith(_CONTAINERS) or codec not in (*_RESETS, *_NUMBERED):
        return None
    times, keys = list[int](), list[int]()  # in the order that packets are decoded in; keys: among these
    for packet in container.demux(stream):
        if not packet.size:  # the end
            continue
        if packet.is_discard or packet.is_corrupt or packet.pts is None or len(times) == frames:
            return None
        if packet.is_keyframe and _resets(codec, bytes(packet), stream.codec_context.extradata or b""):
            keys.append(len(times))
        times.append(packet.pts)
    return _in_whole_groups(times, keys) if len(times) == frames else None


def _in_whole_groups(times: list[int], keys: list[int]) -> FrameIndex | None:
    """Returns the index of packets if the first is a key, and the groups that keys begin do not overlap in time."""
    if not keys or keys[0] != 0 or len(set(times)) < len(times):
        return None
    groups = [times[begin:end] for begin, end in pairwise([*keys, len(times)])]
    closed = all(group[0] == min(group) for group in groups)
    apart = all(max(earlier) < later[0] for earlier, later in pairwise(groups))
    return FrameIndex(tuple(sorted(times)), tuple(keys)) if closed and apart else None


def _resets(codec: str, packet: bytes, header: bytes) -> bool:
    """Returns whether a key frame's packet resets its decoder."""
    if codec in _RESETS:
        return True
    numbers, shift, mask = _NUMBERED[codec]
    if len(header) <= _SIZE_AT[codec] or header[0] != 1:  # units that begin with marks, not with their sizes
        return False
    width, at = (header[_SIZE_AT[codec]] & 3) + 1, 0
    while at + width < len(packet):
        if (packet[at + width] >> shift) & mask in numbers:
            return True
        at += width + int.from_bytes(packet[at : at + width], "big")
    return False


def sought(container: Any, stream: Any, index: FrameIndex, left: deque[int]) -> Iterator[tuple[int, Any]]:
    """Yields (place, frame) of the frames that are decoded for those in `left`, from whose beginning the caller takes
    what it was given; ends early if the decoder gives others than the index says."""
    frames, at = container.decode(stream), -1  # at: place of the last one
    while left:
        if (key := index.key_of(left[0])) > at + 1:
            container.seek(index.times[key], stream=stream)
            frames, at = container.decode(stream), key - 1
        frame = next(frames, None)
        if frame is None or frame.pts != index.times[at + 1]:
            return
        at += 1
        yield at, frame
