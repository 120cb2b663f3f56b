"""Where the time of a step goes: named stretches of it, added up."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator


class StepClock:
    """Seconds by phase since the last `restart`. Phases do not nest."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._began = time.perf_counter()
        self._seconds = defaultdict[str, float](float)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - began

    def seconds(self) -> dict[str, float]:
        """By phase, and `step`: all since the restart."""
        return {**self._seconds, "step": time.perf_counter() - self._began}
