"""A model's predictions at its targets, by a head that never has all logits: the ids that a student is to learn from.

Letters: C targets of a chunk, V vocabulary, k ids of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from finetune.models.head.token_loss import ChunkLosses

UNIFORM = "uniform"  # column, (C, k) fp64 in [0, 1): numbers that draws follow from, so that they do on any config


@dataclass(frozen=True)
class Prediction:
    """-log p(target), for forwards without a gradient. Its details are k ids and their log-probabilities, (C, k)
    each: the likeliest, or draws if there is a column UNIFORM."""

    count: int  # k
    temperature: float
    vocabulary: int  # logits beyond are those of padding, and left out

    def losses(self, logits: Tensor, ids: Tensor, columns: Mapping[str, Tensor]) -> ChunkLosses:
        log_p = torch.log_softmax(logits[:, : self.vocabulary] / self.temperature, 1)
        if UNIFORM in columns:
            reached = log_p.double().exp().cumsum(1)  # (C, V)
            draws = torch.searchsorted(reached, columns[UNIFORM] * reached[:, -1:], right=True)
            chosen = draws.clamp(max=self.vocabulary - 1)
        else:
            chosen = log_p.topk(self.count, 1).indices
        return ChunkLosses(cross_entropy(logits, ids, reduction="none"), (chosen, log_p.gather(1, chosen)))

    def losses_and_gradient(
        self, logits: Tensor, ids: Tensor, columns: Mapping[str, Tensor], out: Tensor
    ) -> tuple[ChunkLosses, Tensor]:
        raise NotImplementedError("a prediction has no gradient")
