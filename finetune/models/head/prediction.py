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
from finetune.models.head.vocabulary import VocabularyPart, at_own, own_columns, split_nll

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

    def split_losses_and_gradient(
        self, logits: Tensor, ids: Tensor, columns: Mapping[str, Tensor], out: Tensor, part: VocabularyPart
    ) -> tuple[ChunkLosses, Tensor]:
        """Returns the losses; there is no gradient, and `out` has other values."""
        log_p = torch.div(logits, self.temperature, out=out)
        log_p[:, max(0, self.vocabulary - part.first) :] = -torch.inf
        log_p.sub_(part.largest(log_p.amax(1, keepdim=True)))
        log_p.sub_(part.sum(log_p.exp().sum(1, keepdim=True)).log())
        if UNIFORM in columns:  # the number of tokens up to which the sum of probabilities is not beyond the draw
            reached = log_p.double().exp().cumsum(1)
            of_parts = part.gather(reached[:, -1:])
            before = part.gather(torch.full_like(reached[:, :1], part.first)) < part.first
            reached += of_parts.masked_fill(~before, 0.0).sum(1, keepdim=True)
            draws = columns[UNIFORM] * of_parts.sum(1, keepdim=True)
            passed = part.sum(torch.searchsorted(reached, draws, right=True))
            chosen = passed.clamp(max=self.vocabulary - 1)
        else:
            count = min(self.count, log_p.shape[1])
            values, ours = log_p.topk(count, 1)
            missing = (0, self.count - count)  # so that ranks have equally many
            values = part.gather(torch.nn.functional.pad(values, missing, value=-torch.inf))
            candidates = part.gather(torch.nn.functional.pad(ours + part.first, missing))
            chosen = candidates.gather(1, values.topk(self.count, 1).indices)
        of_chosen = part.sum(at_own(log_p, *own_columns(chosen, log_p, part)))
        return ChunkLosses(split_nll(logits, ids, part), (chosen, of_chosen)), out
