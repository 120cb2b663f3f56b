"""The optimizer's step inside the backward: each parameter by itself, as soon as its gradient is there.

The gradient is let go at once, so that all of them never lie in memory together (Lv et al. 2023,
https://arxiv.org/abs/2306.09782). What a backward still needs of a weight it has used by then: its gradient comes last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from finetune.engine.norms import squared_norm


class StepInBackward:
    """Hooks on parameters, and one optimizer for each. FSDP2 calls them behind its reduce-scatter (torch's
    _fsdp_collectives.py, foreach_reduce)."""

    def __init__(
        self,
        trained: Iterable[tuple[str, Tensor, Tensor]],  # name, parameter, this rank's part of it that is stepped
        build: Callable[[list[tuple[str, Tensor]]], list[Optimizer]],
        device: torch.device,
    ):
        self.optimizers: list[Optimizer] = []
        self._device, self._squares = device, list[Tensor]()
        for name, parameter, part in trained:
            (optimizer,) = build([(name, part)])
            self.optimizers.append(optimizer)
            parameter.register_post_accumulate_grad_hook(functools.partial(self._step, part, optimizer))

    def _step(self, part: Tensor, optimizer: Optimizer, parameter: Tensor) -> None:
        gradient = parameter.grad
        part.grad = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        assert part.grad is not None  # it has just been accumulated
        self._squares.append(squared_norm([part.grad], self._device))
        optimizer.step()
        part.grad = parameter.grad = None

    def take_squared_norm(self) -> Tensor:  # () fp64
        """Of this rank's part of the gradient, since the last call."""
        squares, self._squares = self._squares, []
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self._device)
