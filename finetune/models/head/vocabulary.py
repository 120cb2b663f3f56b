"""Columns of the logits on several ranks: each has those of its part of the vocabulary, and no rank has all of them.

A loss needs sums over all columns (of exponentials, for the normalizer) and the logits of a few tokens, which one rank
has: one maximum and one sum over ranks of a few numbers for each target (Shoeybi et al. 2019,
https://arxiv.org/abs/1909.08053, section 3). Every rank then has the same losses, and the gradient of its own columns.

Letters: C targets of a chunk, V vocabulary, W columns of this rank, k tokens of each target.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class VocabularyPart(Protocol):
    """This rank's part of the vocabulary. All methods are collective over the ranks that share it."""

    first: int  # column of the first logit
    total: int  # V

    def sum(self, values: Tensor) -> Tensor: ...

    def largest(self, values: Tensor) -> Tensor:
        """Returns the largest of all ranks, element by element."""
        ...

    def gather(self, values: Tensor) -> Tensor:
        """Returns the values (C, k) of all ranks, (C, ranks x k) in rank order."""
        ...


def own_columns(ids: Tensor, logits: Tensor, part: VocabularyPart) -> tuple[Tensor, Tensor]:
    """Returns the columns of tokens (C, k) in this rank's logits, and which of them are here; others have a column that
    exists, and no meaning."""
    column = ids - part.first
    return column.clamp(0, logits.shape[1] - 1), (column >= 0) & (column < logits.shape[1])


def at_own(logits: Tensor, columns: Tensor, own: Tensor) -> Tensor:
    """Returns the logits at columns (C, k), 0 for those of other ranks: their sum over ranks is that of all."""
    return logits.gather(1, columns).masked_fill(~own, 0.0)


def totals(part: VocabularyPart, *values: Tensor) -> tuple[Tensor, ...]:
    """Returns the sums over ranks of values (C, ...) each, by one collective."""
    return part.sum(torch.cat(values, 1)).split([one.shape[1] for one in values], 1)


def split_nll(logits: Tensor, ids: Tensor, part: VocabularyPart) -> Tensor:  # (C,)
    """Returns -log p of the targets."""
    largest = part.largest(logits.amax(1, keepdim=True))
    exponentials = (logits - largest).exp_().sum(1, keepdim=True)
    total, of_target = totals(part, exponentials, at_own(logits, *own_columns(ids[:, None], logits, part)))
    return (largest + total.log() - of_target)[:, 0]
