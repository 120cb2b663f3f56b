"""How much memory this process may hold, and the most that it held while something ran.

`MARGIN` of it stays free: the steps of a run cut their rows into other documents than a trial did, so that memory
falls into other pieces; communicators and libraries take their own at first use; evaluation and generation come on top
of what is held. 8 % is 6 GiB of an 80 GiB device; PyTorch's fragmentation alone is commonly a few per cent.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import psutil
import torch

from finetune.engine.base import Engine
from finetune.errors import UserError
from finetune.utils import peak_resident_bytes

MARGIN = 0.08

_CGROUPS = (  # (limit, used, name of what the kernel takes back first in memory.stat), of version 2 and 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


class Memory(Protocol):
    name: str  # of the hardware, with its size: results for one do not hold for another
    limit: int  # bytes that this process may hold

    def release(self) -> None:
        """Give back what is kept for later use."""
        ...

    def peak(self, work: Callable[[], None]) -> int:
        """Bytes at the most while `work` ran."""
        ...


def memory_of(engine: Engine) -> Memory:
    """Raises UserError for a device whose memory cannot be measured."""
    if engine.device.type == "cuda":
        return CudaMemory(engine.device)
    if engine.device.type == "cpu":
        return HostMemory(engine.local_processes)
    raise UserError(f"batch.rows_per_device: auto: nobody has measured memory on {engine.device.type}: give a number")


class CudaMemory:
    """What PyTorch's allocator takes from the device, fragmentation included."""

    def __init__(self, device: torch.device):
        self.device = device
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)  # CUDA's context, communicators, other processes
        self.limit = int((total - others) * (1 - MARGIN))
        self.name = f"{torch.cuda.get_device_name(device)}, {total / 2**30:.1f} GiB"

    def release(self) -> None:
        torch.cuda.empty_cache()

    def peak(self, work: Callable[[], None]) -> int:
        self.release()
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_reserved(self.device)


class HostMemory:
    """The resident set of a CPU process, beside as many others on the machine or in its container."""

    def __init__(self, processes: int = 1, limit: int | None = None):
        machine, left = psutil.virtual_memory().total, psutil.virtual_memory().available
        group_total, group_left = _cgroup()
        machine, left = min(machine, group_total), min(left, group_left)
        self.limit = limit or int((psutil.Process().memory_info().rss + left / processes) * (1 - MARGIN))
        self.name = f"CPU, {machine / 2**30:.1f} GiB for {processes} processes"

    def release(self) -> None:
        """glibc keeps what was freed; given back, it is not taken for held."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def peak(self, work: Callable[[], None]) -> int:
        """By the kernel's own high-water mark, which Linux lets a process set back (proc_pid_clear_refs(5))."""
        self.release()
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            raise UserError(
                "batch.rows_per_device: auto: this system does not tell how much memory a CPU process held at most "
                "(/proc/self/clear_refs): give a number"
            ) from None
        work()
        return peak_resident_bytes()


def _cgroup() -> tuple[float, float]:
    """(bytes that this container may hold, bytes that it has left); infinite where there is no bound."""
    root = Path("/sys/fs/cgroup")
    for limit, used, reclaimable in _CGROUPS:
        try:
            total = float((root / limit).read_text(encoding="ascii"))
            taken = float((root / used).read_text(encoding="ascii"))
            stat = (root / limit).with_name("memory.stat").read_text(encoding="ascii")
        except (OSError, ValueError):  # another version of cgroups, or `max`
            continue
        cached = dict(line.split() for line in stat.splitlines()).get(reclaimable, "0")
        return total, total - taken + float(cached)
    return float("inf"), float("inf")
