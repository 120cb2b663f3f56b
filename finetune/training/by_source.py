"""Loss and tokens of each source of a mixture, beside those of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from finetune.data.batch import Batch


class SourceSums:
    """Sums over micro-batches: nats, supervised tokens and tokens of each source. Nothing where there is one source.

    `values` of all ranks added up element by element, as `Engine.sum` does, are those of the global batch. Nats are
    added up on the device, what is counted on the host: nothing waits.
    """

    def __init__(self, names: Sequence[str], device: torch.device):
        self.names = tuple(names) if len(names) > 1 else ()
        self._nats = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        self._counts = np.zeros((2, len(self.names)), np.int64)  # supervised tokens, tokens

    def add(self, batch: Batch, losses: Tensor) -> None:
        """losses: (S,) of the batch's targets, in their order and on the device."""
        if not self.names:
            return
        sources = torch.tensor(batch.sequence_sources, dtype=torch.int64).to(losses.device, non_blocking=True)
        source_of_target = sources[batch.targets.sequence.to(losses.device)]
        self._nats.index_add_(0, source_of_target, losses.detach().to(self._nats.dtype))
        sequences = zip(batch.sequence_sources, batch.sequence_targets, batch.sequence_tokens, strict=True)
        for source, targets, tokens in sequences:
            self._counts[:, source] += (targets, tokens)

    def values(self) -> list[Tensor | float]:
        return [*self._nats, *map(float, self._counts.flatten())]

    def losses(self, values: Sequence[float]) -> dict[str, float]:
        """{name: nats per supervised token} of summed `values`, of the sources that had a token."""
        nats, supervised, _ = self._rows(values)
        return {name: n / s for name, n, s in zip(self.names, nats, supervised, strict=True) if s}

    def tokens(self, values: Sequence[float]) -> dict[str, int]:
        """{name: tokens} of summed `values`."""
        return {name: int(count) for name, count in zip(self.names, self._rows(values)[2], strict=True)}

    def _rows(self, values: Sequence[float]) -> list[Sequence[float]]:
        count = len(self.names)
        return [values[i * count : (i + 1) * count] for i in range(3)]
