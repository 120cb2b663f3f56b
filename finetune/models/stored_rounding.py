"""Rounds merged weights to the numbers of a format (stored_formats.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Fitted(NamedTuple):
    """Values (rows, columns) that are to be rounded. encode: returns the parts of numbers that are in the table."""

    units: Tensor  # in which a scale is 1
    scale: Tensor  # of each value
    table: Tensor  # numbers that the format has, in order
    encode: Callable[[Tensor], dict[str, Tensor]]


def nearest(units: Tensor, table: Tensor) -> Tensor:
    return table[torch.bucketize(units, (table[1:] + table[:-1]) / 2)]


def rounded(fitted: Fitted, inputs: Tensor | None) -> Tensor:  # (rows, columns)
    """Returns numbers of the table near to the values. inputs: (r, columns), directions of inputs in which the sum of
    a row's errors is to be small, as those of an adapter; None: the nearest ones.

    An update W + B A is smaller than half a step of 4 or 8 bits almost everywhere: rounded to nearest it is lost, and
    with it what training did to inputs along A. So what a column loses along A is added to the next ones, as in GPTQ
    (https://arxiv.org/abs/2210.17323) with the Hessian 1 + m A'A of orthonormal A: one pass, without data.
    """
    units, scale, table, _ = fitted
    if inputs is None:
        return nearest(units, table)
    directions = torch.linalg.qr(inputs.float().t()).Q  # (columns, r)
    weight = directions.shape[0] / directions.shape[1]  # with which both terms weigh the same
    factors = weight / (1 + weight * directions.square().sum(1))
    lost, chosen = units.new_zeros(len(units), directions.shape[1]), torch.empty_like(units)
    for i, (direction, factor) in enumerate(zip(directions, factors.tolist(), strict=True)):
        wanted = units[:, i] - torch.mv(lost, direction).mul_(factor) / scale[:, i]
        chosen[:, i] = nearest(wanted, table)
        lost.addr_((chosen[:, i] - units[:, i]) * scale[:, i], direction)
    return chosen
