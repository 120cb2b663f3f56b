"""The ranks of a tensor parallel group: their shards of parameters, and what they send each other, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp


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
        self.all_reduce(total, by)
        return total

    # Collectives by this file's `dist`: a plan replaces it.

    def all_reduce(self, tensor: Tensor, by: Any) -> None:
        dist.all_reduce(tensor, op=by, group=self.process_group)

    def all_gather(self, parts: Tensor, part: Tensor) -> None:
        """Write the equal parts of all ranks into `parts`, in rank order along dimension 0."""
        dist.all_gather_into_tensor(parts, part, group=self.process_group)

    def reduce_scatter(self, own: Tensor, parts: Tensor) -> None:
        """Write this rank's part of the sum of all ranks' `parts`, equal along dimension 0, into `own`."""
        dist.reduce_scatter_tensor(own, parts, group=self.process_group)


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
    partial: frozenset[str]  # full, but each rank has only the gradient of its heads or tokens


def all_gathered(tensor: Tensor, group: TensorGroup, dim: int = -1, total: int | None = None) -> Tensor:
    """Returns the parts of all ranks along a dimension. total: its size, if the parts may differ."""
    part = tensor.movedim(dim, 0)
    total = len(part) * group.size if total is None else total
    each, more = divmod(total, group.size)
    largest = each + (more > 0)
    if (missing := largest - len(part)) > 0:  # ranks send equally much
        part = torch.cat([part, part.new_zeros(missing, *part.shape[1:])])
    parts = part.new_empty(largest * group.size, *part.shape[1:])
    group.all_gather(parts, part.contiguous())
    if more:
        parts = torch.cat([one[: each + (i < more)] for i, one in enumerate(parts.split(largest))])
    return parts.movedim(0, dim).contiguous()


def reduce_scattered(tensor: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Returns this rank's part, along a dimension, of the sum over the ranks."""
    whole = tensor.movedim(dim, 0)
    total, (each, more) = len(whole), divmod(len(whole), group.size)
    if more:  # ranks receive equally much
        padded = whole.new_zeros(group.size, each + 1, *whole.shape[1:])
        for index, part in enumerate(padded):
            own = group.shard(0, total, index)
            part[: own.size] = own.take(whole)
        whole = padded.flatten(0, 1)
    own = whole.new_empty(each + (more > 0), *whole.shape[1:])
    group.reduce_scatter(own, whole.contiguous())
    return own[: group.shard(0, total).size].movedim(0, dim).contiguous()


# --- communication with gradients
#
# Features are the last dimension of (B, T, D), tokens are dimension 1.

_Call = Callable[[TensorGroup, Tensor, Any], Tensor]  # of the group, a tensor, and the tokens of all ranks

_FORWARD: dict[str, _Call] = {
    "copy": lambda group, x, _: x.view_as(x),
    "reduce": lambda group, x, _: group.sum(x),
    "gather": lambda group, features, _: all_gathered(features, group),
    "scatter": lambda group, x, _: group.own(x).contiguous(),
    # Between matrices each rank has some of the tokens (`split_tokens.py`).
    "gather tokens": lambda group, x, total: all_gathered(x, group, 1, total),
    "reduce tokens": lambda group, x, _: reduce_scattered(x, group, 1),
    # A view would keep all of x; strides as of other layers' inputs, for which a layer is compiled.
    "own tokens": lambda group, x, total: group.shard(1, total).take(x).clone(memory_format=torch.contiguous_format),
    "all tokens": lambda group, x, total: all_gathered(x, group, 1, total),
}
_BACKWARD: dict[str, _Call] = {
    "copy": lambda group, gradient, _: group.sum(gradient),
    "reduce": lambda group, gradient, _: gradient,
    "gather": lambda group, gradient, _: group.own(gradient),
    "scatter": lambda group, gradient, _: all_gathered(gradient, group),
    "gather tokens": lambda group, gradient, _: reduce_scattered(gradient, group, 1),
    "reduce tokens": lambda group, gradient, total: all_gathered(gradient, group, 1, total),
    "own tokens": lambda group, gradient, total: all_gathered(gradient, group, 1, total),
    "all tokens": lambda group, gradient, total: group.shard(1, total).take(gradient),
}


class Communicate(torch.autograd.Function):
    """Communication by its kind. total: tokens of all ranks, for kinds of tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup, kind: str, total: int | None = None) -> Tensor:
        ctx.group, ctx.kind, ctx.total = group, kind, total
        return _FORWARD[kind](group, x, total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _BACKWARD[ctx.kind](ctx.group, gradient, ctx.total), None, None, None
