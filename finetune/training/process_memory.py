"""The memory limit of this process, and its peak while something runs.

`MARGIN` of it stays free: the documents of a run's steps have other lengths than those of a trial, so that memory is
fragmented differently; communicators and libraries allocate at first use; evaluation and generation add to what is
allocated. 8 % is 6 GiB of an 80 GiB device; PyTorch's fragmentation alone is commonly a few per cent.
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

_CGROUPS = (  # (limit, used, key of reclaimable memory in memory.stat), of version 2 and 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


class Memory(Protocol):
    name: str  # of the hardware, with its size: a result is valid for this hardware only
    limit: int  # bytes that this process may use

    def release(self) -> None:
        """Returns cached memory to the system."""
        ...

    def peak(self, work: Callable[[], None]) -> int:
        """Runs `work` and returns the peak bytes of this process meanwhile."""
        ...


def memory_of(engine: Engine) -> Memory:
    """Returns the meter for the engine's device. Raises UserError if its memory cannot be measured."""
    if engine.device.type == "cuda":
        return CudaMemory(engine.device)
    if engine.device.type == "cpu":
        return HostMemory(engine.local_processes)
    raise UserError(f"batch.rows_per_device: auto: cannot measure memory on {engine.device.type}: set a number")


class CudaMemory:
    """Memory that PyTorch's allocator reserves on the device, including fragmentation."""

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
    """Resident memory of a CPU process. processes: that share this machine or container."""

    def __init__(self, processes: int = 1, limit: int | None = None):
        total, available = psutil.virtual_memory().total, psutil.virtual_memory().available
        container_total, container_available = _container_memory()
        total, available = min(total, container_total), min(available, container_available)
        self.limit = limit or int((psutil.Process().memory_info().rss + available / processes) * (1 - MARGIN))
        self.name = f"CPU, {total / 2**30:.1f} GiB for {processes} processes"

    def release(self) -> None:
        """glibc keeps freed memory in the resident set until it is trimmed."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def peak(self, work: Callable[[], None]) -> int:
        """Reads the kernel's high-water mark, which a process on Linux can reset (proc_pid_clear_refs(5))."""
        self.release()
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            raise UserError(
                "batch.rows_per_device: auto: this system cannot reset the peak memory of a process "
                "(/proc/self/clear_refs): set a number"
            ) from None
        work()
        return peak_resident_bytes()


def _container_memory() -> tuple[float, float]:
    """Returns (limit, available) bytes of this process's cgroup; infinite without a limit."""
    root = Path("/sys/fs/cgroup")
    for limit, used, reclaimable in _CGROUPS:
        try:
            total = float((root / limit).read_text(encoding="ascii"))
            used_bytes = float((root / used).read_text(encoding="ascii"))
            stat = (root / limit).with_name("memory.stat").read_text(encoding="ascii")
        except (OSError, ValueError):  # another version of cgroups, or `max`
            continue
        cached = dict(line.split() for line in stat.splitlines()).get(reclaimable, "0")
        return total, total - used_bytes + float(cached)
    return float("inf"), float("inf")
