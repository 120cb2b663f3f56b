"""Policy gradients: samples of the model, each weighted by its advantage, its reward less a baseline.

On-policy, with one optimizer step per rollout, the ratio of new to old probabilities is 1 with the gradient of the
log-probability. So every loss is linear in log-probabilities, and costs what a weighted negative log-likelihood costs:

    loss = - sum over all tokens of (token weight) * log p(token)  /  (count of the unit in the step)

Letters: S targets of a micro-batch, E samples. A is the advantage of a sample, |o| its number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from finetune.data.batch import Batch
from finetune.models.head.token_loss import CooledTokenLoss
from finetune.models.wrapped import Outputs
from finetune.objectives.objective import Objective, Term, Terms, TokenRanks
from finetune.objectives.sft import sft
from finetune.recipe.schema import ObjectiveSettings as Settings
from finetune.recipe.schema import Rollouts

ADVANTAGE, SAMPLED = "advantage", "sampled_tokens"  # columns of a batch, (E,)
SAMPLER = "sampler_log_probs"  # column of targets, (S,)
ROOM = "sampled_room"  # unit: `rollouts.max_new_tokens` for each sample


@dataclass(frozen=True)
class PolicyLossRow:
    """A loss: weight of a token, unit, and the usual scale of the advantages."""

    unit: str
    by_length: bool = False  # a token's weight is A / |o|, else A
    baseline: Literal["mean", "others"] = "mean"  # of the rewards of the prompt: all, or those of the other samples
    scale: Literal["none", "group", "batch", "advantages"] = "none"  # advantages: their own, over the step


LOSSES: dict[str, PolicyLossRow] = {
    # Mean over samples of the mean over tokens (Shao et al. 2024, https://arxiv.org/abs/2402.03300, equation 3).
    "grpo": PolicyLossRow("sequences", by_length=True, scale="group"),
    # Sum over tokens, divided by a constant: samples times their most tokens. No standard deviation (Liu et al. 2025,
    # https://arxiv.org/abs/2503.20783, section 3.2 and its listing).
    "dr_grpo": PolicyLossRow(ROOM),
    # Mean over all tokens of the step (Yu et al. 2025, https://arxiv.org/abs/2503.14476, equation 8).
    "dapo": PolicyLossRow("target_tokens", scale="group"),
    # Mean over samples of A log p(sample), A against the mean of the other samples (Ahmadian et al. 2024,
    # https://arxiv.org/abs/2402.14740, section 3.3).
    "rloo": PolicyLossRow("sequences", baseline="others"),
    # Mean over all tokens; advantages against the prompt's mean, then divided by their standard deviation over the step
    # (Hu et al. 2025, https://arxiv.org/abs/2501.03262, with the baseline of a group).
    "reinforce_pp": PolicyLossRow("target_tokens", scale="advantages"),
}


def grpo(settings: Settings, evaluating: bool, token_ranks: TokenRanks, rollouts: Rollouts | None = None) -> Objective:
    """A loss of the table. Evaluation measures the negative log-likelihood of the rows' own answers."""
    if evaluating or rollouts is None:
        return sft(settings, evaluating, token_ranks)
    loss = LOSSES[settings.value("loss")]

    def token_weights(batch: Batch) -> Tensor:  # (S,)
        weights = batch.columns[ADVANTAGE]
        if loss.by_length:
            weights = weights / batch.columns[SAMPLED]
        return weights[batch.targets.sequence].float()  # a sample is one example and one sequence

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        (entropy,) = outputs.details  # (S,)
        log_probs = -outputs.token_losses.detach().double()
        return {
            "policy": Term(outputs.total, loss.unit, 1.0),
            "entropy": Term(entropy.sum(), "target_tokens"),
            # Mean of log(sampler / trainer) over the samples' tokens estimates KL(sampler, trainer).
            "sampler_kl": Term((batch.target_columns[SAMPLER] - log_probs).sum(), "target_tokens"),
        }

    return Objective(
        terms,
        token_loss=CooledTokenLoss(rollouts.temperature),
        token_weights=token_weights,
        columns=(ADVANTAGE, SAMPLED),
        num_details=1,
    )
