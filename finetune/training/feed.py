"""Prefetches batches in a thread and moves them to the device before they are needed.

On CUDA the thread copies from pinned memory on a stream of its own, while the previous step computes. The compute
stream waits for the copy, never the process; and memory allocated on the thread's stream is not reused before the
kernels that read it are done (`Tensor.record_stream`).
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
    """Returns the batches of each of `steps`, prefetched."""
    return Feed((loader.step(step) for step in steps), device, STEPS_AHEAD)


def fed_batches(batches: Iterator[Batch], device: torch.device) -> Feed[Batch]:
    return Feed(batches, device, BATCHES_AHEAD)


class Feed(Generic[T], Iterator[T]):
    """Iterates over `items` in order, every tensor on `device`. Use it as a context manager."""

    def __init__(self, items: Iterator[T], device: torch.device, depth: int):
        self._device = device
        self._prefetched = Prefetched(self._on_device(items), depth)
        self._next: T | None = None  # after `peek`

    def peek(self) -> T:
        """Returns the item that `next` will return."""
        self._next = next(self)
        return self._next

    def __next__(self) -> T:
        if self._next is not None:
            item, self._next = self._next, None
            return item
        item, copied = next(self._prefetched)
        if copied is not None:
            compute_stream = torch.cuda.current_stream(self._device)
            compute_stream.wait_event(copied)
            for batch in item.batches if isinstance(item, StepBatches) else [item]:
                for tensor in batch.tensors():
                    tensor.record_stream(compute_stream)
        return item

    def __enter__(self) -> Feed[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self._prefetched.close()

    def _on_device(self, items: Iterator[T]) -> Iterator[tuple[T, Any]]:
        """Runs in the thread. Yields each item with the event that its copies are done; None without CUDA."""
        if self._device.type != "cuda":
            yield from ((moved(item, lambda tensor: tensor.to(self._device)), None) for item in items)
            return
        with torch.cuda.device(self._device):  # a thread begins on device 0
            copy_stream = torch.cuda.Stream()
            for item in items:
                with torch.cuda.stream(copy_stream):
                    on_device = moved(item, lambda tensor: tensor.pin_memory().to(self._device, non_blocking=True))
                yield on_device, copy_stream.record_event()


def moved(item: T, to: Callable[[Tensor], Tensor]) -> T:
    """Returns the item with `to` applied to every tensor."""
    if isinstance(item, StepBatches):
        return replace(item, batches=[moved(batch, to) for batch in item.batches])
    return item.map_tensors(to)
