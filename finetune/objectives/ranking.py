"""Comparisons of scores that do not turn on rounding, for metrics that decide about a run.

Where scores are equal but for rounding, as those of a pair are while policy and reference are the same, `a > b` is a
coin whose side depends on how work is divided. Here a score is:

    within the tolerance of the best      as good as it: they share the point, as ties do
    beyond twice the tolerance            worse
    between the two                       in proportion, so that no rounding decides there either
"""

from __future__ import annotations

import torch
from torch import Tensor


def rounding_of(compute: torch.dtype) -> float:
    """Returns the size of rounding errors, relative to what is rounded.

    Log-probabilities of two samplers in bf16 differ by 0.01 to 0.02 nats per token, 2 eps; in fp32, whose errors are
    those of sums in another order, by some 10 eps: four and a hundred are above the noise of a sum of them.
    """
    return max(4 * torch.finfo(compute).eps, 2.0**-16)


def share_of_best(scores: Tensor, tolerance: Tensor) -> Tensor:  # (E, N), (E,) -> (E, N)
    """Returns each candidate's share of the point for the best one; shares of a row add up to 1.

    >>> share_of_best(torch.tensor([[2.0, 1.0], [2.0, 1.9], [1.0, 1.15]]), torch.full((3,), 0.1))
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000],
            [0.3333, 0.6667]])
    """
    smallest = torch.finfo(scores.dtype).tiny
    behind = (scores.amax(1, keepdim=True) - scores) / tolerance.clamp(min=smallest)[:, None]
    weights = (2 - behind).clamp(0, 1)
    return weights / weights.sum(1, keepdim=True)


def score_tolerance(scores: Tensor, rounding: float) -> Tensor:  # (E, N) -> (E,)
    """Returns the tolerance of scores that are log-odds, of which 1 is a usual size: relative to the two best."""
    return rounding * (1 + scores.topk(2, dim=1).values.square().sum(1)).sqrt()
