"""Packs examples into rows, and orders the rows of a run.

Packing is decided over all lengths at once; an example of several sequences stays together. The order is a pure
function of seed, epoch and the rows, never of the launch.

Letters: `N` examples, `R` rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Rows:
    """Examples of every row, as compressed sparse rows.

    row 0 holds examples 0, 3; row 1 holds example 1; row 2 holds examples 2, 4
    offsets  [0, 2, 3, 5]         (R + 1,)
    members  [0, 3, 1, 2, 4]      (N,)
    """

    offsets: NDArray[np.int64]  # (R + 1,)
    members: NDArray[np.int64]  # (N,) every example once

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[np.int64]:
        """Returns the examples of one row, ascending."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return self.members[self.offsets[row] : self.offsets[row + 1]]

    def efficiency(self, lengths: NDArray[np.integer] | Sequence[int], max_length: int) -> float:
        """Returns the share of the rows' places (R * max_length) that hold a token."""
        return float(np.sum(lengths, dtype=np.int64)) / (len(self) * max_length) if len(self) else 1.0


def one_per_row(lengths: NDArray[np.integer] | Sequence[int]) -> Rows:
    """Returns every example in a row of its own, in order."""
    count = len(lengths)
    return Rows(np.arange(count + 1, dtype=np.int64), np.arange(count, dtype=np.int64))


_FULL = 0.999  # share of the places that hold a token; beyond it no search is needed
_SEARCHABLE = 2**34  # distinct lengths times the longest one: bounds the search to a few seconds

_Chain = tuple[Any, int, int] | None  # content of a row: (its content before, a length, how many of it)
_Pattern = tuple[list[tuple[int, int]], int]  # ([(length, how many of it in each row)], how many such rows)


def pack(lengths: NDArray[np.integer] | Sequence[int], max_length: int) -> Rows:
    """Packs uncut examples into as few rows as best-fit decreasing makes, or fewer; seconds for a million examples.

    Best-fit decreasing (Johnson 1973; at most 11/9 of the fewest possible rows): longest first, each into the fullest
    row that has room for it. If few examples are short enough to fill the remaining room, rows that are closed
    exactly are fewer: longest first, until two examples fill the rest to the last token (after the minimum bin slack
    heuristic of Gupta & Ho 1999, Production Planning & Control 10:6). Both look at how many examples there are of each
    length, and repeat a row as often as there are examples for it.

    `lengths` (N,) tokens, each within 1..max_length; else ValueError. The same lengths always give the same rows.

        lengths [5, 3, 7, 2, 3], max_length 10  ->  rows (1, 2), (0, 3, 4)
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= max_length:
        raise ValueError(f"lengths must be within 1..{max_length}, got {lengths.min()}..{lengths.max()}")
    present, counts = np.unique(lengths, return_counts=True)
    # The rows that one example at a time would fill, computed for all examples of a length together.
    open_rows = _OpenRows(max_length)
    for size, number in zip(present[::-1].tolist(), counts[::-1].tolist(), strict=True):
        open_rows.place(size, number)
    patterns = []
    for chain, repeats in open_rows.all():
        entries = []
        while chain is not None:
            chain, size, in_row = chain
            entries.append((size, in_row))
        patterns.append((entries, repeats))
    improvable = lengths.sum() < _FULL * _num_rows(patterns) * max_length
    if improvable and len(present) * present[-1] <= _SEARCHABLE:
        patterns = min(patterns, _closed(present, counts, max_length), key=_num_rows)
    # Examples take the places of their length: the earlier example in the earlier row.
    places = [(length, each, times) for entries, times in patterns for length, each in entries]
    length, each, times = np.array(places, np.int64).reshape(-1, 3).T  # one for each length in each pattern
    rows = np.array([times for _, times in patterns], np.int64)
    first_row = np.repeat(np.cumsum(rows) - rows, [len(entries) for entries, _ in patterns])
    # There are as many places by length, one pattern after the other, as examples by length.
    order = np.argsort(length, kind="stable")
    each, first_row, count = each[order], first_row[order], (each * times)[order]
    within = np.arange(len(lengths)) - np.repeat(np.cumsum(count) - count, count)
    row_of = np.empty(len(lengths), np.int64)
    row_of[np.argsort(lengths, kind="stable")] = np.repeat(first_row, count) + within // np.repeat(each, count)
    offsets = np.concatenate(([0], np.cumsum(np.bincount(row_of))))
    return Rows(offsets.astype(np.int64), np.argsort(row_of, kind="stable"))


def row_work(rows: Rows, attention_work: NDArray[np.integer] | Sequence[int]) -> NDArray[np.int64]:
    """Returns (R,) the attention work of each row, from that of all examples, see `ExampleSizes.attention_work`."""
    of_members = np.asarray(attention_work, np.int64)[rows.members]
    return np.add.reduceat(of_members, rows.offsets[:-1]) if len(rows) else of_members


def _num_rows(patterns: list[_Pattern]) -> int:
    return sum(times for _, times in patterns)


# --- best-fit decreasing


class _OpenRows:
    """Rows by the room they have left. There are at most max_length distinct rooms, located by bisection."""

    def __init__(self, max_length: int):
        self.max_length = max_length
        self._full: list[tuple[_Chain, int]] = []
        self._rooms: list[int] = []  # distinct, ascending
        self._rows_with: dict[int, list[tuple[_Chain, int]]] = {}  # room left -> [(their content, number of rows)]

    def all(self) -> list[tuple[_Chain, int]]:
        return self._full + [rows for room in self._rooms for rows in self._rows_with[room]]

    def place(self, length: int, count: int) -> None:
        """`count` examples of one length. A row that takes one is the fullest from then on, and takes all it can."""
        while count:
            # The rows with the least room that still holds `length`; if there are none, new ones for all.
            at = bisect_left(self._rooms, length)
            if at == len(self._rooms):
                room, chain, rows = self.max_length, None, -(-count // (self.max_length // length))
            else:
                room = self._rooms[at]
                chain, rows = self._rows_with[room].pop()
                if not self._rows_with[room]:
                    del self._rows_with[room], self._rooms[at]
            fits = room // length
            full = min(rows, count // fits)
            rest = count - full * fits if full < rows else 0  # for one more row
            self._add(room - fits * length, (chain, length, fits), full)
            self._add(room - rest * length, (chain, length, rest), int(rest > 0))
            self._add(room, chain, rows - full - (rest > 0))
            count -= full * fits + rest

    def _add(self, room: int, chain: _Chain, rows: int) -> None:
        if rows and not room:
            self._full.append((chain, rows))
        elif rows:
            if room not in self._rows_with:
                self._rows_with[room] = []
                insort(self._rooms, room)
            self._rows_with[room].append((chain, rows))


# --- rows closed exactly


def _closed(present: NDArray[np.int64], counts: NDArray[np.int64], max_length: int) -> list[_Pattern]:
    """Rows of the longest examples left, closed by two that fill the rest to the last token if possible."""
    stock = _Stock(present, counts)
    patterns = []
    while stock.longest(max_length):
        row, room = dict[int, int](), max_length
        far = 2 * stock.top  # with more room than that, two cannot close the row
        while longest := stock.longest(room):
            pair = stock.pair(room) if row and longest < room <= far else None
            many = max(1, min(stock.counts[longest], (room - far) // longest))
            for length, each in ((pair[0], 1), (pair[1], 1)) if pair else ((longest, many),):
                stock.take(length, each)
                row[length] = row.get(length, 0) + each
                room -= length * each
        again = min(stock.counts[length] // each for length, each in row.items())
        for length, each in row.items():
            stock.take(length, each * again)
        patterns.append((list(row.items()), 1 + again))
    return patterns


class _Stock:
    """Counts of the examples left of each length, and the lengths that are left, as bits of one number."""

    def __init__(self, present: NDArray[np.int64], counts: NDArray[np.int64]):
        self.top = int(present[-1])
        self.counts = dict(zip(present.tolist(), counts.tolist(), strict=True))
        bits = np.zeros(self.top + 1, np.uint8)
        bits[present] = 1
        self._bits = _number(bits)  # bit l: there are examples of length l
        self._mirrored = _number(bits[::-1])  # bit top - l

    def take(self, length: int, count: int) -> None:
        self.counts[length] -= count
        if count and not self.counts[length]:
            self._bits ^= 1 << length
            self._mirrored ^= 1 << (self.top - length)

    def longest(self, room: int) -> int:
        """The longest length within `room`; 0 if there is none."""
        within = self._bits if room >= self.top else self._bits & ((1 << (room + 1)) - 1)
        return max(0, within.bit_length() - 1)

    def pair(self, room: int) -> tuple[int, int] | None:
        """Lengths of two examples that fill `room` exactly, the first as long as can be."""
        shift = self.top - room
        partners = self._mirrored >> shift if shift >= 0 else self._mirrored << -shift  # bit l: room - l is there
        both = self._bits & partners
        length = both.bit_length() - 1
        if 2 * length == room and self.counts[length] < 2:
            return None  # the same example twice; a shorter first would have had a longer second
        return (length, room - length) if length > 0 else None


def _number(bits: NDArray[np.uint8]) -> int:
    return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")


# --- the order in which a run sees its rows


_WINDOW = 1024  # groups that are sorted together: enough for like work
_WINDOWS = 2  # in an epoch at least, drawn again in each: a row has other neighbours the next time


class RowOrder:
    """Row at every position of a run: each epoch a fresh permutation of all rows.

    A position counts rows over the whole run (epoch = position // num_rows), so one number is all that a checkpoint
    has to keep. World size, accumulation and workers do not enter.

    With `group` > 1, rows of like work stand together, so that processes which run them at the same time wait less for
    each other. Windows of the permutation are sorted by work and cut into groups, and the groups of a window are
    shuffled: a step of several groups is a mix. Groups begin at multiples of `group` in the whole run, wherever an
    epoch does, and so never lie across steps that are multiples of them; the one that two epochs share is as it comes.

        work of rows [9, 1, 8, 2, 9, 1, 8, 2], group 2   ->   rows such as  1 5  2 6  3 7  0 4
    """

    def __init__(self, num_rows: int, seed: int, work: NDArray[np.int64] | None = None, group: int = 1):
        """work: (num_rows,) of each row; without it, or with `group` 1, the order does not depend on work."""
        if num_rows < 1:
            raise ValueError(f"an order needs at least one row, got {num_rows}")
        self.num_rows = num_rows
        self.seed = seed
        self.work = work
        self.group = group
        self._epochs: dict[int, NDArray[np.int64]] = {}  # the last two that were read: a step may lie in both

    def row_at(self, position: int) -> int:
        """Returns the row (0-based) at a position (0-based) of the run; positions have no end."""
        epoch, within = divmod(position, self.num_rows)
        return int(self.epoch(epoch)[within])

    def epochs(self, position: int) -> float:
        """Returns the epochs that are done when the rows before this position are."""
        return position / self.num_rows

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """Returns the permutation of one epoch, (num_rows,)."""
        if epoch not in self._epochs:
            rows = shuffled(self.num_rows, (self.seed, epoch), self.work, self.group, epoch * self.num_rows)
            self._epochs = dict([*self._epochs.items(), (epoch, rows)][-2:])
        return self._epochs[epoch]


def shuffled(
    num_rows: int, seeds: tuple[int, int], work: NDArray[np.int64] | None, group: int, first_position: int
) -> NDArray[np.int64]:
    """Returns a permutation (num_rows,) of rows for the positions of a run from `first_position` on; see `RowOrder`."""
    # PCG64 named, not default_rng: numpy may change its default, a run's order may not change.
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seeds)))
    permutation = generator.permutation(num_rows)
    if work is None or group == 1:
        return permutation
    first = min(-first_position % group, num_rows)  # rows until the next group begins
    groups = (num_rows - first) // group
    last = first + groups * group
    count = max(_WINDOWS, -(-groups // _WINDOW))
    windows = np.array_split(permutation[first:last].reshape(groups, group), count)
    mixed = []
    for window in windows:  # (groups, group): groups of like work, in random order
        rows = window.reshape(-1)
        by_work = rows[np.argsort(work[rows], kind="stable")].reshape(window.shape)
        mixed.append(by_work[generator.permutation(len(window))].reshape(-1))
    return np.concatenate([permutation[:first], *mixed, permutation[last:]])


def group_rows(balance: int, rows_per_step: int) -> int:
    """Returns the rows in a group: as many as divide a step and are not more than `balance`.

    Rows, not micro-batches: `rows_per_device` may change when a run resumes, and its order may not.

    >>> group_rows(8, 60)
    6
    """
    return max(n for n in range(1, min(balance, rows_per_step) + 1) if rows_per_step % n == 0)
