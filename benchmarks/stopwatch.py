"""One stopwatch for every contender: when its optimizer steps ended, and how much memory it used.

It hangs on torch's own global hooks, so that no contender is asked to measure itself: a period between the ends of two
optimizer steps holds all that a step costs, the batch, the logging and the bookkeeping included. On a GPU the ends are
events on the stream, read after the last step: nothing waits for the device because it is measured.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

LAUNCHED = "BENCHMARK_LAUNCHED"  # environment: time.time() when the process was started


class Stopwatch:
    """Starts when made; made before the contender builds anything."""

    def __init__(self, steps: int):
        self._steps, self._cuda = steps, torch.cuda.is_available()
        self._launched = float(os.environ.get(LAUNCHED) or psutil.Process().create_time())
        self._ends: list[float] = []
        self._cpu: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._children = 0
        self.first_step_s = 0.0  # from the launch of the process to the end of the first optimizer step
        self.imported = resident()
        self.loaded = self.peak = self.device_loaded = self.device_peak = 0  # bytes
        self._weights = self._gradients = self._state = 0  # bytes
        self._before = register_module_forward_pre_hook(self._first_forward)
        self._after = register_optimizer_step_post_hook(self._stepped)

    def _first_forward(self, module: torch.nn.Module, _inputs: Any) -> None:
        """The model and the data are there, no activation yet. Ours looks at a head without weights before."""
        weights = [*module.parameters(), *module.buffers()]
        if not weights or any(one.is_meta for one in weights):
            return
        self._before.remove()
        self._weights = bytes_of(weights)
        if not self._cuda:
            for one in weights:  # mapped from their file, they are resident once they were read
                one.detach().sum()
        self.loaded = resident()
        if self._cuda:
            self.device_loaded = torch.cuda.memory_allocated()

    def _stepped(self, optimizer: torch.optim.Optimizer, _arguments: Any, _named: Any) -> None:
        first = not self._ends
        if self._cuda:
            if first:
                torch.cuda.synchronize()
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        self._ends.append(time.perf_counter())
        self._cpu.append(time.process_time())
        if first:
            self.first_step_s = time.time() - self._launched
        if first or len(self._ends) == self._steps:
            self._read_memory()
            self._weigh(optimizer)

    def _read_memory(self) -> None:
        """Workers count as well: those that live at the first and the last step."""
        children = sum(peak_resident(child.pid) for child in psutil.Process().children(recursive=True))
        self._children = max(self._children, children)
        self.peak = peak_resident(os.getpid()) + self._children
        if self._cuda:
            self.device_peak = torch.cuda.max_memory_allocated()

    def _weigh(self, optimizer: torch.optim.Optimizer) -> None:
        """What the step needs and none can leave out; torch's own state dict names the state alike for all."""
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        state = [value for kept in optimizer.state.values() for value in kept.values()]
        self._gradients = bytes_of([p.grad for p in stepped if p.grad is not None])
        self._state = bytes_of([value for value in state if isinstance(value, torch.Tensor)])

    def result(self) -> dict[str, Any]:
        """step_s: periods between the ends of steps, one fewer than steps; step_cpu_s: the same in seconds of all its
        threads, which other work on the machine moves less. Memory in bytes."""
        self._before.remove()
        self._after.remove()
        if len(self._ends) != self._steps:
            raise RuntimeError(f"{len(self._ends)} optimizer steps instead of {self._steps}")
        periods, cpu = differences(self._ends), differences(self._cpu)
        if self._cuda:
            torch.cuda.synchronize()
            pairs = zip(self._events, self._events[1:], strict=False)
            periods = [a.elapsed_time(b) / 1e3 for a, b in pairs]
        return {
            "step_s": periods,
            "step_cpu_s": cpu,
            "first_step_s": self.first_step_s,
            "imported_rss": self.imported,
            "loaded_rss": self.loaded,
            "peak_rss": self.peak,
            "weights_bytes": self._weights,
            "gradient_bytes": self._gradients,
            "state_bytes": self._state,
            "loaded_device": self.device_loaded,
            "peak_device": self.device_peak,
        }


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Of the memory behind them; what two share counts once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def differences(values: list[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(values)]


def resident(pid: int | None = None) -> int:
    return psutil.Process(pid).memory_info().rss


def peak_resident(pid: int) -> int:
    """Highest resident size of a process so far, in bytes. Not getrusage's: it has its parent's at the fork, too."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():  # not Linux, or the process has just ended
        return resident(pid) if psutil.pid_exists(pid) else 0
    peaks = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
    return int(peaks[0].split()[1]) * 1024 if peaks else 0
