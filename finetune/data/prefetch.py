"""Batches of a run, prepared by a thread and on the device before they are needed.

On CUDA the thread copies from pinned memory on a stream of its own, next to the kernels of the step before. The stream
that computes waits for the copy, never the process; and memory that was given out on the thread's stream is not given
out again before the computation on it is done (`Tensor.record_stream`).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator
from itertools import islice
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from finetune.data.batch import Batch
from finetune.data.loader import Loader, StepBatches

T = TypeVar("T")

_PATIENCE_S = 10.0  # to wait for the current item when the iterator is closed; the thread ends with the process


class Prefetched(Generic[T], Iterator[T]):
    """The same items in the same order, up to `most` of them ready before they are needed.

    allowed: number of items that may be made, until `allow` raises their number.

    Only the thread touches the iterator, from its first item to its end. Errors of the iterator are raised here, with
    their traceback, after the items that came before. Close it, or use it as a context, if it may be left early.

        with Prefetched(make() for make in work) as items:
            for item in items: ...
    """

    def __init__(self, items: Iterator[T], most: int = 2, allowed: float = math.inf):
        self._items, self._most, self._allowed = items, most, allowed
        self._ready: deque[T] = deque()
        self._failure: BaseException | None = None
        self._ended = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._make, name="prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._failure is not None:
                raise self._failure
            raise StopIteration

    def allow(self, more: int) -> None:
        with self._changed:
            self._allowed += more
            self._changed.notify_all()

    def close(self) -> None:
        """Stops producing items, and waits a while for the current one."""
        with self._changed:
            self._closed = self._ended = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(_PATIENCE_S)

    def __enter__(self) -> Prefetched[T]:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _make(self) -> None:
        failure = None
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._closed or (len(self._ready) < self._most and self._allowed > 0)
                    )
                    self._allowed -= 1
                    if self._closed:
                        break
                item = next(self._items, _END)
                if item is _END:
                    break
                with self._changed:
                    self._ready.append(item)  # pyright: ignore[reportArgumentType]  (not the end)
                    self._changed.notify_all()
                del item  # or the last one lives as long as this thread waits
        except BaseException as error:  # noqa: BLE001 - raised again in `__next__`, in the thread that consumes
            failure = error
        with self._changed:
            if not self._closed:
                self._failure, self._ended = failure, True
            self._changed.notify_all()


_END = object()


# --- batches, on the device before they are needed


BATCHES_AHEAD = 4  # of an evaluation

Item = TypeVar("Item", Batch, StepBatches)


def fed_steps(loader: Loader, steps: range, device: torch.device) -> Feed[StepBatches]:
    """Returns the batches of each of `steps`. The rows of a step are prepared when the one `ahead` of it is next; its
    batches are made after that, and with `ahead` its counts are known when the step before it runs."""
    rows = loader.rows
    return Feed((loader.step(step) for step in steps), device, max(1, rows.ahead), map(rows.prepare, steps), rows.ahead)


def fed_batches(batches: Iterator[Batch], device: torch.device) -> Feed[Batch]:
    return Feed(batches, device, BATCHES_AHEAD)


class Feed(Generic[Item], Iterator[Item]):
    """`items` in their order, every tensor on `device`. Close it, or use it as a context."""

    def __init__(
        self,
        items: Iterator[Item],
        device: torch.device,
        most: int,
        prepared: Iterator[None] | None = None,
        ahead: int = 0,
    ):
        """prepared: prepares an item with each of its own, on the thread that reads the feed, before the item is made;
        ahead: items that are prepared before the one that is read."""
        self._device, self._prepared, self._to_prepare = device, prepared, 1 + ahead
        self._ahead = Prefetched(self._on_device(items), most, math.inf if prepared is None else 0)
        self._next: Item | None = None  # after `peek`

    def peek(self) -> Item:
        """Returns the item that `next` will return."""
        self._next = next(self)
        return self._next

    def __next__(self) -> Item:
        if self._next is not None:
            item, self._next = self._next, None
            return item
        if self._prepared is not None:
            for _ in islice(self._prepared, self._to_prepare):
                pass
            self._ahead.allow(self._to_prepare)
            self._to_prepare = 1
        item, copied = next(self._ahead)
        if copied is not None:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(copied)
            for tensor in item.tensors():
                tensor.record_stream(computing)
        return item

    def __enter__(self) -> Feed[Item]:
        return self

    def __exit__(self, *_: object) -> None:
        self._ahead.close()

    def _on_device(self, items: Iterator[Item]) -> Iterator[tuple[Item, Any]]:
        """Runs in the thread. Yields (item, event after its copies, if there are any to wait for)."""
        if self._device.type != "cuda":
            yield from ((item.map_tensors(lambda tensor: tensor.to(self._device)), None) for item in items)
            return
        with torch.cuda.device(self._device):  # a thread begins on device 0
            copying = torch.cuda.Stream()
            for item in items:
                with torch.cuda.stream(copying):
                    moved = item.map_tensors(lambda tensor: tensor.pin_memory().to(self._device, non_blocking=True))
                yield moved, copying.record_event()
