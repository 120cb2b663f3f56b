"""Which documents share a row: best-fit decreasing over all lengths at once.

Letters: `N` documents, `R` rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Rows:
    """Documents of every row, as compressed sparse rows.

    row 0 holds documents 0, 3; row 1 holds document 1; row 2 holds documents 2, 4
    offsets  [0, 2, 3, 5]         (R + 1,)
    members  [0, 3, 1, 2, 4]      (N,)
    """

    offsets: NDArray[np.int64]  # (R + 1,)
    members: NDArray[np.int64]  # (N,) every document once

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[np.int64]:
        """Documents of one row, ascending."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return self.members[self.offsets[row] : self.offsets[row + 1]]

    def efficiency(self, lengths: NDArray[np.integer] | Sequence[int], max_length: int) -> float:
        """Share of the rows' places (R * max_length) that hold a token."""
        return float(np.sum(lengths, dtype=np.int64)) / (len(self) * max_length) if len(self) else 1.0


def one_per_row(lengths: NDArray[np.integer] | Sequence[int]) -> Rows:
    """Every document in a row of its own, in order."""
    count = len(lengths)
    return Rows(np.arange(count + 1, dtype=np.int64), np.arange(count, dtype=np.int64))


def pack(lengths: NDArray[np.integer] | Sequence[int], max_length: int) -> Rows:
    """Best-fit decreasing (Johnson 1973): longest first, each into the fullest row that still has room for it.

    At most 11/9 of the fewest possible rows, in practice over 99 % full. O(n log n) comparisons; the same lengths
    always give the same rows. `lengths` (N,) tokens, each within 1..max_length; else ValueError.

        lengths [5, 3, 7, 2, 3], max_length 10  ->  rows (1, 2), (0, 3, 4)
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= max_length:
        raise ValueError(f"lengths must be within 1..{max_length}, got {lengths.min()}..{lengths.max()}")
    bins = _Bins(max_length)
    for document in np.argsort(-lengths, kind="stable").tolist():
        bins.place(document, int(lengths[document]))
    sizes = np.array([len(members) for members in bins.members], np.int64)
    flat = [document for members in bins.members for document in sorted(members)]
    return Rows(np.concatenate(([0], np.cumsum(sizes))).astype(np.int64), np.array(flat, np.int64))


class _Bins:
    """Open rows by the room they have left. There are at most max_length distinct rooms, found by bisection."""

    def __init__(self, max_length: int):
        self.max_length = max_length
        self.members: list[list[int]] = []
        self._rooms: list[int] = []  # distinct, ascending
        self._rows_with: dict[int, list[int]] = {}  # room left -> rows

    def place(self, document: int, length: int) -> None:
        room, row = self._tightest(length)
        self.members[row].append(document)
        self._add(room - length, row)

    def _tightest(self, length: int) -> tuple[int, int]:
        """Takes out the row with the least room that still holds `length`; a new row if there is none."""
        at = bisect_left(self._rooms, length)
        if at == len(self._rooms):
            self.members.append([])
            return self.max_length, len(self.members) - 1
        room = self._rooms[at]
        rows = self._rows_with[room]
        row = rows.pop()
        if not rows:
            del self._rows_with[room], self._rooms[at]
        return room, row

    def _add(self, room: int, row: int) -> None:
        if room == 0:
            return
        if room not in self._rows_with:
            self._rows_with[room] = []
            insort(self._rooms, room)
        self._rows_with[room].append(row)
