"""The ranks of a tensor parallel group: their shards of parameters, and what they send each other, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn.functional import pad


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that share matrices."""

    process_group: Any
    index: int  # this rank's position
    size: int

    def shard(self, dim: int, total: int, index: int | None = None) -> ParameterShard:
        """Returns the shard of a rank, by default this one's, in a dimension of `total`: those of the first ranks have
        one more if it is not divisible."""
        index = self.index if index is None else index
        each, more = divmod(total, self.size)
        return ParameterShard(dim, index * each + min(index, more), each + (index < more), total)

    def own(self, features: Tensor) -> Tensor:
        """Returns this rank's part of the last dimension."""
        return self.shard(features.ndim - 1, features.shape[-1]).take(features)

    def sum(self, tensor: Tensor) -> Tensor:
        return self.reduced(tensor, ReduceOp.SUM)

    def reduced(self, tensor: Tensor, by: Any) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, op=by, group=self.process_group)  # this file's `dist`: a plan replaces it
        return total


@dataclass(frozen=True)
class ParameterShard:
    """Part of a parameter: `size` of `total` along dimension `dim`, from `start` on."""

    dim: int
    start: int
    size: int
    total: int

    def full_shape(self, shape: torch.Size) -> torch.Size:
        """Returns the shape of the full parameter, from the shard's."""
        return torch.Size(self.total if dim == self.dim else size for dim, size in enumerate(shape))

    def take(self, full: Tensor) -> Tensor:
        return full.narrow(self.dim, self.start, self.size)


@dataclass(frozen=True)
class ShardedParameters:
    """Parameters of a tensor parallel model, by name."""

    shards: Mapping[str, ParameterShard]
    partial: frozenset[str]  # full, but each rank has only the gradient of its heads


def all_gathered(tensor: Tensor, group: TensorGroup, dim: int = -1, total: int | None = None) -> Tensor:
    """Returns the parts of all ranks along a dimension. total: its size, if the parts may differ."""
    dim = dim % tensor.ndim
    total = tensor.shape[dim] * group.size if total is None else total
    shards = [group.shard(dim, total, index) for index in range(group.size)]
    if (missing := shards[0].size - tensor.shape[dim]) > 0:  # ranks send equally much
        tensor = pad(tensor, [0, 0] * (tensor.ndim - 1 - dim) + [0, missing])
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in shards]
    dist.all_gather(parts, tensor.contiguous(), group=group.process_group)
    return torch.cat([part.narrow(dim, 0, shard.size) for part, shard in zip(parts, shards, strict=True)], dim)


# --- communication with gradients

_FORWARD: dict[str, Callable[[TensorGroup, Tensor], Tensor]] = {
    "copy": lambda group, x: x.view_as(x),
    "reduce": TensorGroup.sum,
    "gather": lambda group, features: all_gathered(features, group),
    "scatter": lambda group, x: group.own(x).contiguous(),
}
_BACKWARD: dict[str, Callable[[TensorGroup, Tensor], Tensor]] = {
    "copy": TensorGroup.sum,
    "reduce": lambda group, gradient: gradient,
    "gather": TensorGroup.own,
    "scatter": lambda group, gradient: all_gathered(gradient, group),
}


class Communicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, kind: str) -> Tensor:
        ctx.group, ctx.kind = group, kind
        return _FORWARD[kind](group, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _BACKWARD[ctx.kind](ctx.group, gradient), None, None
