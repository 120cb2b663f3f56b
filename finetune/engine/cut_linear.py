"""Linear layers of which each rank of a group holds a part: what they communicate, forward and backward.

          forward                             backward
enter     x                                   sum of the gradients over the ranks
leave     sum over the ranks                  the gradient
gather    the ranks' features, side by side   this rank's features of the gradient
split     this rank's features of x           the ranks' gradients, side by side
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import dropout, linear


@dataclass(frozen=True)
class Group:
    """The ranks that share matrices."""

    process_group: Any
    index: int  # of this rank
    size: int


class Entry:
    """Of an input that several layers share: entered once, so that the backward sums once, behind all of them."""

    def __init__(self, group: Group):
        self._group, self._layers = group, 0
        self._left, self._x, self._entered = 0, None, None

    def add_layer(self) -> None:
        self._layers += 1

    def __call__(self, x: Tensor) -> Tensor:
        if x is not self._x:
            self._x, self._entered, self._left = x, _Enter.apply(x, self._group), self._layers
        entered: Any = self._entered
        self._left -= 1
        if self._left == 0:
            self._x = self._entered = None  # or an activation would live until the next forward
        return entered


def make_colwise(module: Any, group: Group, enter: Entry, whole: bool) -> None:
    """A linear layer that holds this rank's rows of the weight, its outputs. whole: give those of all ranks."""
    original = module.forward
    enter.add_layer()

    def forward(x: Tensor) -> Tensor:
        features = original(enter(x))
        return _Gather.apply(features, group) if whole else features

    module.forward = forward


def make_rowwise(module: Any, group: Group, whole: bool) -> None:
    """A linear layer that holds this rank's columns of the weight, its inputs. whole: given all ranks'."""

    def forward(x: Tensor) -> Tensor:
        features = _Split.apply(x, group) if whole else x
        output = _Leave.apply(linear(features, module.weight), group)
        return output if module.bias is None else output + module.bias.to(output.dtype)  # once, not once a rank

    module.forward = forward


def drop_as_if_whole(module: Any, group: Group) -> None:
    """The mask of the whole input's width, as one process draws it: the ranks draw alike, and each takes its part."""

    def forward(x: Tensor) -> Tensor:
        if not module.training:
            return x
        mask = dropout(x.new_ones(*x.shape[:-1], x.shape[-1] * group.size), module.p)
        return x * _own(mask, group)

    module.forward = forward


def _own(features: Tensor, group: Group) -> Tensor:
    return features.chunk(group.size, -1)[group.index]


def _sum(tensor: Tensor, group: Group) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group.process_group)
    return total


def _side_by_side(tensor: Tensor, group: Group) -> Tensor:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size)]
    dist.all_gather(parts, tensor.contiguous(), group=group.process_group)
    return torch.cat(parts, -1)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _side_by_side(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _own(gradient, ctx.group), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _own(x, group).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _side_by_side(gradient, ctx.group), None
