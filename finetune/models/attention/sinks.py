"""Attention with sinks: of each head a learned score that takes weight, and to which no value belongs (gpt-oss,
https://arxiv.org/abs/2508.10925, section 2.2).

With scores S of a query, lse = log(sum(exp(S))) and a sink s, weights are exp(S - lse') with lse' = log(exp(lse) +
exp(s)): the output without the sink, times sigmoid(lse - s). Flash attention's backward
(https://arxiv.org/abs/2307.08691, section 3.1) computes the weights again from the lse that it is given, and subtracts
the sum of gradient * output from their gradients; the sink's value of zeros adds nothing to that sum. So given lse' and
the scaled output it computes the gradients of attention with the sink. Autograd through the kernels' lse would be
wrong: torch's backward of varlen attention leaves out what arrives there.

Letters: T queries, H query heads, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Attended(NamedTuple):
    out: Tensor  # (..., H, T, D)
    lse: Tensor  # (..., H, T), at least fp32


def add_sinks(attended: Attended, sinks: Tensor) -> Attended:
    """Returns attention to sinks, too, for attention without. The output is changed in place, and rounded once."""
    scores = sinks.to(attended.lse.dtype)[:, None]  # (H, 1)
    attended.out.mul_(torch.sigmoid(attended.lse - scores)[..., None])
    return Attended(attended.out, torch.logaddexp(attended.lse, scores))


def sinks_gradient(gradient: Tensor, attended: Attended, sinks: Tensor) -> Tensor:  # (H,)
    """Returns the gradient of the sinks. gradient: as the output; attended: to the sinks, too."""
    exact = attended.lse.dtype
    weights = torch.exp(sinks.to(exact)[:, None] - attended.lse)
    products = (gradient.to(exact) * attended.out).sum(-1)  # (..., H, T)
    return -(weights * products).sum(-1).view(-1, len(sinks)).sum(0).to(sinks.dtype)
