"""Examples of each source in an epoch, and the rows of a run whose epochs have different ones.

An epoch that takes a part of a source continues where the one before it ended, in one permutation of the source that is
repeated. So the counts of how often a run has taken an example, after any number of epochs, differ by at most 1.

    source of 5 examples, permutation 3 0 4 1 2, 0.5 passes an epoch
    positions  round(0.5 * 5 * epoch):  0 2 5 8 10        epochs take  {3 0}  {4 1 2}  {3 0 4}  {1 2}

If every epoch takes whole passes, all epochs have the same examples and rows, and `RowOrder` is all that a run needs.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from finetune.data.packing import Rows, one_per_row, pack, row_work, shuffled

UNBOUNDED = 1e30  # passes; not infinity, because 0 times that is not a number
_EPOCHS_KEPT = 2  # in memory; a step may lie in both


@dataclass(frozen=True)
class SourceShare:
    """Share of a source of `n` examples in each epoch."""

    order: NDArray[np.int64]  # (n,) the permutation
    passes: float  # in an epoch
    most: float = UNBOUNDED  # passes in the run
    lengths: NDArray[np.integer] | None = None  # (n,) tokens of each example, if passes are counted in tokens

    @cached_property
    def _reached(self) -> NDArray[np.int64]:
        """(n,) tokens up to and with each example, in order."""
        return np.cumsum(np.asarray(self.lengths, np.int64)[self.order])

    def position(self, epochs: float) -> int:
        """Returns the examples in `epochs` epochs; counted in tokens, as many as come nearest to them."""
        passes, count = min(epochs * self.passes, self.most), len(self.order)
        if self.lengths is None or not count:
            return round(passes * count)
        whole, rest = divmod(passes, 1.0)
        wanted = rest * self._reached[-1]
        last = int(np.searchsorted(self._reached, wanted))  # the first example that reaches it
        before = int(self._reached[last - 1]) if last else 0
        nearer = last < count and self._reached[last] - wanted < wanted - before
        return int(whole) * count + last + int(nearer)

    def taken(self, begin: float, end: float) -> NDArray[np.int64]:
        """Returns the examples between two times of a run, in epochs: whole passes, then the rest, ascending."""
        first, last, count = self.position(begin), self.position(end), len(self.order)
        passes, rest = divmod(last - first, count) if count else (0, 0)
        again = self.order[(first + np.arange(rest)) % count] if rest else np.empty(0, np.int64)
        return np.concatenate([np.tile(np.arange(count), passes), np.sort(again)]).astype(np.int64)

    def is_whole(self, num_epochs: int) -> bool:
        """Returns whether each of `num_epochs` epochs takes whole passes."""
        return self.position(num_epochs) == num_epochs * round(self.passes) * len(self.order)


def source_order(count: int, seed: int, source_index: int) -> NDArray[np.int64]:
    """Returns the permutation (count,) of a source's examples."""
    # PCG64 named, not default_rng: numpy may change its default, a run's order may not change.
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, source_index]))).permutation(count)


@dataclass(frozen=True)
class RunLength:
    """Length of training, by the limit that is reached first."""

    epochs: float | None
    rows: int | None  # packed sequences, of `train.max_steps`

    def span(self, epoch: int) -> tuple[float, float]:
        """Returns the begin and end of an epoch, in epochs: of 2.5 epochs, the last one is half as long."""
        return epoch, min(epoch + 1, self.epochs or math.inf)


def epochs_differ(shares: Sequence[SourceShare], length: RunLength, rows_per_epoch: int) -> bool:
    """Returns whether epochs take different examples, or one takes a source more often than a run may."""
    num_epochs = math.ceil(length.epochs or (length.rows or 0) / rows_per_epoch)
    if num_epochs <= 1:
        return any(share.passes > share.most for share in shares)
    return not all(share.is_whole(num_epochs) for share in shares)


class EpochRows:
    """The rows of every epoch of a run, one epoch after the other; packed when they are needed.

    Row `starts[e] + i` is row `i` of epoch `e`. Members of rows are places in the run's examples: those of `chosen`,
    source after source, each once. An epoch may have an example twice.
    """

    def __init__(
        self,
        shares: Sequence[SourceShare],
        lengths: Sequence[NDArray[np.int64]],
        length: RunLength,
        max_length: int | None,
        chosen: list[NDArray[np.int64]] | None = None,
    ):
        """lengths: (n,) tokens of all examples of each source; max_length: None if examples are not packed; chosen:
        those of each source that the run may take, None for those that it does.

        Packs every epoch once, to count the rows of each. There are fewer than `length.rows` if every source is
        exhausted before.
        """
        self.shares, self.length, self.max_length = tuple(shares), length, max_length
        self._source_lengths = tuple(lengths)
        self.starts = [0]  # (epochs + 1,) first row of each epoch, and the end
        while self.num_epochs < (length.epochs or math.inf) and self.starts[-1] < (length.rows or math.inf):
            taken = zip(lengths, self._taken(self.num_epochs), strict=True)
            tokens = np.concatenate([of_source[indices] for of_source, indices in taken])
            if not len(tokens) and all(self.num_epochs * share.passes >= share.most for share in self.shares):
                break
            self.starts.append(self.starts[-1] + len(self._rows(tokens)))
        end = length.span(self.num_epochs - 1)[1]
        self.chosen = chosen or [np.sort(share.order[: share.position(end)]) for share in self.shares]  # of each source
        self._lengths = np.concatenate([all_[indices] for all_, indices in zip(lengths, self.chosen, strict=True)])
        self.epoch = lru_cache(_EPOCHS_KEPT)(self._epoch)

    @property
    def num_epochs(self) -> int:
        return len(self.starts) - 1

    def __len__(self) -> int:
        """Rows of all epochs."""
        return self.starts[-1]

    def __getitem__(self, row: int) -> NDArray[np.int64]:
        """Returns the examples of one row."""
        epoch = self.epoch_of(row)
        return self.epoch(epoch)[row - self.starts[epoch]]

    def epoch_of(self, row: int) -> int:
        return bisect_right(self.starts, row) - 1

    def epochs(self, row: int) -> float:
        """Returns the epochs that are done when the rows before this one are."""
        epoch = self.epoch_of(max(0, row - 1))
        (begin, end), (first, last) = self.length.span(epoch), self.starts[epoch : epoch + 2]
        return begin + (end - begin) * (row - first) / (last - first)

    def members(self, epoch: int) -> NDArray[np.int64]:
        """Returns the examples of an epoch, source after source."""
        firsts = np.cumsum([0, *map(len, self.chosen)])
        of_sources = zip(firsts, self.chosen, self._taken(epoch), strict=False)
        return np.concatenate([first + np.searchsorted(chosen, taken) for first, chosen, taken in of_sources])

    def unpacked(self) -> EpochRows:
        """Returns the same epochs, each example in a row of its own."""
        return EpochRows(self.shares, self._source_lengths, self.length, None, self.chosen)

    def _taken(self, epoch: int) -> list[NDArray[np.int64]]:
        return [share.taken(*self.length.span(epoch)) for share in self.shares]

    def _epoch(self, epoch: int) -> Rows:
        members = self.members(epoch)
        rows = self._rows(self._lengths[members])
        return Rows(rows.offsets, members[rows.members])

    def _rows(self, lengths: NDArray[np.int64]) -> Rows:
        return one_per_row(lengths) if self.max_length is None else pack(lengths, self.max_length)


class EpochOrder:
    """Row at every position of a run, a permutation of each epoch's rows, as `RowOrder` has for equal epochs."""

    def __init__(self, rows: EpochRows, seed: int, attention_work: NDArray[np.int64], group: int):
        """attention_work: (N,) of each example."""

        @lru_cache(_EPOCHS_KEPT)
        def epoch_order(epoch: int) -> NDArray[np.int64]:
            of_epoch, first = rows.epoch(epoch), rows.starts[epoch]
            return shuffled(len(of_epoch), (seed, epoch), row_work(of_epoch, attention_work), group, first)

        self._rows, self._epoch = rows, epoch_order

    def row_at(self, position: int) -> int:
        """Returns the row at a position of the run, both from 0."""
        epoch = self._rows.epoch_of(position)
        first = self._rows.starts[epoch]
        return first + int(self._epoch(epoch)[position - first])

    def epochs(self, position: int) -> float:
        return self._rows.epochs(position)
