"""What loop and evaluation are fed: batches made ahead by a thread, and on the device before they are needed.

On CUDA the thread copies from pinned memory on a stream of its own, beside the kernels of the step before. The stream
that computes waits for the copy, never the process; and memory that was given out on the thread's stream is not given
out again before what computes on it is done (`Tensor.record_stream`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from finetune.data.batch import Batch
from finetune.data.loader import Loader, StepBatches
from finetune.data.prefetch import Prefetched

STEPS_AHEAD = 2
BATCHES_AHEAD = 4  # of an evaluation

T = TypeVar("T", Batch, StepBatches)


def fed_steps(loader: Loader, steps: range, device: torch.device) -> Feed[StepBatches]:
    """The batches of each of `steps`; their numbers are known when the step before them runs."""
    return Feed((loader.step(step) for step in steps), device, STEPS_AHEAD)


def fed_batches(batches: Iterator[Batch], device: torch.device) -> Feed[Batch]:
    return Feed(batches, device, BATCHES_AHEAD)


class Feed(Generic[T], Iterator[T]):
    """`items` in their order, every tensor on `device`. Close it, or use it as a context."""

    def __init__(self, items: Iterator[T], device: torch.device, most: int):
        self._device = device
        self._ahead = Prefetched(self._there(items), most)
        self._next: T | None = None  # where it was looked at

    def peek(self) -> T:
        """The item that `next` will give."""
        self._next = next(self)
        return self._next

    def __next__(self) -> T:
        if self._next is not None:
            item, self._next = self._next, None
            return item
        item, copied = next(self._ahead)
        if copied is not None:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(copied)
            _for_each_tensor(item, lambda tensor: tensor.record_stream(computing))
        return item

    def __enter__(self) -> Feed[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self._ahead.close()

    def _there(self, items: Iterator[T]) -> Iterator[tuple[T, Any]]:
        """In the thread. With the event behind an item's copies, where there are any to wait for."""
        if self._device.type != "cuda":
            yield from ((moved(item, lambda tensor: tensor.to(self._device)), None) for item in items)
            return
        with torch.cuda.device(self._device):  # a thread begins on device 0
            copying = torch.cuda.Stream()
            for item in items:
                with torch.cuda.stream(copying):
                    there = moved(item, lambda tensor: tensor.pin_memory().to(self._device, non_blocking=True))
                yield there, copying.record_event()


def moved(item: T, to: Callable[[Tensor], Tensor]) -> T:
    """The same with every tensor as `to` gives it."""
    if isinstance(item, StepBatches):
        return replace(item, batches=[moved(batch, to) for batch in item.batches])
    return item.map_tensors(to)


def _for_each_tensor(item: Batch | StepBatches, do: Callable[[Tensor], None]) -> None:
    for batch in item.batches if isinstance(item, StepBatches) else [item]:
        for tensor in batch.tensors():
            do(tensor)
