"""Time of a run: steps, their phases, waits for other ranks, stalls between steps.

Measured without waiting for the device. On CUDA a mark is an event in the current stream, so an interval is the time
that the device spent between two marks, waits included; on the CPU it is the host's clock. Marks are read once per
step, after it.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

COMMUNICATION = "communication"
PHASES = ("data", "forward", "backward", COMMUNICATION, "optimizer")
STALLS: tuple[str, ...] = ("checkpoint", "evaluation", "profile")
_RANGE = "finetune/"  # prefix of phases in a profiler's trace


@dataclass(frozen=True)
class Lap:
    """Seconds from the end of one step to the end of the next."""

    step: float  # without stalls
    phases: dict[str, float]  # parts of it; the rest is other host work
    stalls: dict[str, float]  # in addition to it, since the last lap


class Stopwatch:
    """Laps from step to step, without a gap: time between two steps belongs to the second one.

    Phases do not nest; waits for other ranks are subtracted from the phase in which they occur. Waits may nest or
    overlap: they count from the start of the first to the end of the last.
    """

    def __init__(self, device: torch.device, knows_waits: bool):
        """knows_waits: whether the backend reports all its waits; else no wait is counted."""
        self.knows_waits = knows_waits
        self._device = device if device.type == "cuda" else None
        self._intervals: list[tuple[str, str | None, Any, Any]] = []  # name, phase that contains it, begin, end
        self._phase: str | None = None
        self._waits, self._wait_began, self._stalled = 0, None, False
        self._stalls = dict.fromkeys(STALLS, 0.0)
        self._lap_began = time.perf_counter()

    def restart(self) -> None:
        """Begin the first lap."""
        self._read_intervals()
        self._stalls = dict.fromkeys(STALLS, 0.0)
        self._lap_began = time.perf_counter()

    def lap(self) -> Lap:
        """Returns the times since the last lap; waits for the device to end the step."""
        phases = self._read_intervals()
        now = time.perf_counter()
        lap = Lap(now - self._lap_began - sum(self._stalls.values()), phases, self._stalls)
        self._stalls = dict.fromkeys(STALLS, 0.0)
        self._lap_began = now
        return lap

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phase, began = name, self._mark()
        try:
            with torch.profiler.record_function(f"{_RANGE}{name}"):
                yield
        finally:
            self._intervals.append((name, None, began, self._mark()))
            self._phase = None

    @contextlib.contextmanager
    def stall(self, name: str) -> Iterator[None]:
        """Context manager for a delay after the device has ended a step. Waits in it are not counted."""
        began, self._stalled = time.perf_counter(), True
        try:
            yield
        finally:
            self._stalled = False
            self._stalls[name] += time.perf_counter() - began

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager for waits until other ranks let this one compute."""
        self.begin_wait()
        try:
            yield
        finally:
            self.end_wait()

    def begin_wait(self, *_: object) -> None:
        if self._stalled or not self.knows_waits:
            return
        if self._waits == 0:
            self._wait_began = self._mark()
        self._waits += 1

    def end_wait(self, *_: object) -> None:
        """Ends a wait, if one is open: hooks of a recomputed forward may end one twice."""
        if self._waits == 0:
            return
        self._waits -= 1
        if self._waits == 0:
            self._intervals.append((COMMUNICATION, self._phase, self._wait_began, self._mark()))

    def _read_intervals(self) -> dict[str, float]:
        """Returns seconds by phase since the last call; on CUDA once the device has reached the last mark."""
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()
        seconds = defaultdict[str, float](float)
        for name, containing, began, ended in self._intervals:
            length = ended - began if self._device is None else began.elapsed_time(ended) / 1000
            seconds[name] += length
            if containing is not None:
                seconds[containing] -= length
        self._intervals, self._waits = [], 0
        return dict(seconds)

    def _mark(self) -> Any:
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
