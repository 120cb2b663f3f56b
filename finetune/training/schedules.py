"""Learning rate over steps, as a multiple of `optimizer.lr`. Pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from finetune.recipe.schema import Schedule


def lr_factor(schedule: Schedule, step: int, steps: int) -> float:
    """The factor for optimizer step `step` (0-based) of `steps`.

    Warm-up is linear and never 0. The decay reaches `min_lr_ratio` where the run ends, after its last step: no step is
    spent at a rate of 0.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    progress = (step - schedule.warmup_steps) / (steps - schedule.warmup_steps)
    return SHAPES[schedule.name](progress, schedule)


def _constant(progress: float, schedule: Schedule) -> float:
    return 1.0


def _linear(progress: float, schedule: Schedule) -> float:
    return 1.0 - (1.0 - schedule.min_lr_ratio) * progress


def _cosine(progress: float, schedule: Schedule) -> float:
    """Loshchilov & Hutter 2016, https://arxiv.org/abs/1608.03983."""
    low = schedule.min_lr_ratio
    return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _wsd(progress: float, schedule: Schedule) -> float:
    """Warm-up, stable, decay: full rate, then linear over the last `decay_ratio` of the steps after warm-up."""
    if schedule.decay_ratio == 0.0:
        return 1.0
    into_decay = max(0.0, progress - (1.0 - schedule.decay_ratio)) / schedule.decay_ratio
    return _linear(into_decay, schedule)


SHAPES: dict[str, Callable[[float, Schedule], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _wsd,
}
