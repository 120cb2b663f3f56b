"""Where the time of a run goes: steps, their phases, and what makes steps stand still."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from finetune.engine.stopwatch import Stopwatch

PHASES = ("data", "forward", "backward", "communication", "optimizer")
STALLS = ("checkpoint", "evaluation", "profile")


@dataclass(frozen=True)
class Lap:
    """Seconds from the end of one step to the end of the next."""

    step: float  # without stalls
    phases: dict[str, float]  # of it; what they leave is other work of the host
    stalls: dict[str, float]  # besides it, since the last lap


class StepClock:
    """Laps from step to step, without a gap: what happens between two steps belongs to the second one."""

    def __init__(self, stopwatch: Stopwatch):
        self._stopwatch = stopwatch
        self._stalls = defaultdict[str, float](float)
        self.restart()

    def restart(self) -> None:
        self._stopwatch.read()
        self._stalls.clear()
        self._began = time.perf_counter()

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self._stopwatch.phase(name)

    @contextlib.contextmanager
    def stall(self, name: str) -> Iterator[None]:
        """Around what keeps the next step from beginning."""
        began = time.perf_counter()
        with self._stopwatch.stopped():
            try:
                yield
            finally:
                self._stalls[name] += time.perf_counter() - began

    def lap(self) -> Lap:
        """Waits for the device to end the step."""
        phases = self._stopwatch.read()
        now = time.perf_counter()
        stalls = {name: self._stalls.get(name, 0.0) for name in STALLS}
        lap = Lap(now - self._began - sum(stalls.values()), phases, stalls)
        self._stalls.clear()
        self._began = now
        return lap
