"""Advantages: the reward of a sample less the baseline of its prompt, scaled.

Letters: P prompts of a step, G samples of each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from finetune.recipe.objective_settings import Grpo
from finetune.rl.policy import LOSSES

EPSILON = 1e-4  # added to standard deviations, as TRL has it; rewards are of the order of 1


def advantages(rewards: NDArray[np.float64], objective: Grpo) -> NDArray[np.float64]:  # (P, G)
    """Returns the advantages of a step's samples, in fp64. Samples whose group has equal rewards have 0."""
    loss, count = LOSSES[objective.loss], rewards.shape[1]
    baseline = rewards.mean(1, keepdims=True)
    if loss.baseline == "others":
        baseline = (rewards.sum(1, keepdims=True) - rewards) / (count - 1)
    scale, above = objective.scale_rewards or loss.scale, rewards - baseline
    above = np.where(has_variance(rewards)[:, None], above, 0.0)  # not a mean's rounding, which a scale would raise
    if scale == "group":
        return above / (rewards.std(1, ddof=1, keepdims=True) + EPSILON)
    if scale == "batch":
        return above / (rewards.std(ddof=1) + EPSILON)
    return above / (above.std(ddof=1) + EPSILON) if scale == "advantages" else above


def has_variance(rewards: NDArray[np.float64]) -> NDArray[np.bool_]:  # (P,)
    """Returns whether the samples of each prompt have different rewards: a prompt with equal ones teaches nothing."""
    return rewards.max(1) > rewards.min(1)
