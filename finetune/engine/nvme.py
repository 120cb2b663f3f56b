"""Optimizer state that DeepSpeed keeps on NVMe, seen as tensors: its swap files, mapped into memory.

Between steps DeepSpeed leaves a swapped group and its state without memory, each in a plain file of its own. Mapped,
the file is the tensor: reading one pages it in, writing one writes the file, and neither takes memory that the kernel
could not take back. DeepSpeed's next swap-in puts its own buffers in the place of the mappings.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def map_groups(zero: Any) -> None:
    """Give the swapped groups of a ZeRO-3 optimizer, and their state, their values."""
    for group in zero.fp32_partitioned_groups_flat:
        info = zero.optimizer_swapper._get_param_swap_info(group)
        for held in info.tensors if info else ():
            held.compute_tensor.data = _mapped(held.swap_path, info)


def is_swapped(zero: Any, stepped: Tensor) -> bool:
    """Groups of less than a megabyte stay in memory."""
    return zero.swap_optimizer and zero.optimizer_swapper._get_param_swap_info(stepped) is not None


def make_files(zero: Any, owner: Optimizer, stepped: Tensor, fields: Iterable[str]) -> None:
    """Room for state where there was no step yet: the files that DeepSpeed would make at the end of the first."""
    swapper = zero.optimizer_swapper
    info = swapper._get_param_swap_info(stepped)
    for field in fields:
        path = (
            Path(swapper.swap_folder) / f"{field}-{swapper.parameter_id(stepped)}.tensor.swp"
        )  # as _get_state_tensors does
        path.touch()
        os.truncate(path, swapper._io_aligned_numel(info.numel()) * info.dtype().itemsize)
        owner.state[stepped][field] = _mapped(path, info)


def _mapped(path: str | Path, info: Any) -> Tensor:  # (numel,)
    return torch.from_file(str(path), shared=True, size=info.numel(), dtype=info.dtype())
