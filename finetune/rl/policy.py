"""Policy gradients: samples of the model, each weighted by its advantage, its reward less a baseline.

On-policy, with one optimizer step per rollout, the ratio of new to old probabilities is 1 with the gradient of the
log-probability. So every loss is linear in log-probabilities, and costs what a weighted negative log-likelihood costs:

    loss = - sum over all tokens of (token weight) * log p(token)  /  (count of the unit in the step)

If samples are used again (`rollouts.reuse`) or are of older weights (`rollouts.staleness`), the ratio r = p / p_old is
another, and its clip to [1 - low, 1 + high] bounds the step (Schulman et al. 2017, https://arxiv.org/abs/1707.06347,
equation 7); p_old is of the weights that the samples were drawn from:

    loss = - sum over all tokens of min(r * weight, clip(r) * weight)  /  (count of the unit in the step)

Letters: S targets of a micro-batch, E samples. A is the advantage of a sample, |o| its number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from finetune.data.batch import Batch
from finetune.models.head.token_loss import CooledTokenLoss
from finetune.models.wrapped import Outputs
from finetune.objectives.objective import KEPT, KEPT_TOKENS, Objective, Term, Terms, TokenRanks, sequence_sums
from finetune.objectives.sft import mean_nll
from finetune.recipe.objective_settings import Grpo
from finetune.recipe.schema import Rollouts

ADVANTAGE, SAMPLED = "advantage", "sampled_tokens"  # columns of a batch, (E,)
# Columns of targets, (S,): log-probabilities of the sampler, of the trainer's weights that the samples were drawn from,
# and of the initial weights; weights of `objective.correction`.
SAMPLER, OLD, INITIAL = "sampler_log_probs", "old_log_probs", "initial_log_probs"
CORRECTION = "correction_weights"
ROOM = "sampled_room"  # unit: `rollouts.max_new_tokens` for each sample


@dataclass(frozen=True)
class PolicyLossRow:
    """A loss: weight of a token, unit, the usual scale of the advantages, and what it does with ratios."""

    unit: str
    by_length: bool = False  # a token's weight is A / |o|, else A
    baseline: Literal["mean", "others"] = "mean"  # of the rewards of the prompt: all, or those of the other samples
    scale: Literal["none", "group", "batch", "advantages"] = "none"  # advantages: their own, over the step
    clip: tuple[float, float] = (0.2, 0.2)  # (low, high), as PPO and GRPO have it
    # clip: see above; sequence: the same of one ratio for all tokens of a sample, the geometric mean of theirs;
    # weight: a token's clipped ratio is a factor without gradient of its log-probability
    ratio: Literal["clip", "sequence", "weight"] = "clip"


LOSSES: dict[str, PolicyLossRow] = {
    # Mean over samples of the mean over tokens (Shao et al. 2024, https://arxiv.org/abs/2402.03300, equation 3).
    "grpo": PolicyLossRow("sequences", by_length=True, scale="group"),
    # Sum over tokens, divided by a constant: samples times their most tokens. No standard deviation (Liu et al. 2025,
    # https://arxiv.org/abs/2503.20783, section 3.2 and its listing).
    "dr_grpo": PolicyLossRow(ROOM),
    # Mean over all tokens of the step; a higher upper clip (Yu et al. 2025, https://arxiv.org/abs/2503.14476, equation
    # 8, section 3.1).
    "dapo": PolicyLossRow("target_tokens", scale="group", clip=(0.2, 0.28)),
    # Mean over samples of A log p(sample), A against the mean of the other samples (Ahmadian et al. 2024,
    # https://arxiv.org/abs/2402.14740, section 3.3). Ratios are clipped by token.
    "rloo": PolicyLossRow("sequences", baseline="others"),
    # Mean over all tokens; advantages against the prompt's mean, then divided by their standard deviation over the step
    # (Hu et al. 2025, https://arxiv.org/abs/2501.03262, with the baseline of a group).
    "reinforce_pp": PolicyLossRow("target_tokens", scale="advantages"),
    # Mean over all tokens of clip(r) A log p, clip(r) without gradient: no token loses its own (MiniMax 2025,
    # https://arxiv.org/abs/2506.13585, equations 4 and 5, without a lower bound). A ratio of 5 at most: Khatri et al.
    # 2025, https://arxiv.org/abs/2510.13786, as TRL's documentation recommends.
    "cispo": PolicyLossRow("target_tokens", scale="group", clip=(1.0, 4.0), ratio="weight"),
    # Mean over samples of the clipped ratio of the sample (Zheng et al. 2025, https://arxiv.org/abs/2507.18071,
    # equations 5 and 7, section 5.1).
    "gspo": PolicyLossRow("sequences", by_length=True, scale="group", clip=(3e-4, 4e-4), ratio="sequence"),
}


def is_off_policy(rollouts: Rollouts) -> bool:
    """Returns whether some steps train on samples of other weights than those that they change."""
    return rollouts.reuse > 1 or rollouts.staleness > 0


def grpo(settings: Grpo, evaluating: bool, token_ranks: TokenRanks, rollouts: Rollouts | None = None) -> Objective:
    """A loss of the table. Evaluation measures the negative log-likelihood of the rows' own answers."""
    if evaluating or rollouts is None:
        return mean_nll(token_ranks)
    loss, clips = LOSSES[settings.loss], is_off_policy(rollouts)
    clip, masks = settings.clip or loss.clip, settings.overlong == "mask"
    unit = KEPT_TOKENS if masks else "target_tokens"  # of metrics; the loss is divided by all targets

    def token_weights(batch: Batch) -> Tensor:  # (S,) fp64
        weights = batch.columns[ADVANTAGE]
        if loss.by_length:
            weights = weights / batch.columns[SAMPLED]
        weights = weights[batch.targets.sequence]  # a sample is one example and one sequence
        if CORRECTION in batch.target_columns:
            weights = weights * batch.target_columns[CORRECTION]
        return weights

    def kept(values: Tensor, batch: Batch) -> Tensor:  # (S,) -> (S,)
        """Returns values that are 0, without a gradient, at the targets of samples that are not kept."""
        if not masks:
            return values
        return torch.where(batch.columns[KEPT][batch.targets.sequence] > 0, values, 0.0)

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        (entropy,) = outputs.details  # (S,)
        log_probs = -outputs.token_losses.double()  # (S,)
        old = batch.target_columns.get(OLD, log_probs.detach())
        log_ratios = kept(log_probs - old, batch)
        own = {"policy": Term(outputs.total, loss.unit, 1.0)}
        if clips:
            policy, measured = clipped(loss, clip, log_probs, ratios(log_ratios, batch), token_weights(batch))
            own["policy"] = Term(policy.to(outputs.total.dtype), loss.unit, 1.0)
            measured = {name: kept(values.detach(), batch) for name, values in measured.items()}
            largest = measured["ratio"].amax() if len(log_probs) else log_probs.new_zeros(())  # no target in a dummy
            own |= {name: Term(values.sum(), unit) for name, values in measured.items()}
            own["ratio_max"] = Term(largest, largest=True)
        if settings.kl:
            away = kept(batch.target_columns[INITIAL] - log_probs, batch)
            # With the ratio its gradient is that of the divergence (DeepSeek-AI 2025, https://arxiv.org/abs/2512.02556).
            kl = (away.exp() - away - 1) * ratios(log_ratios, batch)
            penalty = kl / batch.columns[SAMPLED][batch.targets.sequence] if loss.by_length else kl
            own["kl_penalty"] = Term(penalty.sum().to(outputs.total.dtype), loss.unit, settings.kl)
            own["kl"] = Term(kl.detach().sum(), unit)
        return {
            **own,
            "entropy": Term(kept(entropy, batch).sum(), unit),
            # Mean of log(sampler / trainer) over the samples' tokens estimates KL(sampler, trainer).
            "sampler_kl": Term(kept(batch.target_columns[SAMPLER] - old, batch).sum(), unit),
        }

    def ratios(log_ratios: Tensor, batch: Batch) -> Tensor:  # (S,) -> (S,)
        if loss.ratio != "sequence":
            return log_ratios.exp()
        means = sequence_sums(log_ratios, batch, token_ranks) / batch.columns[SAMPLED]
        return means.exp()[batch.targets.sequence]

    return Objective(
        terms,
        token_loss=CooledTokenLoss(rollouts.temperature),
        token_weights=lambda batch: token_weights(batch).float(),
        differentiable=clips or settings.kl > 0,
        columns=(ADVANTAGE, SAMPLED, *([KEPT] if masks else [])),
        num_details=1,
    )


def clipped(
    loss: PolicyLossRow, clip: tuple[float, float], log_probs: Tensor, ratio: Tensor, weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss () of targets with ratios that are not 1, and what is measured of each. Other tensors: (S,)."""
    low, high = 1 - clip[0], 1 + clip[1]
    bounded = ratio.clamp(low, high)
    if loss.ratio == "weight":
        surrogate, below, above = bounded.detach() * weights * log_probs, ratio < low, ratio > high
    else:
        surrogate = torch.minimum(ratio * weights, bounded * weights)
        below, above = (ratio < low) & (weights < 0), (ratio > high) & (weights > 0)
    return -surrogate.sum(), {
        "clip_low": below,
        "clip_high": above,
        "ratio": ratio,
        # Schulman's k3 of KL(old, new), at the samples of the old: how far the weights have moved from them.
        "old_kl": ratio - 1 - ratio.log(),
    }
