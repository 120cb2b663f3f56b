"""The order in which a run sees its rows: a pure function of seed, epoch and the rows, never of who asks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
        """work: (num_rows,) of each row; without it, or with `group` 1, the order knows nothing of work."""
        if num_rows < 1:
            raise ValueError(f"an order needs at least one row, got {num_rows}")
        self.num_rows = num_rows
        self.seed = seed
        self.work = work
        self.group = group
        self._epochs: dict[int, NDArray[np.int64]] = {}  # the last two asked for: a step may lie in both

    def row_at(self, position: int) -> int:
        """Row (0-based) at a position (0-based) of the run; positions have no end."""
        epoch, within = divmod(position, self.num_rows)
        return int(self.epoch(epoch)[within])

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """The permutation of one epoch, (num_rows,)."""
        if epoch not in self._epochs:
            self._epochs = dict([*self._epochs.items(), (epoch, self._permutation(epoch))][-2:])
        return self._epochs[epoch]

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        return shuffled(self.num_rows, (self.seed, epoch), self.work, self.group, epoch * self.num_rows)


def shuffled(
    num_rows: int, seeds: tuple[int, int], work: NDArray[np.int64] | None, group: int, first_position: int
) -> NDArray[np.int64]:
    """A permutation (num_rows,) of rows that take the positions of a run from `first_position` on; see `RowOrder`."""
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
    mixed = [_mixed(window, work, generator) for window in windows]
    return np.concatenate([permutation[:first], *mixed, permutation[last:]])


def _mixed(window: NDArray[np.int64], work: NDArray[np.int64], generator: np.random.Generator) -> NDArray[np.int64]:
    """The rows of a window (groups, group) in groups of like work, in random order; flat."""
    rows = window.reshape(-1)
    by_work = rows[np.argsort(work[rows], kind="stable")].reshape(window.shape)
    return by_work[generator.permutation(len(window))].reshape(-1)


def group_rows(balance: int, rows_per_step: int) -> int:
    """Rows in a group: as many as divide a step and are not more than `balance`.

    Rows, not micro-batches: `rows_per_device` may change when a run resumes, and its order may not.

    >>> group_rows(8, 60)
    6
    """
    return max(n for n in range(1, min(balance, rows_per_step) + 1) if rows_per_step % n == 0)
