"""Parts of an optimizer step that every backend shares: precision, loss scale, gradient norm, step in the backward.

Precision means the same under every backend. fp32, bf16 and fp16 keep trained weights in fp32 and let torch.autocast
choose the compute type inside the model's own forward. accelerate always gets `no`, DeepSpeed runs its fp32 path, FSDP2
has an explicit policy. bf16_true keeps and computes everything in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

OF_MEDIA, IDLE = "of_images", "idle"  # keys of a parameter group: kinds of files of its tower; the next step skips it
FIRST_SCALE, GROWTH_INTERVAL = 2.0**16, 2000  # good steps before the loss scale doubles; as torch.amp.GradScaler
_CHUNK = 2**18  # elements: 2 MB in fp64, which stays in a core's cache; 2**17 to 2**20 take as long
_SMALL = 2**14  # elements: their time is that of the operators


class NonFinite(Exception):
    """The loss or the gradient is not finite. No parameter was updated, unless `stepped`."""

    def __init__(self, message: str, stepped: bool = False):
        super().__init__(message)
        self.stepped = stepped


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2017, https://arxiv.org/abs/1710.03740); constant 1 elsewhere.
    Equal on all ranks: it changes with the global gradient norm."""

    enabled: bool
    value: float = 1.0
    growth_interval: int = GROWTH_INTERVAL
    good_steps: int = 0

    @classmethod
    def of(cls, precision: str) -> LossScale:
        return cls(True, FIRST_SCALE, GROWTH_INTERVAL) if precision == "fp16" else cls(enabled=False)

    def update(self, grad_norm: float) -> bool:
        """Returns False if the step must be skipped to lower the scale. Raises NonFinite if none is small enough."""
        if not self.enabled:
            return True
        if math.isfinite(grad_norm):
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.value, self.good_steps = self.value * 2, 0
            return True
        if self.value < 1.0:
            raise NonFinite("the gradient is not finite at any loss scale")
        self.value, self.good_steps = self.value / 2, 0
        return False


def squared_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the sum of squares of all elements, () fp64 on `device`; 0 without gradients.

    In fp64 for any sharding: fp32 norms of different shards differ in the last bits, and through clipping
    every element of the update would depend on the sharding.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    on_cpu = [gradient for gradient in gradients if gradient.is_cpu]
    others = [gradient for gradient in gradients if not gradient.is_cpu] if len(on_cpu) < len(gradients) else []
    if others:
        total += torch.stack(torch._foreach_norm(others, 2, torch.float64)).to(device).square().sum()
    return total + _squared_norm_on_cpu(on_cpu).to(device) if on_cpu else total


def _squared_norm_on_cpu(gradients: Sequence[Tensor]) -> Tensor:
    """`_foreach_norm` makes an fp64 copy of each gradient on one thread there: five times slower, and 8 bytes for each
    element of the largest. `view` where it is possible: `reshape` starts two operators."""
    total = torch.zeros((), dtype=torch.float64)
    flat = [one.view(-1) if one.is_contiguous() else one.reshape(-1) for one in gradients]
    small = [one for one in flat if one.numel() <= _SMALL]
    flat = [one for one in flat if one.numel() > _SMALL] + ([torch.cat(small)] if small else [])
    buffer = torch.empty(min(_CHUNK, max(map(len, flat))), dtype=torch.float64)
    for gradient in flat:
        for chunk in gradient.split(_CHUNK):
            wide = buffer[: len(chunk)].copy_(chunk)
            total += torch.dot(wide, wide)
    return total


def scale_gradients(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiplies gradients in place. On a CPU by a tensor of their type, which torch would make of the number for each
    of them, in fp64, and cast: the same bits, a quarter of the time."""
    types = {gradient.dtype for gradient in gradients} if all(gradient.is_cpu for gradient in gradients) else set()
    if len(types) == 1:
        torch._foreach_mul_(list(gradients), torch.tensor(factor, dtype=types.pop()))
    else:
        torch._foreach_mul_(list(gradients), factor)


def hold_back_idle_groups(optimizer: Optimizer) -> None:
    """Let `optimizer.step()` skip groups that are `IDLE`: weights, momentum and number of steps stay as they are.

    torch's optimizers skip parameters without a gradient. Backends give all parameters one, zeros if unused,
    and DeepSpeed steps one flat tensor for many: it is removed for the step, then put back, because under
    offload it is a buffer that DeepSpeed fills again.
    """
    hidden: list[tuple[Tensor, Tensor | None]] = []

    def hide(*_: Any) -> None:
        idle = [p for group in optimizer.param_groups if group.get(IDLE) for p in group["params"]]
        hidden[:] = [(parameter, parameter.grad) for parameter in idle]
        for parameter in idle:
            parameter.grad = None

    def show(*_: Any) -> None:
        for parameter, gradient in hidden:
            parameter.grad = gradient
        hidden.clear()

    optimizer.register_step_pre_hook(hide)
    optimizer.register_step_post_hook(show)


class StepInBackward:
    """Optimizer step inside the backward: each parameter by itself, as soon as it has its gradient.

    The gradient is freed at once, so gradients are never all in memory together (Lv et al. 2023,
    https://arxiv.org/abs/2306.09782). The backward no longer needs the weight then: its gradient comes last. Hooks on
    parameters, one optimizer each; FSDP2 calls them after its reduce-scatter (torch's _fsdp_collectives.py,
    foreach_reduce).
    """

    def __init__(
        self,
        trained: Iterable[tuple[str, Tensor, Tensor]],  # name, parameter, this rank's shard of it
        build: Callable[[list[tuple[str, Tensor]]], list[Optimizer]],
        device: torch.device,
    ):
        self.optimizers: list[Optimizer] = []
        self._device, self._squares = device, list[Tensor]()
        for name, parameter, shard in trained:
            (optimizer,) = build([(name, shard)])
            self.optimizers.append(optimizer)

            def step(parameter: Tensor, shard: Tensor = shard, optimizer: Optimizer = optimizer) -> None:
                gradient = parameter.grad
                shard.grad = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                assert shard.grad is not None  # it has just been accumulated
                self._squares.append(squared_norm([shard.grad], self._device))
                optimizer.step()
                shard.grad = parameter.grad = None

            parameter.register_post_accumulate_grad_hook(step)

    def take_squared_norm(self) -> Tensor:  # () fp64
        """Returns that of this rank's gradient shards since the last call."""
        squares, self._squares = self._squares, []
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self._device)
