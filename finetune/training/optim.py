"""Optimizers and learning-rate schedules by name. The engine decides which tensors a rank steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from finetune.engine.costs import Shard
from finetune.errors import UserError
from finetune.recipe.schema import Optimizer as OptimizerRecipe
from finetune.recipe.schema import Schedule
from finetune.utils import full_shape

NamedTensors = list[tuple[str, Tensor]]
Group = dict[str, Any]


def build_optimizers(recipe: OptimizerRecipe, named: NamedTensors) -> list[Optimizer]:
    """Returns one optimizer; for Muon also an AdamW for all but hidden matrices. Raises UserError if a package is
    missing.
    """
    return BUILDERS[recipe.name](recipe, named)


def decay_groups(named: NamedTensors, weight_decay: float) -> list[Group]:
    """Returns parameter groups: weight decay on matrices, none on biases, norms and other vectors (Loshchilov & Hutter
    2017, https://arxiv.org/abs/1711.05101, in the convention of GPT-2). Empty groups are left out: DeepSpeed rejects
    them.
    """
    matrices = [tensor for _, tensor in named if is_matrix(tensor)]
    vectors = [tensor for _, tensor in named if not is_matrix(tensor)]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def is_matrix(tensor: Tensor) -> bool:
    """Returns whether the full shape has two or more dimensions: under ZeRO-3 the tensor itself is flat or empty."""
    return len(full_shape(tensor)) >= 2


def _adamw(recipe: OptimizerRecipe, named: NamedTensors) -> list[Optimizer]:
    groups = decay_groups(named, recipe.weight_decay)
    return [torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=True)]


def _bitsandbytes(name: str) -> Callable[[OptimizerRecipe, NamedTensors], list[Optimizer]]:
    def build(recipe: OptimizerRecipe, named: NamedTensors) -> list[Optimizer]:
        try:
            import bitsandbytes
        except ImportError:
            raise UserError(
                f"`optimizer.name: {recipe.name}` needs bitsandbytes: pip install 'bitsandbytes>=0.49'"
            ) from None
        groups = decay_groups(named, recipe.weight_decay)
        return [getattr(bitsandbytes.optim, name)(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)]

    return build


def _sgd(recipe: OptimizerRecipe, named: NamedTensors) -> list[Optimizer]:
    groups = decay_groups(named, recipe.weight_decay)
    return [torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum)]


def _muon(recipe: OptimizerRecipe, named: NamedTensors) -> list[Optimizer]:
    """Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon/) for hidden matrices, AdamW for embeddings, head
    and vectors. The update is scaled to AdamW's size, so one `lr` serves both (Liu et al. 2025,
    https://arxiv.org/abs/2502.16982).
    """
    hidden = [(n, t) for n, t in named if _is_hidden(n, t.ndim)]
    rest = [(n, t) for n, t in named if all(t is not other for _, other in hidden)]
    muon = torch.optim.Muon(
        [tensor for _, tensor in hidden],
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        momentum=recipe.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, *(_adamw(recipe, rest) if rest else [])]


def _is_hidden(name: str, dimensions: int) -> bool:
    return dimensions == 2 and not any(word in name for word in ("embed", "lm_head", "score."))


BUILDERS: dict[str, Callable[[OptimizerRecipe, NamedTensors], list[Optimizer]]] = {
    "adamw": _adamw,
    "adamw_8bit": _bitsandbytes("AdamW8bit"),
    "paged_adamw": _bitsandbytes("PagedAdamW32bit"),
    "paged_adamw_8bit": _bitsandbytes("PagedAdamW8bit"),
    "muon": _muon,
    "sgd": _sgd,
}


_SMALL, _QUANTILES, _BLOCK = 4096, 2 * 256 * 4, 256  # bitsandbytes: elements kept in 32 bit; bytes of tables; a scale's
_PAGED = 100_000  # elements from which on bitsandbytes pages (get_state_buffer)


def state_bytes(recipe: OptimizerRecipe, shards: Sequence[Shard], device: str) -> tuple[int, int]:
    """Returns the bytes of the optimizers' state: on the device, and in memory that CUDA moves out (paged)."""
    steps = [(shard.numel, shard.weight) for shard in shards if shard.numel]
    paged = recipe.name.startswith("paged") and device == "cuda"
    if recipe.name == "sgd":
        return (sum(numel * weight.size for numel, weight in steps) if recipe.momentum else 0), 0
    if recipe.name == "muon":
        hidden = [(n, w) for n, w in steps if _is_hidden(w.name, len(w.shape))]
        rest = [(n, w) for n, w in steps if not _is_hidden(w.name, len(w.shape))]
        return sum(n * w.size for n, w in hidden) + sum(2 * n * w.size + 4 for n, w in rest), 0
    if recipe.name == "adamw":
        return sum(2 * numel * weight.size + 4 for numel, weight in steps), 0
    here = away = 0
    for numel, _ in steps:
        eighth = "8bit" in recipe.name and numel >= _SMALL
        states = 2 * numel * (1 if eighth else 4)
        here += 2 * 4 * -(-numel // _BLOCK) if eighth else 0
        if paged and numel >= _PAGED:
            away += states
        else:
            here += states
    tables = _QUANTILES if "8bit" in recipe.name and any(numel >= _SMALL for numel, _ in steps) else 0
    return here + tables, away


def lr_factor(schedule: Schedule, step: int, steps: int) -> float:
    """Returns the factor of `optimizer.lr` for step `step` (0-based) of `steps`.

    Warm-up is linear and starts above 0. The decay reaches `min_lr_ratio` after the last step, so no step has a rate
    of 0.
    """
    warmup = schedule.warmup(steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / (steps - warmup)
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
