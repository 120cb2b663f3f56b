"""Ulysses sequence parallel: ranks that have some tokens of all heads turn into ranks that have all tokens of some
heads, attend as one device would, and turn back (https://arxiv.org/abs/2309.14509).

Letters: t tokens on this rank, n ranks, H heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


def to_heads(group: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(1, H, t, D) -> (1, H / n, n * t, D), the tokens in the order of the ranks. Collective.

    Heads of keys and values that ranks cannot divide among themselves are there more than once. n divides the query
    heads: a rule refuses it otherwise.
    """
    size, shared = dist.get_world_size(group), key.shape[1]
    copies = math.lcm(shared, size) // shared
    key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
    found: Any = _Exchange.apply(group, True, query, key, value)
    return found


def to_tokens(group: Any, output: Tensor) -> Tensor:
    """The way back: (1, H / n, n * t, D) -> (1, H, t, D). Collective."""
    found: Any = _Exchange.apply(group, False, output)
    return found[0]


class _Exchange(torch.autograd.Function):
    """One way is the other's backward: values only change places."""

    @staticmethod
    def forward(ctx: Any, group: Any, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchanged(group, to_heads, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, None, *_exchanged(ctx.group, not ctx.to_heads, gradients))


def _exchanged(group: Any, to_heads: bool, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple((_heads_here if to_heads else _tokens_here)(group, tensor) for tensor in tensors)


def _heads_here(group: Any, tensor: Tensor) -> Tensor:  # (1, H, t, D) -> (1, H / n, n * t, D)
    parts = tensor[0].unflatten(0, (dist.get_world_size(group), -1))  # (n, H / n, t, D), of the heads' ranks
    return _all_to_all(group, parts).transpose(0, 1).flatten(1, 2)[None]


def _tokens_here(group: Any, tensor: Tensor) -> Tensor:  # (1, H / n, n * t, D) -> (1, H, t, D)
    parts = tensor[0].unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1)  # (n, H / n, t, D), of the tokens'
    return _all_to_all(group, parts).flatten(0, 1)[None]


def _all_to_all(group: Any, parts: Tensor) -> Tensor:
    """Part i to rank i; of rank i, part i."""
    sent = parts.contiguous()
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived, sent, group=group)
    return arrived
