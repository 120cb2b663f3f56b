"""Loss and tokens of each source of a mixture, beside those of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from finetune.data.batch import Batch, target_sources


class SourceSums:
    """Sums over micro-batches: nats, supervised tokens and tokens of each source. Nothing where there is one source.

    `values` of all ranks added up element by element, as `Engine.sum` does, are those of the global batch.
    """

    def __init__(self, names: Sequence[str], device: torch.device):
        self.names = tuple(names) if len(names) > 1 else ()
        self._sums = torch.zeros(3, len(self.names), dtype=torch.float64, device=device)

    def add(self, batch: Batch, losses: Tensor) -> None:
        """losses: (S,) of the batch's targets, in their order."""
        if not self.names:
            return
        of_target = target_sources(batch).to(self._sums.device)  # (S,)
        self._sums[0].index_add_(0, of_target, losses.detach().to(self._sums.dtype))
        self._sums[1] += torch.bincount(of_target, minlength=len(self.names))
        for source, length in zip(batch.sources, batch.document_lengths, strict=False):  # a filler has no source
            self._sums[2, source] += length

    def values(self) -> list[Tensor]:
        return list(self._sums.flatten())

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
