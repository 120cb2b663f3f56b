"""Objectives on pairs of answers to one prompt: the chosen one first, then the rejected one.

Letters: D sequences, E pairs, S targets. L is the log-probability of an answer's targets, r that of the policy minus
that of the reference, h = r(chosen) - r(rejected).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from finetune.data.batch import Batch
from finetune.models.loss_model import Outputs
from finetune.objectives.objective import Objective, Term, Terms, TokenRanks, sequence_log_probs
from finetune.recipe.schema import Objective as Settings

REFERENCE = "reference_log_probs"  # column of a batch, (D,)


def dpo(settings: Settings, evaluating: bool, token_ranks: TokenRanks) -> Objective:
    """Direct preference optimisation (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, equation 7)."""
    beta = settings.value("beta")

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        policy = sequence_log_probs(outputs, batch, token_ranks)  # (D,)
        rewards = beta * (policy - batch.columns[REFERENCE])
        chosen, rejected = pairs(rewards)
        losses = -logsigmoid(chosen - rejected)  # (E,)
        means = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margin": chosen - rejected,
            "rewards/accuracy": (chosen > rejected).to(chosen.dtype),
        }
        total = token_ranks.share(losses.sum()).to(outputs.token_losses.dtype)
        return {
            "dpo": Term(total, "examples", 1.0),
            **{name: Term(token_ranks.share(each.detach().sum()), "examples") for name, each in means.items()},
        }

    return Objective(terms, differentiable=True, columns=(REFERENCE,))


def pairs(per_sequence: Tensor) -> tuple[Tensor, Tensor]:  # (D,) -> (E,), (E,)
    """Returns the values of the chosen and of the rejected answers."""
    chosen, rejected = per_sequence.view(-1, 2).unbind(1)
    return chosen, rejected
