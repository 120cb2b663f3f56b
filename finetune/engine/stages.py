"""Where a model is cut into pipeline stages, and which rank runs which stage.

A stage is a run of neighbouring decoder layers; the first has the embedding besides, the last the final norm and the
head. Cuts make the heaviest stage as light as they can, by parameters: those are a stage's memory (16 bytes each where
they train in fp32 with AdamW), and, but for the embedding's, its time (6 FLOPs a token). The embedding costs no time,
but where schedules start backwards early it is the first stage that holds the most activations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

PLAN = frozenset({"embed_tokens", "layers", "norm"})  # the parts of a base model that a cut knows, as transformers' own


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
    """model: a transformers causal model whose base model has the parts of PLAN; its weights may be `meta`."""
    base = model.base_model
    layers = [_numel(layer) for layer in base.layers]
    first, last = _numel(model.get_input_embeddings()), _numel(base.norm) + _numel(model.get_output_embeddings())
    return Layout(cut(layers, stages, first, last), ranks)


def _numel(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def cut(layers: Sequence[int], stages: int, first: int, last: int) -> tuple[int, ...]:
    """Bounds of the stages: the heaviest as light as can be, then all as even as can be.

    layers: the cost of each; first, last: what the first and the last stage have besides. Every stage gets a layer.

    >>> cut([1] * 32, 4, 2, 3)
    (0, 7, 16, 25, 32)
    """
    sums = [0]
    for layer in layers:
        sums.append(sums[-1] + layer)

    def cost(stage: int, begin: int, end: int) -> int:
        return sums[end] - sums[begin] + (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)

    @cache
    def heaviest(stage: int, begin: int) -> float:
        """Of the stages from this one on, at best."""
        if stage == stages - 1:
            return cost(stage, begin, len(layers))
        ends = range(begin + 1, len(layers) - (stages - 2 - stage))
        return min((max(cost(stage, begin, end), heaviest(stage + 1, end)) for end in ends), default=math.inf)

    bound = heaviest(0, 0)

    @cache
    def evenest(stage: int, begin: int) -> tuple[float, tuple[int, ...]]:
        """(sum of squared costs, ends) of the stages from this one on, none heavier than `bound`."""
        if stage == stages - 1:
            own = cost(stage, begin, len(layers))
            return (own**2 if own <= bound else math.inf), (len(layers),)
        best: tuple[float, tuple[int, ...]] = (math.inf, ())
        for end in range(begin + 1, len(layers) - (stages - 2 - stage)):
            own = cost(stage, begin, end)
            if own > bound:
                break
            rest, ends = evenest(stage + 1, end)
            best = min(best, (own**2 + rest, (end, *ends)))
        return best

    return (0, *evenest(0, 0)[1])
