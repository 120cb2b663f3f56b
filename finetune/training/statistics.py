"""Terms of forwards without a backward: an evaluation, or values of a full step that an objective needs before the
terms of any of its micro-batches (KTO's KL divergence)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from finetune.data.batch import Batch
from finetune.engine.base import Engine
from finetune.models.wrapped import Outputs
from finetune.objectives.forward import ForwardPass
from finetune.objectives.objective import Sums, Terms, TermSums


@torch.no_grad()
def sum_terms(
    engine: Engine,
    forward: ForwardPass,
    terms: Callable[[Outputs, Batch], Terms],
    batches: Iterable[Batch],
    first: Batch,
    counts: Mapping[str, int],
) -> Sums:
    """Returns terms summed over all ranks. Collective.

    batches: this rank's; first: the first of them; counts: totals of all batches of all ranks.
    """
    sums = TermSums()
    for batch, outputs in engine.forwards(batches, forward):
        sums.add(terms(outputs, batch))
    if not sums.terms:  # a pipeline's early stages have no outputs
        sums.add(forward.objective.no_terms(first, terms))
    return Sums(engine.ranks.total(sums.totals), sums.terms, counts)


def as_columns(statistics: Sums, device: torch.device) -> dict[str, Tensor]:
    """Returns the mean of each statistic, () fp64."""
    return {name: torch.tensor(statistics.mean(name), dtype=torch.float64, device=device) for name in statistics.terms}
