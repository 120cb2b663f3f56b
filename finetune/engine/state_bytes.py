"""Bytes of a run's state in this rank's device memory, measured from the tensors and their shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from finetune.engine.base import Engine


class StorageCounter:
    """Adds up the storages of tensors on one kind of device, each storage once."""

    def __init__(self, device: torch.device):
        self._device = device.type
        self._counted: set[int] = set()

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Returns the bytes of storages that were not counted before."""
        total = 0
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.device.type != self._device:
                continue
            storage = local.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self._counted:
                self._counted.add(storage.data_ptr())
                total += storage.nbytes()
        return total


def measure_gradient_bytes(engine: Engine) -> int:
    """Between the last backward of a step and the step."""
    return StorageCounter(engine.device).add(engine.gradients())


def measure_state_bytes(engine: Engine) -> tuple[int, int]:
    """Returns (weights and buffers, optimizer state) after a step. Master weights count as the optimizer's."""
    counter = StorageCounter(engine.device)
    weights = counter.add(_weights(engine.unwrapped))
    return weights, counter.add(_optimizer_tensors(engine))


def _weights(model: Any) -> Iterator[Tensor]:
    for parameter in model.parameters():
        yield getattr(parameter, "ds_tensor", parameter)  # ZeRO-3's shard
        yield from _quantization_tensors(getattr(parameter, "quant_state", None))
    yield from model.buffers()


def _quantization_tensors(quant_state: Any) -> Iterator[Tensor]:
    """Yields the scales of 4-bit blocks, and with double quantisation the scales of these."""
    for value in vars(quant_state).values() if quant_state is not None else ():
        if isinstance(value, Tensor):
            yield value
        elif hasattr(value, "absmax"):
            yield from _quantization_tensors(value)


def _optimizer_tensors(engine: Engine) -> Iterator[Tensor]:
    for optimizer in engine.optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
        for stepped, state in optimizer.state.items():
            yield from (value for value in (stepped, *state.values()) if isinstance(value, Tensor))
