"""Warnings of a run while it trains: nothing is learnt, a step takes far longer than those before, or other programs
have the cores from the start."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

_WARNS_AFTER = 10  # steps in a row, and twice as many each time


class VarianceWatch:
    """Counts the steps in a row from whose rewards a policy learns nothing."""

    def __init__(self) -> None:
        self._steps, self._warns_at = 0, _WARNS_AFTER

    def step_done(self, line: Mapping[str, Any]) -> str | None:
        """Returns a warning after ten such steps, twenty, forty, ... line: of metrics.jsonl."""
        if line.get("zero_variance") != 1.0:
            self._steps, self._warns_at = 0, _WARNS_AFTER
            return None
        self._steps += 1
        if self._steps < self._warns_at:
            return None
        self._warns_at *= 2
        return (
            f"nothing is learnt: in the last {self._steps} steps all samples of each prompt had the same reward (mean "
            f"{line['reward']:.4g}). Fix: raise rollouts.temperature or rollouts.samples, take prompts that the model "
            "answers sometimes (easier ones if the reward is low, else harder ones), or a reward with more values"
        )


_SLOW, _COMPARED, _FEWEST = 10.0, 50, 5  # times the usual; steps before that are compared with, and at least


class PaceWatch:
    """Compares the time of a step, for its tokens, with that of the steps before it in this launch."""

    def __init__(self) -> None:
        self._seconds = deque[float](maxlen=_COMPARED)  # of a token
        self._slow, self._warns_at = 0, 1

    def step_done(self, line: Mapping[str, Any]) -> str | None:
        """Returns a warning at the first slow step, the second, fourth, ... line: of metrics.jsonl."""
        if not line["tokens_per_s"]:
            return None
        seconds, before = 1.0 / line["tokens_per_s"], list(self._seconds)
        self._seconds.append(seconds)
        if len(before) < _FEWEST or seconds < _SLOW * (usual := statistics.median(before)):
            return None
        self._slow += 1
        if self._slow < self._warns_at:
            return None
        self._warns_at *= 2
        slow = f"step {line['step']} took {line['step_s']:.1f} s, {seconds / usual:.0f} times its usual time. "
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if load <= cores:
            return f"{slow}The machine is not busy (load {load:.1f}). Fix: look at its disk, network and device"
        return f"{slow}The machine is busy: {load:.1f} programs want its {cores} cores. Fix: pause other programs"


_LOOKS_AFTER_S, _ENOUGH = 30.0, 0.5  # of a core: what is left beside as many programs as there are cores


class CoresWatch:
    """Looks once, half a minute after the first step, whether this process has a core: on a machine that is busy from
    the start no step is slower than those before it."""

    def __init__(self) -> None:
        self._begun: tuple[float, float] | None = None  # by the clock, and of processors
        self._has_looked = False

    def step_done(self, line: Mapping[str, Any]) -> str | None:
        """Returns a warning, once."""
        clock, processors = time.monotonic(), time.process_time()
        if self._begun is None:
            self._begun = clock, processors
        passed = clock - self._begun[0]
        if self._has_looked or passed < _LOOKS_AFTER_S:
            return None
        self._has_looked = True
        share, (load, cores) = (processors - self._begun[1]) / passed, (os.getloadavg()[0], os.cpu_count() or 1)
        if share >= _ENOUGH or load <= cores:
            return None
        return (
            f"this process has {share:.2f} of a core: {load:.1f} programs want the {cores} cores here. Steps take as "
            "much longer, and the time left is that of a busy machine. Fix: pause other programs, or start fewer "
            "processes"
        )
