"""The order in which a run sees its rows: a pure function of the seed and the position, never of who asks."""

from __future__ import annotations

import numpy as np


class RowOrder:
    """Row at every position of a run: each epoch a fresh permutation of all rows.

    A position counts rows over the whole run (epoch = position // num_rows), so one number is all that a checkpoint
    has to keep. World size, accumulation and workers do not enter.
    """

    def __init__(self, num_rows: int, seed: int):
        if num_rows < 1:
            raise ValueError(f"an order needs at least one row, got {num_rows}")
        self.num_rows = num_rows
        self.seed = seed
        self._epoch = -1
        self._permutation = np.empty(0, np.int64)  # (num_rows,) of self._epoch

    def row_at(self, position: int) -> int:
        """Row (0-based) at a position (0-based) of the run; positions have no end."""
        epoch, within = divmod(position, self.num_rows)
        return int(self.epoch(epoch)[within])

    def epoch(self, epoch: int) -> np.ndarray:
        """The permutation of one epoch, (num_rows,) int64. The last one asked for is kept."""
        if epoch != self._epoch:
            # PCG64 named, not default_rng: numpy may change its default, a run's order may not change.
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
            self._permutation = generator.permutation(self.num_rows)
            self._epoch = epoch
        return self._permutation
