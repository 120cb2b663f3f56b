"""Peak FLOP/s and memory of devices, from vendors' data sheets: the denominator of MFU.

Dense matrix products accumulated in fp32, without structured sparsity (with it, data sheets print twice as much).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

_NVIDIA = "https://www.nvidia.com"
_A100 = f"{_NVIDIA}/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_H100 = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_V100 = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_AMPERE = f"{_NVIDIA}/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf"
_BLACKWELL = "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
_AMD = "https://www.amd.com/en/products/accelerators/instinct"


@dataclass(frozen=True)
class Device:
    """One device as torch counts it. Peaks in TFLOP/s by operand type; None if not supported."""

    name: str
    fp32: float
    tf32: float | None
    fp16: float
    bf16: float | None
    memory_gb: float  # 10^9 bytes
    bandwidth_gb_s: float
    source: str


# Regular expressions for torch.cuda.get_device_name(); the first that is found in it counts.
DEVICES: tuple[tuple[str, Device], ...] = (
    (r"\bB200\b", Device("B200", 75, 1100, 2250, 2250, 180, 7700, f"{_NVIDIA}/en-us/data-center/hgx/")),
    (r"\bH200\b(?! NVL)", Device("H200 SXM", 67, 494.5, 989.5, 989.5, 141, 4800, f"{_NVIDIA}/en-us/data-center/h200/")),
    (r"\bH100 PCIe\b", Device("H100 PCIe", 51, 378, 756, 756, 80, 2000, _H100)),
    (r"\bH100 80GB HBM3\b|\bH100 SXM", Device("H100 SXM", 67, 494.5, 989.5, 989.5, 80, 3350, _H100)),
    (r"\bA100[- ]SXM\d?-80GB\b", Device("A100 SXM 80GB", 19.5, 156, 312, 312, 80, 2039, _A100)),
    (r"\bA100[- ]SXM\d?-40GB\b", Device("A100 SXM 40GB", 19.5, 156, 312, 312, 40, 1555, _A100)),
    (r"\bA100 80GB PCIe\b", Device("A100 PCIe 80GB", 19.5, 156, 312, 312, 80, 1935, _A100)),
    (r"\bA100-PCIE-40GB\b", Device("A100 PCIe 40GB", 19.5, 156, 312, 312, 40, 1555, _A100)),
    (r"\bL40S\b", Device("L40S", 91.6, 183, 362, 362, 48, 864, f"{_NVIDIA}/en-us/data-center/l40s/")),
    (r"\bL4\b", Device("L4", 30.3, 60, 121, 121, 24, 300, f"{_NVIDIA}/en-us/data-center/l4/")),
    (r"\bRTX 5090$", Device("RTX 5090", 104.8, 104.8, 209.5, 209.5, 32, 1792, _BLACKWELL)),
    (r"\bRTX 4090$", Device("RTX 4090", 82.6, 82.6, 165.2, 165.2, 24, 1008, _ADA)),
    (r"\bRTX 3090$", Device("RTX 3090", 35.6, 35.6, 71, 71, 24, 936, _AMPERE)),
    (r"\bV100-SXM2-32GB\b", Device("V100 SXM2 32GB", 15.7, None, 125, None, 32, 900, _V100)),
    (r"\bV100-SXM2-16GB\b", Device("V100 SXM2 16GB", 15.7, None, 125, None, 16, 900, _V100)),
    (r"\bV100-PCIE-32GB\b", Device("V100 PCIe 32GB", 14, None, 112, None, 32, 900, _V100)),
    (r"\bV100-PCIE-16GB\b", Device("V100 PCIe 16GB", 14, None, 112, None, 16, 900, _V100)),
    (r"\bT4\b", Device("T4", 8.1, None, 65, None, 16, 320, f"{_NVIDIA}/en-us/data-center/tesla-t4/")),
    (r"\bMI300X\b", Device("MI300X", 163.4, 653.7, 1307.4, 1307.4, 192, 5300, f"{_AMD}/mi300/mi300x.html")),
    # torch sees each of its two dies as a device.
    (r"\bMI250X\b", Device("MI250X die", 47.9, None, 191.5, 191.5, 64, 1638, f"{_AMD}/mi200/mi250x.html")),
)


def find_device(name: str) -> Device | None:
    """name: as in torch. Returns None for an unknown device, or a slice of one (MIG)."""
    if re.search(r"\bMIG\b", name):
        return None
    return next((device for pattern, device in DEVICES if re.search(pattern, name)), None)


def peak_tflops(name: str, compute: torch.dtype) -> float | None:
    """Returns the dense peak for products of this type; fp32 ones run in TF32 where torch allows it."""
    if (device := find_device(name)) is None:
        return None
    if compute == torch.bfloat16:
        return device.bf16
    if compute == torch.float16:
        return device.fp16
    fast = device.tf32 is not None and torch.get_float32_matmul_precision() != "highest"
    return device.tf32 if fast else device.fp32
