"""Distillation: the distribution of a teacher as the target of each supervised token."""

from __future__ import annotations

from finetune.data.batch import Batch
from finetune.models.head.divergence import Divergence
from finetune.models.wrapped import Outputs
from finetune.objectives.objective import Objective, Term, Terms, TokenRanks
from finetune.objectives.sft import mean_nll
from finetune.recipe.objective_settings import Distill


def distill(settings: Distill, evaluating: bool, token_ranks: TokenRanks) -> Objective:
    """The divergence from a teacher and the negative log-likelihood, as finetune/models/head/divergence.py has them.

    Evaluation measures the negative log-likelihood alone: held-out data need no teacher, and runs can be compared.
    """
    if evaluating:
        return mean_nll(token_ranks)

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        nll, divergence = outputs.details  # (S,) each
        return {
            "distill": Term(outputs.total, "target_tokens", 1.0),
            "nll": Term(nll.sum(), "target_tokens"),
            "divergence": Term(divergence.sum(), "target_tokens"),  # in nats, before T^2
        }

    jsd_beta = 0.5 if settings.jsd_beta is None else settings.jsd_beta
    loss = Divergence(
        *(settings.divergence, settings.temperature, jsd_beta, settings.nll_weight),
        sampled=settings.samples is not None,
    )
    return Objective(terms, token_loss=loss, num_details=2)
