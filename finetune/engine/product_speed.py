"""Which precisions this machine computes, by the time of a product: processors and GPUs without a type's instructions
emulate it, which a table of their names could not tell for all of them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from finetune.recipe.schema import Quantization, Train

EMULATED = 2.0  # times slower than fp32; native products are faster, so that other load cannot explain it
_PRODUCTS = {"bf16": torch.bfloat16, "bf16_true": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
_EDGE, _EDGE_OF_GPU = 256, 2048  # of square matrices: 0.03 GFLOP, 17 on a GPU, below which launches take longer
TimesSlower = Callable[[torch.dtype, torch.device], float]
_TRIES = 3  # other programs disturb single ones


class NativePrecision(NamedTuple):
    """A precision that this machine computes well, and how it was found."""

    name: str
    reason: str


def compute_device() -> torch.device:
    """Returns the accelerator that a run uses, or the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


@functools.cache
def product_seconds(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the shortest time of a product on a device; under a fifth of a second in all, where a slow core
    emulates it."""
    edge = _EDGE if device.type == "cpu" else _EDGE_OF_GPU
    matrix = torch.ones(edge, edge, dtype=dtype, device=device)  # no random numbers, which the run draws
    best = float("inf")
    with torch.inference_mode():
        for _ in range(_TRIES + 1):  # the first one chooses its kernel
            _wait(device)
            begun = time.perf_counter()
            torch.mm(matrix, matrix)
            _wait(device)
            best = min(best, time.perf_counter() - begun)
    return best


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def times_slower(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the time of a product over that of fp32."""
    return product_seconds(dtype, device) / product_seconds(torch.float32, device)


def native_precision(device: torch.device, slower_by: TimesSlower = times_slower) -> NativePrecision:
    """Returns the precision to train in on this device: bf16 if it is computed, else fp16 on a GPU, else fp32."""
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return NativePrecision("bf16", "this GPU computes it")
        slower, reason = float("inf"), "this GPU has no bf16"
    else:
        slower = slower_by(torch.bfloat16, device)
        reason = f"bf16 is emulated here, {slower:.1f} times slower"
    if slower < EMULATED:
        return NativePrecision("bf16", "this machine computes it, by the time of a product")
    if device.type != "cpu" and slower_by(torch.float16, device) < 1:
        return NativePrecision("fp16", f"{reason}; use bf16 on a GPU that has it")
    return NativePrecision("fp32", f"{reason}; use bf16 on a GPU that has it")


def emulation_note(
    train: Train, quantization: Quantization | None, device: torch.device, slower_by: TimesSlower = times_slower
) -> str | None:
    """Returns a note if this device emulates the recipe's precision, with what it costs; measured. Not for CUDA, where
    emulation is refused (`check_cuda`)."""
    dtype = _PRODUCTS.get(train.precision)
    if dtype is None or device.type == "cuda" or (slower := slower_by(dtype, device)) < EMULATED:
        return None
    name = "fp16" if dtype == torch.float16 else "bf16"
    scaled = quantization is not None and quantization.compute == "scaled"
    return (
        f"train.precision: {name} is emulated here: {slower:.1f} times slower than fp32. Measured by one product. Fix: "
        f"train.precision=fp32{' and quantization.compute=dequantised' if scaled else ''}, or a device that computes "
        f"{name}"
    )
