"""Where a device's time goes, measured without waiting for it.

On CUDA a mark is an event in the current stream, so a stretch is what the device spent between two marks, with whatever
it stood still there; on the CPU it is the host's clock. Marks are read once a step, after the step's own end.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

COMMUNICATION = "communication"
RANGE = "finetune/"  # how phases are called in a profiler's trace


class Stopwatch:
    """Seconds by phase. Phases do not nest; waits for other ranks are taken out of the phase in which they fall.

    Waits may nest or overlap: what counts is from the first one's begin until none is left.
    """

    def __init__(self, device: torch.device, knows_waits: bool):
        """knows_waits: whether the backend says of all its waits when they begin and end; else none is counted."""
        self.knows_waits = knows_waits
        self._device = device if device.type == "cuda" else None
        self._spare: list[Any] = []  # events to be used again
        self._stretches: list[tuple[str, str | None, Any, Any]] = []  # what, within which phase, from, to
        self._phase: str | None = None
        self._waits, self._wait_began, self._stopped = 0, None, False

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phase, began = name, self._mark()
        try:
            with torch.profiler.record_function(f"{RANGE}{name}"):
                yield
        finally:
            self._stretches.append((name, None, began, self._mark()))
            self._phase = None

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Around what is no part of a step; the device is done with the step before it."""
        self._stopped = True
        try:
            yield
        finally:
            self._stopped = False

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what other ranks must answer before this one's compute can go on."""
        self.begin_wait()
        try:
            yield
        finally:
            self.end_wait()

    def begin_wait(self, *_: object) -> None:
        if self._stopped or not self.knows_waits:
            return
        if self._waits == 0:
            self._wait_began = self._mark()
        self._waits += 1

    def end_wait(self, *_: object) -> None:
        """Of nothing where no wait is open: hooks of a recomputed forward may end one twice."""
        if self._waits == 0:
            return
        self._waits -= 1
        if self._waits == 0:
            self._stretches.append((COMMUNICATION, self._phase, self._wait_began, self._mark()))

    def read(self) -> dict[str, float]:
        """Seconds since the last call, by phase; on CUDA once the device has come to the last mark."""
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()
        seconds = defaultdict[str, float](float)
        for name, within, began, ended in self._stretches:
            length = self._between(began, ended)
            seconds[name] += length
            if within is not None:
                seconds[within] -= length
        if self._device is not None:
            self._spare += [mark for stretch in self._stretches for mark in stretch[2:]]
        self._stretches, self._waits = [], 0
        return dict(seconds)

    def _mark(self) -> Any:
        if self._device is None:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, began: Any, ended: Any) -> float:
        return ended - began if self._device is None else began.elapsed_time(ended) / 1000
