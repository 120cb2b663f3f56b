"""What of a run's state lies in this rank's device memory, in bytes: measured from the tensors, shards and all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from finetune.engine.base import Engine


class Scale:
    """Weighs tensors by the memory behind them, on one kind of device; what was weighed once is not weighed again."""

    def __init__(self, device: torch.device):
        self._device = device.type
        self._seen: set[int] = set()

    def weigh(self, tensors: Iterable[Tensor]) -> int:
        total = 0
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.device.type != self._device:
                continue
            storage = local.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                total += storage.nbytes()
        return total


def held_gradients(engine: Engine) -> int:
    """Between the last backward of a step and the step."""
    return Scale(engine.device).weigh(engine.gradients())


def held_state(engine: Engine) -> tuple[int, int]:
    """(weights and buffers, optimizer) after a step. Master weights that the optimizer alone knows are its own."""
    scale = Scale(engine.device)
    weights = scale.weigh(_weights(engine.unwrapped))
    return weights, scale.weigh(_optimizer_tensors(engine))


def _weights(model: Any) -> Iterator[Tensor]:
    for parameter in model.parameters():
        yield getattr(parameter, "ds_tensor", parameter)  # ZeRO-3's share
        yield from _tensors_of(getattr(parameter, "quant_state", None))
    yield from model.buffers()


def _tensors_of(quant_state: Any) -> Iterator[Tensor]:
    """Scales of 4-bit blocks; where these are quantised themselves, the scales' scales."""
    for value in vars(quant_state).values() if quant_state is not None else ():
        if isinstance(value, Tensor):
            yield value
        elif hasattr(value, "absmax"):
            yield from _tensors_of(value)


def _optimizer_tensors(engine: Engine) -> Iterator[Tensor]:
    for optimizer in engine.optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
        for stepped, state in optimizer.state.items():
            yield from (value for value in (stepped, *state.values()) if isinstance(value, Tensor))
