"""Samples the next token of each sequence by keyed noise, with its log-probability and margin for the record.

Letters: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from finetune.recipe.schema import Rollouts
from finetune.rl.rollouts.noise import gumbel


@dataclass
class Sampler:
    """Chooses the tokens of a cohort."""

    settings: Rollouts
    keys: Tensor  # (B,) int64, see `noise.sample_keys`
    begun: Tensor | int = 0  # (B,) int64: tokens after the prompt that a sample has already, of earlier turns
    # Tokens that are never drawn: those that stand for files, for which a forward would look in vain. As with `top_k`,
    # log-probabilities are those of all tokens.
    never: Sequence[int] = ()
    log_probs: list[Tensor] = field(default_factory=list)  # (B,) fp64 each, under the temperature
    # (B,) fp64 each: distance of the chosen token's logit with noise from the next best. A difference of logits below
    # it cannot change the token.
    margins: list[Tensor] = field(default_factory=list)

    def __call__(self, logits: Tensor, position: int) -> Tensor:  # (B, V) -> (B,)
        """Returns the token at a position (from 0) of each turn: the first of the largest."""
        log_p = torch.log_softmax(logits.double() / self.settings.temperature, 1)
        noisy = within(log_p, self.settings) + gumbel(self.keys, self.begun + position, logits.shape[1])
        if self.never:
            noisy[:, list(self.never)] = -torch.inf
        best, second = noisy.topk(2, 1).values.unbind(1)
        tokens = noisy.argmax(1)
        self.log_probs.append(log_p.gather(1, tokens[:, None])[:, 0])
        self.margins.append(best - second)
        return tokens


def within(log_p: Tensor, settings: Rollouts) -> Tensor:  # (B, V)
    """Returns log-probabilities with those of all but the `top_k` likeliest tokens, and of those after the first that
    together reach `top_p`, at -infinity. Tokens that are as likely as the last one stay."""
    if settings.top_k is not None and settings.top_k < log_p.shape[1]:
        last = log_p.topk(settings.top_k, 1).values[:, -1:]
        log_p = log_p.masked_fill(log_p < last, -torch.inf)
    if settings.top_p < 1:
        ordered = torch.softmax(log_p, 1).sort(1, descending=True).values
        before = ordered.cumsum(1) - ordered  # probability of the likelier ones
        last = ordered.masked_fill(before >= settings.top_p, torch.inf).amin(1, keepdim=True)
        log_p = log_p.masked_fill(torch.softmax(log_p, 1) < last, -torch.inf)
    return log_p
