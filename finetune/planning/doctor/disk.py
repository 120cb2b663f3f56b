"""How fast a folder takes and gives what a checkpoint holds."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_SIZE = 256 * 2**20  # bytes
_CHUNK = 8 * 2**20


@dataclass(frozen=True)
class Disk:
    folder: str
    free: int  # bytes
    write: float  # bytes/s, to the device
    read: float  # bytes/s, from the device where the kernel lets go of what it has in memory


def measure_disk(folder: Path) -> Disk:
    """Writes and reads a quarter of a gigabyte in `folder`, which is made if need be. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    noise = os.urandom(_CHUNK)  # a file system that compresses must not look faster
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        began = time.perf_counter()
        for _ in range(_SIZE // _CHUNK):
            file.write(noise)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - began
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began = time.perf_counter()
        while file.read(_CHUNK):
            pass
        read = time.perf_counter() - began
    return Disk(str(folder), shutil.disk_usage(folder).free, _SIZE / written, _SIZE / read)
