"""Pipeline parallel without tensors: which layers a stage has, which rank runs it, in which order micro-batches run.

A stage is a run of consecutive decoder layers; the first also has the embedding, the last the final norm and the head.
Bounds make the largest stage as small as possible, by parameters: those are a stage's memory (16 bytes each where they
train in fp32 with AdamW) and, except for the embedding, its time (6 FLOPs a token). The embedding costs no time, but
where schedules start backwards early the first stage holds the most activations.

Schedules                                                     source

gpipe         every forward, then every backward              Huang et al. 2018, https://arxiv.org/abs/1811.06965
1f1b          a backward as soon as one can run               Narayanan et al. 2021, https://arxiv.org/abs/2104.04473
interleaved   the same, with several stages on each rank      the same, section 2.2
zero_bubble   gradients of weights where a rank would wait    Qi et al. 2023, https://arxiv.org/abs/2401.10241 (ZB-H1)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from finetune.engine.parallelism import Schedule

SINGLE_STAGE_SCHEDULES = ("gpipe", "1f1b")  # one stage on each rank
PLAN = frozenset({"embed_tokens", "layers", "norm"})  # the modules of a base model that can be split, in transformers


@dataclass(frozen=True)
class Layout:
    """Stage s has layers [bounds[s], bounds[s + 1]) and is run by pipeline rank s modulo `ranks`."""

    bounds: tuple[int, ...]
    ranks: int

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    def layers(self, stage: int) -> range:
        return range(self.bounds[stage], self.bounds[stage + 1])

    def rank_of(self, stage: int) -> int:
        return stage % self.ranks

    def stages_of(self, rank: int) -> range:
        return range(rank, self.stages, self.ranks)

    def layers_of(self, rank: int) -> frozenset[int]:
        return frozenset(layer for stage in self.stages_of(rank) for layer in self.layers(stage))


def lay_out(model: Any, stages: int, ranks: int) -> Layout:
    """model: a transformers causal model whose base model has the modules of PLAN; its weights may be `meta`."""
    base = model.base_model
    layers = [_numel(layer) for layer in base.layers]
    first, last = _numel(model.get_input_embeddings()), _numel(base.norm) + _numel(model.get_output_embeddings())
    return Layout(stage_bounds(layers, stages, first, last), ranks)


def _numel(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def stage_bounds(layers: Sequence[int], stages: int, first: int, last: int) -> tuple[int, ...]:
    """Returns bounds with the smallest possible maximum cost of a stage, then the smallest sum of squared costs.

    layers: the cost of each; first, last: what the first and the last stage have in addition. No stage is empty.

    >>> stage_bounds([1] * 32, 4, 2, 3)
    (0, 7, 16, 25, 32)
    """
    sums = [0]
    for layer in layers:
        sums.append(sums[-1] + layer)

    def cost(stage: int, begin: int, end: int) -> int:
        return sums[end] - sums[begin] + (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)

    @cache
    def smallest_maximum(stage: int, begin: int) -> float:
        """Of the stages from this one on."""
        if stage == stages - 1:
            return cost(stage, begin, len(layers))
        ends = range(begin + 1, len(layers) - (stages - 2 - stage))
        return min((max(cost(stage, begin, end), smallest_maximum(stage + 1, end)) for end in ends), default=math.inf)

    limit = smallest_maximum(0, 0)

    @cache
    def most_even(stage: int, begin: int) -> tuple[float, tuple[int, ...]]:
        """Returns (sum of squared costs, ends) of the stages from this one on, none of which exceeds `limit`."""
        if stage == stages - 1:
            own = cost(stage, begin, len(layers))
            return (own**2 if own <= limit else math.inf), (len(layers),)
        best: tuple[float, tuple[int, ...]] = (math.inf, ())
        for end in range(begin + 1, len(layers) - (stages - 2 - stage)):
            own = cost(stage, begin, end)
            if own > limit:
                break
            rest, ends = most_even(stage + 1, end)
            best = min(best, (own**2 + rest, (end, *ends)))
        return best

    return (0, *most_even(0, 0)[1])


def bubble_share(schedule: Schedule, ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    """Returns the share of a step in which a rank is idle, if stages are equal and backwards take twice a forward.

    With p ranks, m micro-batches and v stages on a rank, in units of one stage's forward and backward of one
    micro-batch: it works for v m and waits for p - 1 (Narayanan et al. 2021, section 2.2). Under ZB-H1 it waits for a
    third of that: forward, gradient of the input and gradient of the weights take a third each, and the wait is for
    the first two less the third (Qi et al. 2023, table 2).
    """
    waits = (ranks - 1) / (3 if schedule == "zero_bubble" else 1)
    return waits / (stages_per_rank * micro_batches + waits)


def schedulable_micro_batches(schedule: Schedule, ranks: int, micro_batches: int) -> int:
    """Returns the smallest number of micro-batches, at least `micro_batches`, that a schedule can run.

    1F1B needs one for each stage. Those with several stages on a rank run rounds of about `ranks` micro-batches, all of
    the same size.

    >>> [schedulable_micro_batches("1f1b", 4, n) for n in (1, 4, 5)]
    [4, 4, 5]
    >>> [schedulable_micro_batches("interleaved", 4, n) for n in (3, 7, 9)]
    [3, 7, 10]
    """
    if schedule == "gpipe":
        return micro_batches
    if schedule == "1f1b":
        return max(micro_batches, ranks)
    while micro_batches % max(1, micro_batches // ranks):
        micro_batches += 1
    return micro_batches
