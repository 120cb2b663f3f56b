"""The counts of samples that an mp4 states, read before FFmpeg makes a table of so many.

An mp4 is boxes within boxes, each 4 bytes of its size and 4 of its name. A box `stsz` or `trun` may state any number of
samples in a dozen bytes, and a reader's table takes 24 bytes for each: a file of 2 KB would fill the memory.
Layout: ISO/IEC 14496-12.
"""

from __future__ import annotations

from typing import BinaryIO

MOST_SAMPLES = 1 << 25  # of all tracks: 800 MB of a reader's table; ten minutes of plain 48 kHz sound are 29 million
_MOST_BOXES = 1_000_000  # that are looked at; a file of ten minutes in fragments of a frame has 200,000
_FOLDERS = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf")
_COUNTS = {b"stsz": 8, b"stz2": 8, b"trun": 4}  # place of the count after the box's name


def check_sample_counts(file: BinaryIO, size: int) -> None:
    """Raises ValueError if an mp4 of `size` bytes states more samples than it could have, or than are read."""
    samples, waiting = 0, [(0, size)]
    for _ in range(_MOST_BOXES):
        if not waiting:
            return
        begin, end = waiting.pop()
        if begin + 8 > end:
            continue
        length, name, content = _box(file, begin, end)
        waiting.append((begin + length, end))
        if name in _FOLDERS:
            waiting.append((content, begin + length))
        elif name in _COUNTS:
            file.seek(content + _COUNTS[name])
            samples += int.from_bytes(file.read(4), "big")
            if samples > min(size, MOST_SAMPLES):
                raise ValueError(f"its index states {samples:,} samples: damaged, or more than are read")
    raise ValueError(f"its index has more than {_MOST_BOXES:,} parts")


def _box(file: BinaryIO, begin: int, end: int) -> tuple[int, bytes, int]:
    """Returns (bytes, name, place of the content) of the box at `begin`."""
    file.seek(begin)
    head = file.read(16)
    length, name, content = int.from_bytes(head[:4], "big"), head[4:8], begin + 8
    if length == 1:  # the size did not fit
        length, content = int.from_bytes(head[8:16], "big"), begin + 16
    if length == 0:  # up to the end
        length = end - begin
    return max(min(length, end - begin), content - begin), name, content
