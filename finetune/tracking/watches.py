"""Warnings of a run while it trains: nothing is learnt, or a step takes far longer than those before."""

from __future__ import annotations

import os
import statistics
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
