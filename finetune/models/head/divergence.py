"""Divergence of a student's distributions from a teacher's, given some ids with their log-probabilities.

Top k: the rest of each distribution is one more event, the tail, and D is over k + 1 events. It is a lower bound of
D over all V tokens, 0 if the two are equal, and the same if k is V - 1. Top k normalized to 1 again is biased:
its optimum is a student without a tail (https://arxiv.org/abs/2503.16870, section 3).

With p the teacher's probabilities of the events, q the student's, softmax(logits / T):

    forward_kl    KL(p, q)
    reverse_kl    KL(q, p)
    jsd           b * KL(p, m) + (1 - b) * KL(q, m),  m = b * p + (1 - b) * q      (https://arxiv.org/abs/2306.13649)

    loss          n * -log q1[t] + (1 - n) * T^2 * D        q1 = softmax(logits), t the target, n = nll_weight

T^2, because the gradient of D shrinks like its inverse (Hinton et al. 2015, https://arxiv.org/abs/1503.02531).

Letters: C targets of a chunk, V vocabulary, k ids of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from finetune.data.predictions import IDS, LOG_PROBS
from finetune.models.head.token_loss import ChunkLosses, TokenLoss
from finetune.models.head.vocabulary import VocabularyPart, at_own, own_columns, split_nll, totals

SMALLEST_TAIL = 2.0**-24  # half of fp32's step below 1: 1 - sum(p) cannot tell smaller ones from 0


@dataclass(frozen=True)
class Divergence:
    """The loss of a target with a teacher. Its details are -log q1[t] and D, (C,) each."""

    kind: str = "forward_kl"
    temperature: float = 1.0  # T
    jsd_beta: float = 0.5  # b
    nll_weight: float = 0.0  # n
    sampled: bool = False  # the ids were drawn from the teacher: D is the mean of log p - log q, unbiased, no bound

    def losses(self, logits: Tensor, ids: Tensor, columns: Mapping[str, Tensor]) -> ChunkLosses:
        nll = cross_entropy(logits, ids, reduction="none")
        cooled, index, log_p = logits / self.temperature, columns[IDS], columns[LOG_PROBS]
        top = cooled.gather(1, index)
        if self.sampled:
            log_q = top - cooled.logsumexp(1, keepdim=True)
            return self._combined(nll, (log_p - log_q).mean(1))
        rest = cooled.scatter(1, index, -torch.inf).logsumexp(1, keepdim=True)
        return self._combined(nll, self._of_events(log_p, _log_events(top, rest)))

    def losses_and_gradient(
        self, logits: Tensor, ids: Tensor, columns: Mapping[str, Tensor], out: Tensor
    ) -> tuple[ChunkLosses, Tensor]:
        scale = (1 - self.nll_weight) * self.temperature  # T^2 of the loss over T of the chain rule
        divergence, gradient = (self._sampled_gradient if self.sampled else self._events_gradient)(
            torch.div(logits, self.temperature, out=out), columns[IDS], columns[LOG_PROBS], scale
        )
        if not self.nll_weight:
            return self._combined(cross_entropy(logits, ids, reduction="none"), divergence), gradient
        (nll, _), of_nll = TokenLoss().losses_and_gradient(logits, ids, {}, torch.empty_like(logits))
        return self._combined(nll, divergence), gradient.add_(of_nll, alpha=self.nll_weight)

    def _combined(self, nll: Tensor, divergence: Tensor) -> ChunkLosses:
        of_divergence = (1 - self.nll_weight) * self.temperature**2 * divergence
        each = of_divergence + self.nll_weight * nll if self.nll_weight else of_divergence
        return ChunkLosses(each, (nll.detach(), divergence.detach()))

    def _sampled_gradient(self, cooled: Tensor, index: Tensor, log_p: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Returns D (C,) and its scaled gradient by the logits / T, in place of these: q - the share of draws."""
        drawn = cooled.gather(1, index)
        log_q = torch.log_softmax(cooled, 1, out=cooled)
        divergence = (log_p - log_q.gather(1, index)).mean(1)
        share = torch.full_like(drawn, -scale / index.shape[1])
        return divergence, log_q.exp_().mul_(scale).scatter_add_(1, index, share)

    def _events_gradient(self, cooled: Tensor, index: Tensor, log_p: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Returns D (C,) and its scaled gradient by the logits / T, in place of these.

        With g = d D / d log q of each event and G their sum, d D / d logit of an id is g - G * q; in the tail it is
        (g - G * q) of the tail's event times the token's share of the tail.
        """
        top = cooled.gather(1, index)
        largest = cooled.scatter_(1, index, -torch.inf).amax(1, keepdim=True)
        tail = cooled.sub_(largest).exp_()  # (C, V) shares of the tail, times their total
        total = tail.sum(1, keepdim=True)
        divergence, by_event = self._by_event(log_p, top, largest + total.log(), scale)
        gradient = tail.mul_(by_event[:, -1:] / total).scatter_(1, index, by_event[:, :-1])
        return divergence, gradient

    def split_losses_and_gradient(
        self, logits: Tensor, ids: Tensor, columns: Mapping[str, Tensor], out: Tensor, part: VocabularyPart
    ) -> tuple[ChunkLosses, Tensor]:
        log_p, scale = columns[LOG_PROBS], (1 - self.nll_weight) * self.temperature
        cooled = torch.div(logits, self.temperature, out=out)
        index, own = own_columns(columns[IDS], logits, part)  # (C, k) each
        of_ids = at_own(cooled, index, own)
        if not self.sampled:  # the ids of this rank leave the tail; those of others go to a column beyond the last
            beyond = torch.where(own, index, cooled.shape[1])
            ours = own.new_zeros(len(cooled), cooled.shape[1] + 1).scatter_(1, beyond, True)
            cooled.masked_fill_(ours[:, :-1], -torch.inf)
        largest = part.largest(cooled.amax(1, keepdim=True))
        shares = cooled.sub_(largest).exp_()  # of all tokens or of the tail, times their total
        total, top = totals(part, shares.sum(1, keepdim=True), of_ids)
        if self.sampled:
            divergence = (log_p - (top - largest - total.log())).mean(1)
            by_id, of_rest = torch.full_like(top, -scale / index.shape[1]), scale / total
        else:
            divergence, by_event = self._by_event(log_p, top, largest + total.log(), scale)
            by_id, of_rest = by_event[:, :-1], by_event[:, -1:] / total
        gradient = shares.mul_(of_rest).scatter_add_(1, index, by_id.masked_fill(~own, 0.0))
        if not self.nll_weight:
            return self._combined(split_nll(logits, ids, part), divergence), gradient
        (nll, _), of_nll = TokenLoss().split_losses_and_gradient(logits, ids, {}, torch.empty_like(logits), part)
        return self._combined(nll, divergence), gradient.add_(of_nll, alpha=self.nll_weight)

    def _by_event(self, log_p: Tensor, top: Tensor, rest: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Returns D (C,) and its scaled gradient (C, k + 1) by the ids' logits and by the tail's logsumexp."""
        with torch.enable_grad():
            log_q = _log_events(top, rest).requires_grad_()  # (C, k + 1)
            divergence = self._of_events(log_p, log_q)
            (g,) = torch.autograd.grad(divergence.sum(), log_q)
        return divergence.detach(), scale * (g - g.sum(1, keepdim=True) * log_q.detach().exp())

    def _of_events(self, log_p: Tensor, log_q: Tensor) -> Tensor:  # (C, k), (C, k + 1) -> (C,)
        """Returns D."""
        tail = (1 - log_p.exp().sum(1, keepdim=True)).clamp(min=SMALLEST_TAIL)
        log_p = torch.cat((log_p, tail.log()), 1).to(log_q.dtype)
        if self.kind == "forward_kl":
            return _kl(log_p, log_q)
        if self.kind == "reverse_kl":
            return _kl(log_q, log_p)
        b = log_q.new_full((), self.jsd_beta)  # no copy from the host, for which the process would wait
        log_m = torch.logaddexp(log_p + b.log(), log_q + torch.log1p(-b))
        return b * _kl(log_p, log_m) + (1 - b) * _kl(log_q, log_m)


def _log_events(top: Tensor, rest: Tensor) -> Tensor:  # (C, k + 1)
    """Returns the log-probabilities of the ids and of the tail, from logits (C, k) and the tail's logsumexp (C, 1)."""
    return torch.log_softmax(torch.cat((top, rest), 1), 1)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:  # (C,)
    return (log_p.exp() * (log_p - log_q)).sum(1)
