"""Weights of sampled tokens for a sampler that is not the trainer, such as an inference server or 16-bit decoding.

Samples are drawn from the sampler's distribution q, and the gradient is wanted under the trainer's p. With the ratio
r = p / q of a token, or R, the product of all ratios of a sample:

    tis             min(max(r, low), high)                        [0, 2]    Yao et al. 2025, https://fengyao.notion.site/off-policy-rl
    icepop          r if low <= r <= high, else 0                 [0.5, 5]  Ling team 2025, https://arxiv.org/abs/2510.18855
    sequence_mask   R for all of its tokens if low <= R <= high,  [0, 3]    as TRL 1.16's default, grpo_trainer.py
                    else 0
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from finetune.recipe.objective_settings import Grpo

BOUNDS: dict[str, tuple[float, float]] = {"tis": (0.0, 2.0), "icepop": (0.5, 5.0), "sequence_mask": (0.0, 3.0)}


def correction_weights(
    trainer: NDArray[np.float64], sampler: NDArray[np.float64], objective: Grpo
) -> NDArray[np.float64]:  # (n,), (n,) -> (n,)
    """Returns the weight of each of a sample's n tokens from its log-probabilities under both."""
    kind = objective.correction
    assert kind is not None
    low, high = objective.correction_bounds or BOUNDS[kind]
    log_ratio = trainer - sampler
    if kind == "sequence_mask":
        log_ratio = np.full_like(log_ratio, log_ratio.sum())
    with np.errstate(over="ignore"):  # beyond every bound
        ratio = np.exp(log_ratio)
    if kind == "tis":
        return ratio.clip(low, high)
    return np.where((ratio >= low) & (ratio <= high), ratio, 0.0)
