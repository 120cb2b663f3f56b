"""What matrix products alone reach on a device: no training is faster than its products at this rate.

python benchmarks/products.py cuda bfloat16     # TFLOP/s
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SIZES = {"cuda": (8192,), "cpu": (512, 1024, 2048)}  # of square matrices
SECONDS = 20.0  # then no further product: a CPU without instructions for bf16 would take minutes
TYPES = {"fp32": "float32", "bf16": "bfloat16", "bf16_true": "bfloat16"}  # by `precision`


def best_tflops(device: str, dtype: str) -> float:
    """The best of a few products of square matrices, TFLOP/s."""
    import torch

    def timed(a: torch.Tensor, b: torch.Tensor, repeats: int) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            torch.mm(a, b, out=out)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    best, begun = 0.0, time.perf_counter()
    for size in SIZES[device]:
        a, b, out = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(3))
        repeats = 20 if device == "cuda" else max(1, 2**31 // size**3)
        for _ in range(10):
            best = max(best, repeats * 2 * size**3 / timed(a, b, repeats) / 1e12)
            if time.perf_counter() - begun > SECONDS:
                return best
    return best


def measured_apart(device: str, precision: str, threads: int | None = None) -> float:
    """In a process of its own, which leaves no memory taken. threads: on a CPU; None: torch's choice."""
    environment = dict(os.environ)
    if threads is not None:
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    command = [sys.executable, str(Path(__file__).resolve()), device, TYPES[precision]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def share(cell: dict[str, Any], ours: dict[str, Any] | None, tflops: float) -> float | None:
    """Of `tflops`, that a contender's steps make use of: by the FLOPs that ours counted for the same tokens (real
    document lengths, no recomputation). None where it counted none."""
    counted = (ours or {}).get("metrics", {})
    if "tflops_per_device" not in counted:
        return None
    return counted["tflops_per_device"] / counted["tokens_per_s"] * cell["tokens_per_s"] / tflops


if __name__ == "__main__":
    print(best_tflops(sys.argv[1], sys.argv[2]))
