"""Rows of tokens between the ranks that share the experts of a model: see `models/experts.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from finetune.engine.stopwatch import Stopwatch


class AllToAll:
    """An `Exchange` over a process group."""

    def __init__(self, group: ProcessGroup, stopwatch: Stopwatch):
        self.size, self._group, self._stopwatch = group.size(), group, stopwatch

    def weight(self, stacked: Any) -> Tensor:
        """FSDP's average is over a `size`-th of the ranks, and these gradients are from the tokens of `size` ranks:
        divided by that, they are averages over all ranks, as those of the rest of the model."""
        local = stacked.to_local()
        if local.requires_grad:
            local.register_hook(lambda gradient: gradient / self.size)
        return local

    def counts(self, counts: Tensor) -> Tensor:
        received = torch.empty_like(counts)
        with self._stopwatch.waiting():
            torch.distributed.all_to_all_single(received, counts, group=self._group)
        return received

    def rows(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        # torch's stubs do not know what `apply` gives.
        return _Exchanged.apply(rows, sent, received, self._group, self._stopwatch)  # pyright: ignore[reportReturnType]


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup, stopwatch: Stopwatch
    ) -> Tensor:
        ctx.way_back = (received, sent, group, stopwatch)
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        with stopwatch.waiting():
            torch.distributed.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Exchanged.apply(*gradients, *ctx.way_back), None, None, None, None
