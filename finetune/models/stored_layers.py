"""Frozen weights that stay as their checkpoint stores them (stored_formats.py), unpacked for each product.

    files       weight (O, I) E4M3, weight_scale_inv (O / 128, I / 128)
    in memory   one parameter: their bytes one after the other, as floats of the compute type
    forward     y = x W'    W unpacked from the parameter, and dropped
    backward    dx = dy W   W unpacked again

A linear layer has (bytes, 1), the stacked experts of a layer (E, bytes of one). Backends shard, gather and keep these
as they do bitsandbytes' (packed_linear.py): FSDP2 shards floats only. Nothing may cast them: `.to(dtype)` would, so a
model is read in the type that it computes in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finetune.models.stored_formats import Parts, StoredFormat

_ALIGNED = 16  # bytes, at which each part begins: views in another type want a multiple of its size


@dataclass(frozen=True)
class StoredMatrix:
    """How the bytes of a matrix lie in memory: `rows` of several stored ones, one below the other, as gate and up."""

    format: StoredFormat
    rows: tuple[int, ...]
    columns: int

    @property
    def shape(self) -> tuple[int, int]:  # (O, I)
        return sum(self.rows), self.columns

    @cached_property
    def places(self) -> list[dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]]]:
        """First and last byte, type and shape of each part, of each stored matrix."""
        places, at = [], 0
        for rows in self.rows:
            own = {}
            for name, (dtype, shape) in self.format.parts(rows, self.columns).items():
                end = at + prod(shape) * dtype.itemsize
                own[name] = (at, end, dtype, shape)
                at = -(-end // _ALIGNED) * _ALIGNED
            places.append(own)
        return places

    @cached_property
    def nbytes(self) -> int:
        end = max(end for _, end, *_ in self.places[-1].values())
        return -(-end // _ALIGNED) * _ALIGNED

    def parts(self, packed: Tensor) -> Iterator[dict[str, Tensor]]:
        """Yields the parts of each stored matrix, as views. packed: contiguous, of any type."""
        flat = packed.reshape(-1).view(torch.uint8)
        for own in self.places:
            yield {name: flat[at:end].view(dtype).view(shape) for name, (at, end, dtype, shape) in own.items()}

    def fill(self, packed: Tensor, index: int, parts: Parts) -> None:
        """Write the parts of one of the stored matrices into the bytes, in place."""
        own = [*self.parts(packed)][index]
        for name, part in parts.items():
            own[name].copy_(part)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:  # (O, I)
        pairs = zip(self.parts(packed), self.rows, strict=True)
        matrices = [self.format.unpack(parts, rows, self.columns).to(dtype) for parts, rows in pairs]
        return matrices[0] if len(matrices) == 1 else torch.cat(matrices)

    def empty(self, *count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for matrices: (bytes, 1), or (count, bytes), as floats of a type."""
        size = self.nbytes // dtype.itemsize
        shape = (*count, size) if count else (size, 1)
        return torch.empty(shape, dtype=dtype, device=device) if device.type == "meta" else _zeros(shape, dtype, device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)  # equal files, equal bytes, those between parts as well


class StoredLinear(nn.Linear):
    """A frozen linear layer whose weight is in the bytes of its files."""

    def __init__(self, matrix: StoredMatrix, packed: Tensor, bias: Tensor | None):
        """packed: (bytes / size, 1) floats of the compute type, `size` bytes each."""
        super().__init__(matrix.columns, matrix.shape[0], bias is not None, device="meta")
        self.matrix = matrix
        self.weight = nn.Parameter(packed, requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:  # (..., I) -> (..., O) in the compute type
        return _StoredProduct.apply(x.to(self.weight.dtype), self.weight, self)  # pyright: ignore[reportReturnType]

    def unpacked(self, weight: Tensor) -> Tensor:  # (O, I)
        """Returns the values in the compute type. weight: the parameter, or the copy that a backend gathered."""
        return self.matrix.unpack(weight, weight.dtype)


class _StoredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Any) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.layer = layer
        return F.linear(x, layer.unpacked(weight), None if layer.bias is None else layer.bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return grads[0] @ ctx.layer.unpacked(weight), None, None


# --- stacked experts: a module of transformers' experts interface, some of whose parameters are (E, bytes)


def stored_matrices(experts: Any) -> Mapping[str, StoredMatrix]:
    """Returns, by the name of the parameter, the matrices of a module of experts that are stored; {} for others."""
    return getattr(experts, "stored_matrices", {})


def stored_stacks(model: nn.Module) -> dict[str, Any]:
    """Returns the modules of experts with stored weights, by their path."""
    return {path: module for path, module in model.named_modules() if stored_matrices(module)}


def stored_weights(model: nn.Module) -> Iterator[tuple[Tensor, int]]:
    """Yields each stored parameter, and the weights that it has."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        if isinstance(module, StoredLinear):
            yield module.weight, prod(module.matrix.shape)
        for name, matrix in stored_matrices(module).items():
            weight = module.get_parameter(name)
            yield weight, len(weight) * prod(matrix.shape)
