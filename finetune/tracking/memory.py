"""Most memory that this process held at any time."""

from __future__ import annotations

import re
from pathlib import Path

import torch


def peak_bytes(device: torch.device) -> int:
    """Of the device's allocator; on the CPU of the whole process, interpreter and libraries too."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Linux says it exactly; elsewhere getrusage's, which also knows of the process that started this one."""
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)):
        return int(found[1]) * 1024
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere
