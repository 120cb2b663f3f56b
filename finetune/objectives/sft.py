"""Objectives on single tokens.

Letters: S targets of a micro-batch.
"""

from __future__ import annotations

import torch

from finetune.data.batch import Batch
from finetune.models.head import TokenLoss
from finetune.models.wrapped import Outputs
from finetune.objectives.objective import Objective, Term, Terms, TokenRanks
from finetune.recipe.objective_settings import Focal, Sft


def sft(settings: Sft, evaluating: bool, token_ranks: TokenRanks) -> Objective:
    """Supervised fine-tuning: the mean negative log-likelihood of the targets.

    Evaluation leaves out z-loss and label smoothing, so that runs can be compared.
    """

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        return {"nll": Term(outputs.total, "target_tokens", 1.0)}

    token_loss = TokenLoss() if evaluating else TokenLoss(settings.z_loss, settings.label_smoothing)
    return Objective(terms, token_loss=token_loss)


def mean_nll(token_ranks: TokenRanks) -> Objective:
    """Returns what evaluations of every objective on tokens measure."""
    return sft(Sft(), True, token_ranks)


def focal(settings: Focal, evaluating: bool, token_ranks: TokenRanks) -> Objective:
    """Focal loss: tokens that the model predicts well count less, (1 - p)^gamma * -log p (Lin et al. 2017,
    https://arxiv.org/abs/1708.02002, equation 4). Evaluation measures the plain negative log-likelihood."""
    gamma = settings.gamma

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        nll = outputs.token_losses  # (S,)
        others = -torch.expm1(-nll)  # 1 - p, with all its digits; 0 or less if p is rounded to 1
        is_certain = others <= 0
        # The slope of (1 - p)^gamma is infinite at p = 1 if gamma < 1, and 0 times it no number. In the limit, that of
        # the product is 0^gamma, whatever gamma is.
        factor = torch.where(is_certain, 0.0**gamma, torch.where(is_certain, 1.0, others) ** gamma)
        focal_sum = (factor * nll).sum()
        return {"focal": Term(focal_sum, "target_tokens", 1.0), "nll": Term(nll.detach().sum(), "target_tokens")}

    return mean_nll(token_ranks) if evaluating else Objective(terms, differentiable=True)
