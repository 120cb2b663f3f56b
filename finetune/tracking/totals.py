"""A run's meters added up over its steps, for the table at its end."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict

Line = dict[str, float]  # by key of metrics.jsonl
RATES = ("tokens_per_s", "supervised_tokens_per_s", "tflops_per_device", "mfu", "hfu")


class Totals:
    """Add each train line once. The first step of a launch warms things up: it counts only while it is the only one."""

    def __init__(self) -> None:
        self._lines = 0
        self._sums = defaultdict[str, float](float)
        self._stragglers = Counter[int]()
        self._spreads: list[float] = []
        self.last: Line = {}

    def add(self, line: Line) -> None:
        if self._lines == 1:
            self._sums.clear()
            self._stragglers.clear()
            self._spreads.clear()
        self._lines += 1
        self.last = line
        self._sums["step_s"] += line["step_s"]
        for key, value in line.items():
            if key.startswith("time/"):
                self._sums[key] += value
            elif key in RATES:
                self._sums[key] += value * line["step_s"]
        if "straggler" in line:
            self._stragglers[int(line["straggler"])] += 1
            self._spreads.append(line["rank_spread"])

    @property
    def steps(self) -> int:
        """That are added up."""
        return max(self._lines - 1, min(self._lines, 1))

    def mean(self, key: str) -> float | None:
        """Of a rate, over the time of the steps."""
        return self._sums[key] / self._sums["step_s"] if key in self._sums else None

    def shares(self) -> dict[str, float]:
        """Of all time, stalls too, by what it went into."""
        times = {key.removeprefix("time/"): value for key, value in self._sums.items() if key.startswith("time/")}
        total = sum(times.values())
        return {name: seconds / total for name, seconds in times.items()} if total else {}

    def straggler(self) -> tuple[int, float, float] | None:
        """(rank, share of the steps in which it was the slowest, median spread); None where ranks are not compared."""
        if not self._stragglers:
            return None
        rank, times = self._stragglers.most_common(1)[0]
        return rank, times / len(self._spreads), statistics.median(self._spreads)
