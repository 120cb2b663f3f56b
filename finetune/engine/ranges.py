"""Which elements of a flattened parameter a rank holds, or a file: a contiguous range, or equal runs at a distance.

    columns 2 and 3 of a (3, 4) matrix     . . 2 3  . . 6 7  . . 10 11     Range(start=2, run=2, stride=4, count=3)

A range's own elements are numbered as they lie in memory, one run behind the other: 2 3 6 7 10 11 are 0 to 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Range:
    """Elements start + i * stride + j of the flattened parameter, for i < count and j < run."""

    start: int
    run: int
    stride: int = 0  # without meaning where there is one run
    count: int = 1

    @property
    def numel(self) -> int:
        return self.run * self.count

    @property
    def is_contiguous(self) -> bool:
        return self.count == 1 or self.run == self.stride


@dataclass(frozen=True)
class Overlap:
    """Elements that two ranges share, by their numbers in each: for i < count and j < run,
    low + i * from_pitch + j of the first is at + i * to_pitch + j of the second."""

    low: int
    at: int
    run: int
    from_pitch: int = 0
    to_pitch: int = 0
    count: int = 1

    @property
    def numel(self) -> int:
        return self.run * self.count

    def joined(self) -> Overlap:
        """As one run, where runs follow each other in both."""
        if self.count == 1 or self.run == self.from_pitch == self.to_pitch:
            return Overlap(self.low, self.at, self.numel)
        return self

    def within(self, start: int, end: int) -> Iterator[Overlap]:
        """What of it lies at [start, end) of the second range, numbered from there: a begun run, whole ones, a rest."""
        if self.count == 1:
            low, high = max(self.at, start), min(self.at + self.run, end)
            if low < high:
                yield Overlap(self.low + low - self.at, low - start, high - low)
            return
        first = min(max(-(-(start - self.at) // self.to_pitch), 0), self.count)  # the first run that begins in there
        last = min(max((end - self.run - self.at) // self.to_pitch + 1, first), self.count)  # behind those that end
        for i in (first - 1, *((last,) if last >= first else ())):
            if 0 <= i < self.count:
                yield from self._one(i).within(start, end)
        if first < last:
            yield replace(self._one(first), at=self._one(first).at - start, **self._pitches, count=last - first)

    def _one(self, i: int) -> Overlap:
        return Overlap(self.low + i * self.from_pitch, self.at + i * self.to_pitch, self.run)

    @property
    def _pitches(self) -> dict[str, int]:
        return {"from_pitch": self.from_pitch, "to_pitch": self.to_pitch}


@dataclass(frozen=True)
class _Rectangle:
    """Rows and columns of a parameter seen as rows of some width; element (row, column) of it is number
    at + (row - top) * pitch + column - left of its range."""

    top: int
    bottom: int
    left: int
    right: int
    at: int
    pitch: int


def overlaps(first: Range, second: Range) -> Iterator[Overlap]:
    """Where they meet; as few pieces as there are, whatever the number of runs."""
    width = _width(first, second)
    if width is None:  # cut along other dimensions: run by run
        for i in range(first.count):
            one = Range(first.start + i * first.stride, first.run)
            for overlap in overlaps(one, second):
                yield replace(overlap, low=overlap.low + i * first.run)
        return
    for a in _rectangles(first, width):
        for b in _rectangles(second, width):
            top, bottom = max(a.top, b.top), min(a.bottom, b.bottom)
            left, right = max(a.left, b.left), min(a.right, b.right)
            if top < bottom and left < right:
                low = a.at + (top - a.top) * a.pitch + left - a.left
                at = b.at + (top - b.top) * b.pitch + left - b.left
                yield Overlap(low, at, right - left, a.pitch, b.pitch, bottom - top).joined()


def _width(first: Range, second: Range) -> int | None:
    """Of rows in which both are rectangles, or None."""
    strides = {r.stride for r in (first, second) if not r.is_contiguous}
    if not strides:
        return max(first.start + first.numel, second.start + second.numel)  # one row for all
    return strides.pop() if len(strides) == 1 else None


def _rectangles(r: Range, width: int) -> Iterator[_Rectangle]:
    """One of a strided range; of a contiguous one what begins in the middle of a row, whole rows, and the rest."""
    if not r.is_contiguous:
        top, left = divmod(r.start, width)
        yield _Rectangle(top, top + r.count, left, left + r.run, 0, r.run)
        return
    start, end = r.start, r.start + r.numel
    while start < end:
        top, left = divmod(start, width)
        if left or end - start < width:
            right = min(width, left + end - start)
            yield _Rectangle(top, top + 1, left, right, start - r.start, width)
            start += right - left
        else:
            rows = (end - start) // width
            yield _Rectangle(top, top + rows, 0, width, start - r.start, width)
            start += rows * width
