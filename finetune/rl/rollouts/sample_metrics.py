"""Metrics of samples and their rewards: of a step, and of the held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from finetune.rl.rollouts.advantages import has_variance
from finetune.rl.rollouts.records import Sample


def measured_corrections(weights: Sequence[NDArray[np.float64]]) -> dict[str, float]:
    """Returns the mean of the correction's weights over the tokens of a batch, and the share that is 0."""
    if not weights:
        return {}
    each = np.concatenate(weights)
    return {"correction/weight": float(each.mean()), "correction/masked": float((each == 0).mean())}


def measured(samples: Sequence[Sample], rewards: NDArray[np.float64]) -> dict[str, float]:
    """Returns the metrics of a step's rollouts. rewards: (P, G), weighted sums.

    pass@G/<name>: share of prompts with a sample that has 1, if this reward has only the values 0 and 1; pass@1/<name>:
    share of samples.
    """
    finite = [float(margin) for sample in samples for margin in sample.margins if np.isfinite(margin)]
    line = {
        "completion_tokens": float(np.mean([sample.num_sampled for sample in samples])),
        "truncated": float(np.mean([sample.is_truncated for sample in samples])),
        **({"margin": min(finite)} if finite else {}),
    }
    if turns := [sample.turns for sample in samples if sample.turns is not None]:
        line["turns"] = float(np.mean([len(one.spans) for one in turns]))
        line["tool_calls"] = float(np.mean([one.calls for one in turns]))
        line["malformed_calls"] = float(sum(one.malformed_calls for one in turns))
        line["out_of_turns"] = float(np.mean([one.ended == "max_turns" for one in turns]))
        line["environment_failures"] = float(sum(one.failure is not None for one in turns))
        line["environment_timeouts"] = float(sum(one.failure == "timeout" for one in turns))
    if samples[0].reward.by_name:
        line["reward"] = float(rewards.mean())
        line["zero_variance"] = float(1 - has_variance(rewards).mean())  # share of prompts that teach nothing
    for name in samples[0].reward.by_name:
        values = [sample.reward.by_name[name] for sample in samples]
        answered = [value for value in values if value is not None]
        if answered:
            line[f"reward/{name}"] = float(np.mean(answered))
        if len(answered) < len(values):
            line[f"reward_failures/{name}"] = float(len(values) - len(answered))
        if set(answered) <= {0.0, 1.0}:
            right = np.array([value == 1.0 for value in values]).reshape(rewards.shape)
            line[f"pass@1/{name}"] = float(right.mean())
            line[f"pass@{rewards.shape[1]}/{name}"] = float(right.any(1).mean())
    return line
