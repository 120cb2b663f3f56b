"""The squared norm of gradients, in fp64 however they are cut.

fp32 norms of other pieces differ in the last bits, and through the clip those multiply every element: a run would
depend on how its gradients are sharded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_PIECE = 2**18  # elements: 2 MB in fp64, which stays in a core's cache; 2**17 to 2**20 take as long


def squared_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Of all elements of all gradients together, () fp64 on `device`; 0 of none."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    on_cpu = [gradient for gradient in gradients if gradient.device.type == "cpu"]
    others = [gradient for gradient in gradients if gradient.device.type != "cpu"]
    if others:
        total += torch.stack(torch._foreach_norm(others, 2, torch.float64)).to(device).square().sum()
    if on_cpu:
        total += _on_cpu(on_cpu).to(device)
    return total


def _on_cpu(gradients: list[Tensor]) -> Tensor:
    """There `_foreach_norm` makes an fp64 copy of each gradient, on one thread: five times slower, and 8 bytes for each
    element of the largest."""
    room = torch.empty(min(_PIECE, max(gradient.numel() for gradient in gradients)), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        for piece in gradient.detach().reshape(-1).split(_PIECE):
            wide = room[: len(piece)].copy_(piece)
            total += torch.dot(wide, wide)
    return total
