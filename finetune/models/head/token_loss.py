"""From the head's output to logits, as the architecture has it; the loss of a token from its logits, and the gradient
of that loss, in one pass over a chunk. (That with a teacher is in finetune/models/head/divergence.py.)

Letters: S supervised tokens, C of them at once, V vocabulary.

With p = softmax(logits), lse = log(sum(exp(logits))), t the target, e = label_smoothing, z = z_loss:

    loss             = (1 - e) * -log p[t] + e * mean over v of -log p[v] + z * lse^2
    d loss / d logit = (1 + 2 * z * lse) * p - (1 - e) * onehot(t) - e / V
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from finetune.models.head.vocabulary import VocabularyPart, at_own, own_columns, totals


class HeadLosses(NamedTuple):
    """Losses of the targets, and their weighted sum. `each` has a graph only if the task is differentiable."""

    total: Tensor  # (), fp32
    each: Tensor  # (S,), fp32, not weighted
    details: tuple[Tensor, ...] = ()  # (S, ...) each: additional results of the loss, without a graph


class ChunkLosses(NamedTuple):
    """Losses of the targets of a chunk."""

    each: Tensor  # (C,)
    details: tuple[Tensor, ...] = ()  # (C, ...) each, without a graph


class TargetLoss(Protocol):
    """The loss of a target as a function of its logits. columns: (C, ...) each, further data of every target."""

    def losses(
        self,
        logits: Tensor,  # (C, V), fp32 or fp64
        ids: Tensor,  # (C,)
        columns: Mapping[str, Tensor],
    ) -> ChunkLosses:
        """Returns the losses, with a graph if the logits have one."""
        ...

    def losses_and_gradient(
        self,
        logits: Tensor,  # (C, V), fp32 or fp64; not to be changed
        ids: Tensor,  # (C,)
        columns: Mapping[str, Tensor],
        out: Tensor,  # (C, V): for the gradient
    ) -> tuple[ChunkLosses, Tensor]:
        """Returns the losses, and the gradient (C, V) of their sum by the logits."""
        ...

    def split_losses_and_gradient(
        self,
        logits: Tensor,  # (C, W), this rank's columns; not to be changed
        ids: Tensor,  # (C,)
        columns: Mapping[str, Tensor],
        out: Tensor,  # (C, W): for the gradient
        part: VocabularyPart,
    ) -> tuple[ChunkLosses, Tensor]:
        """Returns the losses, and the gradient (C, W) of their sum by this rank's logits. Collective."""
        ...


@dataclass(frozen=True)
class TokenLoss:
    """The loss of one target: its negative log-likelihood, plus the terms that an objective adds to it.

    z_loss: Chowdhery et al. 2022 (https://arxiv.org/abs/2204.02311, section 5); label_smoothing: Szegedy et al. 2015
    (https://arxiv.org/abs/1512.00567, section 7), as torch.nn.functional.cross_entropy has it."""

    z_loss: float = 0.0
    label_smoothing: float = 0.0

    def losses(self, logits: Tensor, ids: Tensor, columns: Mapping[str, Tensor]) -> ChunkLosses:
        losses = cross_entropy(logits, ids, reduction="none", label_smoothing=self.label_smoothing)
        return ChunkLosses(losses + self.z_loss * logits.logsumexp(1).square() if self.z_loss else losses)

    def losses_and_gradient(
        self, logits: Tensor, ids: Tensor, columns: Mapping[str, Tensor], out: Tensor
    ) -> tuple[ChunkLosses, Tensor]:
        index, smoothing = ids[:, None], self.label_smoothing
        log_p = torch.log_softmax(logits, 1, out=out)
        nll = -log_p.gather(1, index)
        losses = nll
        if smoothing:
            losses = (1 - smoothing) * nll - smoothing * log_p.mean(1, keepdim=True)
        gradient = log_p.exp_()
        if self.z_loss:
            lse = logits.gather(1, index) + nll
            losses = losses + self.z_loss * lse.square()
            gradient.mul_(1 + 2 * self.z_loss * lse)
        gradient.scatter_add_(1, index, torch.full_like(nll, smoothing - 1))
        if smoothing:
            gradient.sub_(smoothing / logits.shape[1])
        return ChunkLosses(losses[:, 0]), gradient

    def split_losses_and_gradient(
        self, logits: Tensor, ids: Tensor, columns: Mapping[str, Tensor], out: Tensor, part: VocabularyPart
    ) -> tuple[ChunkLosses, Tensor]:
        index, own = own_columns(ids[:, None], logits, part)
        largest, smoothing = part.largest(logits.amax(1, keepdim=True)), self.label_smoothing
        gradient = torch.sub(logits, largest, out=out).exp_()
        of_own = [gradient.sum(1, keepdim=True), at_own(logits, index, own)]
        total, of_target, *of_all = totals(part, *of_own, *([logits.sum(1, keepdim=True)] if smoothing else []))
        lse = largest + total.log()
        losses = lse - of_target
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (lse - of_all[0] / part.total)
        if self.z_loss:
            losses = losses + self.z_loss * lse.square()
        gradient.mul_((1 + 2 * self.z_loss * lse) / total)
        gradient.scatter_add_(1, index, (smoothing - 1.0) * own.to(gradient.dtype))
        if smoothing:
            gradient.sub_(smoothing / part.total)
        return ChunkLosses(losses[:, 0]), gradient

    def rounded_gradient(self, logits: Tensor, ids: Tensor, scratch: Tensor, out: Tensor) -> tuple[ChunkLosses, Tensor]:
        """Returns the same without z-loss and smoothing, with the gradient rounded to the type of `out` as it is
        written: a pass less than writing it in fp32 first, and the same bits. scratch: (C, V), as the logits."""
        index = ids[:, None]
        log_p = torch.log_softmax(logits, 1, out=scratch)
        of_target = log_p.gather(1, index)
        torch.exp(log_p, out=out).scatter_(1, index, (of_target.exp() - 1).to(out.dtype))
        return ChunkLosses(-of_target[:, 0]), out


@dataclass(frozen=True)
class GuessLoss:
    """The negative log-likelihood. Its detail is the likeliest token, of equal ones the first."""

    def losses(self, logits: Tensor, ids: Tensor, columns: Mapping[str, Tensor]) -> ChunkLosses:
        return ChunkLosses(TokenLoss().losses(logits, ids, columns).each, (logits.argmax(1),))

    def losses_and_gradient(
        self, logits: Tensor, ids: Tensor, columns: Mapping[str, Tensor], out: Tensor
    ) -> tuple[ChunkLosses, Tensor]:
        guess = logits.argmax(1)
        losses, gradient = TokenLoss().losses_and_gradient(logits, ids, columns, out)
        return ChunkLosses(losses.each, (guess,)), gradient

    def split_losses_and_gradient(
        self, logits: Tensor, ids: Tensor, columns: Mapping[str, Tensor], out: Tensor, part: VocabularyPart
    ) -> tuple[ChunkLosses, Tensor]:
        largest, column = logits.max(1)
        here = largest == part.largest(largest)
        own = torch.where(here, column + part.first, part.total).double()  # exact: a vocabulary has less than 2^53
        losses, gradient = TokenLoss().split_losses_and_gradient(logits, ids, columns, out, part)
        return ChunkLosses(losses.each, ((-part.largest(-own)).long(),)), gradient


@dataclass(frozen=True)
class CooledTokenLoss:
    """-log p(target) with p = softmax(logits / temperature), the distribution that samples are drawn from. Its detail
    is the entropy of p, in nats."""

    temperature: float = 1.0

    def losses(self, logits: Tensor, ids: Tensor, columns: Mapping[str, Tensor]) -> ChunkLosses:
        log_p = torch.log_softmax(logits / self.temperature, 1)
        entropy = -(log_p.exp() * log_p).detach().sum(1)
        return ChunkLosses(-log_p.gather(1, ids[:, None])[:, 0], (entropy,))

    def losses_and_gradient(
        self, logits: Tensor, ids: Tensor, columns: Mapping[str, Tensor], out: Tensor
    ) -> tuple[ChunkLosses, Tensor]:
        index = ids[:, None]
        log_p = torch.log_softmax(torch.div(logits, self.temperature, out=out), 1)
        nll = -log_p.gather(1, index)
        gradient = torch.exp(log_p, out=out)
        entropy = -(gradient * log_p).sum(1)
        gradient.scatter_add_(1, index, torch.full_like(nll, -1.0))
        return ChunkLosses(nll[:, 0], (entropy,)), gradient.div_(self.temperature)

    def split_losses_and_gradient(
        self, logits: Tensor, ids: Tensor, columns: Mapping[str, Tensor], out: Tensor, part: VocabularyPart
    ) -> tuple[ChunkLosses, Tensor]:
        index, own = own_columns(ids[:, None], logits, part)
        cooled = logits / self.temperature
        cooled.sub_(part.largest(cooled.amax(1, keepdim=True)))
        gradient = torch.exp(cooled, out=out)
        of_target = at_own(cooled, index, own)
        weighted = cooled.mul_(gradient).sum(1, keepdim=True)
        total, of_target, weighted = totals(part, gradient.sum(1, keepdim=True), of_target, weighted)
        nll, entropy = total.log() - of_target, total.log() - weighted / total
        gradient.div_(total).scatter_add_(1, index, -own.to(gradient.dtype))
        return ChunkLosses(nll[:, 0], (entropy[:, 0],)), gradient.div_(self.temperature)


@dataclass(frozen=True)
class LogitMap:
    """An architecture's map from the head's output to logits: scale (Granite, Cohere), then cap * tanh(x / cap)
    (Gemma)."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, raw: Tensor) -> Tensor:
        scaled = raw if self.scale == 1.0 else raw * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap

    def apply_(self, raw: Tensor) -> Tensor:
        """Returns the logits, in place."""
        if self.scale != 1.0:
            raw.mul_(self.scale)
        return raw if self.cap is None else raw.div_(self.cap).tanh_().mul_(self.cap)

    def chain_(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Returns the gradient of the head's output from that of the logits, in place; `logits` is overwritten."""
        if self.cap is not None:
            gradient.mul_(logits.div_(self.cap).square_().neg_().add_(1.0))
        return gradient if self.scale == 1.0 else gradient.mul_(self.scale)


def at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


# --- the logit map of an architecture
#
# Determined by running the model's own forward with the base model and the head replaced by test values.

_KEPT = (0, 2)  # of three positions


class UnknownHead(Exception):
    """The reason why losses cannot be computed in this architecture's head."""


class _Outputs:
    """Outputs of a base model: the hidden states, and None for all else that a forward may pass on."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Base(nn.Module):
    def __init__(self, hidden: Tensor):
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _Outputs(self.hidden)


class _Head(nn.Module):
    def __init__(self, output: Tensor):
        super().__init__()
        self.output, self.seen = output, None
        self.weight = torch.empty(0)  # some cast to its type

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen = hidden
        return self.output.clone()


def logit_map(model: PreTrainedModel) -> LogitMap:
    """Returns the map from the head's output to the logits of this model; its weights are not used, and
    may be `meta`.

    Raises UnknownHead with the reason if that is not a scale and a soft cap, or if the input of the head is not
    the base model's last hidden state.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    heads = [key for key, module in model.named_children() if module is model.get_output_embeddings()]
    if not heads or model.base_model_prefix not in dict(model.named_children()):
        raise UnknownHead(f"{name} does not have a base model and a head next to each other")
    hidden = torch.linspace(-1, 1, 3 * config.hidden_size).reshape(1, 3, -1)
    raw = torch.linspace(-60, 60, len(_KEPT) * config.vocab_size).reshape(1, len(_KEPT), -1)
    probe, head = copy.copy(model), _Head(raw)
    # The copy shares this dictionary with the model: setting a child of one would set it in both.
    probe._modules = {**model._modules, model.base_model_prefix: _Base(hidden), heads[0]: head}
    try:
        with torch.no_grad():
            output = type(model).forward(probe, input_ids=torch.zeros(1, 3).long(), logits_to_keep=torch.tensor(_KEPT))
            logits = output.logits
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise UnknownHead(f"the forward of {name} does not run in parts ({type(error).__name__})") from error
    if head.seen is None or not torch.equal(head.seen, hidden[:, _KEPT]):
        raise UnknownHead(f"{name} changes the hidden states before its head")
    ratio = (logits.flatten()[-1] / raw.flatten()[-1]).item()
    cap = getattr(config, "final_logit_softcapping", None)
    for candidate in (LogitMap(), LogitMap(scale=ratio), LogitMap(cap=cap)):
        expected = candidate(raw)
        if torch.equal(logits, expected):
            return candidate  # as most do
        if logits.shape == raw.shape and torch.allclose(logits, expected, rtol=1e-6, atol=1e-6):
            return candidate
    raise UnknownHead(f"what {name} does to its logits is neither a scale nor a soft cap")
