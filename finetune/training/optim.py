"""Optimizers and learning-rate schedules by name. The engine decides which tensors a rank steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from finetune.engine.costs import Shard
from finetune.engine.muon import Muon
from finetune.engine.optimizer_step import OF_MEDIA, hold_back_idle_groups
from finetune.errors import UserError
from finetune.models.parameter_roles import ParameterRoles
from finetune.recipe.schema import Optimizer as OptimizerRecipe
from finetune.recipe.schema import Schedule
from finetune.utils import full_shape

NamedTensors = list[tuple[str, Tensor]]
Group = dict[str, Any]
Builder = Callable[[OptimizerRecipe, ParameterRoles, NamedTensors], list[Optimizer]]


def build_optimizers(recipe: OptimizerRecipe, roles: ParameterRoles, named: NamedTensors) -> list[Optimizer]:
    """Returns one optimizer; for Muon also an AdamW for all but hidden matrices. Raises UserError if a package is
    missing.

    roles: by the names in `named`.
    """
    optimizers = BUILDERS[recipe.name](recipe, roles, named)
    if any(name in roles.of_media for name, _ in named):
        for optimizer in optimizers:
            hold_back_idle_groups(optimizer)
    return optimizers


def decay_groups(roles: ParameterRoles, named: NamedTensors, weight_decay: float) -> list[Group]:
    """Returns parameter groups: weight decay on matrices, none on biases, norms and other vectors (Loshchilov & Hutter
    2017, https://arxiv.org/abs/1711.05101, in the convention of GPT-2); each tower and its projector separately,
    because steps without its files leave them out. Empty groups are left out: DeepSpeed rejects them.
    """
    groups: list[Group] = []
    kinds = {name: roles.of_media.get(name, ()) for name, _ in named}
    for of_media in sorted(dict.fromkeys(kinds.values())):  # the language model first
        of_part = [tensor for name, tensor in named if kinds[name] == of_media]
        for matrices, decay in ((True, weight_decay), (False, 0.0)):
            if params := [tensor for tensor in of_part if is_matrix(tensor) == matrices]:
                groups.append({"params": params, "weight_decay": decay, OF_MEDIA: of_media})
    return groups


def is_matrix(tensor: Tensor) -> bool:
    """Returns whether the full shape has two or more dimensions: under ZeRO-3 the tensor itself is flat or empty."""
    return len(full_shape(tensor)) >= 2


def _adamw(recipe: OptimizerRecipe, roles: ParameterRoles, named: NamedTensors) -> list[Optimizer]:
    groups = decay_groups(roles, named, recipe.weight_decay)
    return [torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=True)]


def _bitsandbytes(name: str) -> Builder:
    def build(recipe: OptimizerRecipe, roles: ParameterRoles, named: NamedTensors) -> list[Optimizer]:
        try:
            import bitsandbytes
        except ImportError:
            raise UserError(
                f"`optimizer.name: {recipe.name}` needs bitsandbytes. Fix: pip install 'bitsandbytes>=0.49'"
            ) from None
        groups = decay_groups(roles, named, recipe.weight_decay)
        return [getattr(bitsandbytes.optim, name)(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)]

    return build


def _sgd(recipe: OptimizerRecipe, roles: ParameterRoles, named: NamedTensors) -> list[Optimizer]:
    groups = decay_groups(roles, named, recipe.weight_decay)
    return [torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum)]


def _muon(recipe: OptimizerRecipe, roles: ParameterRoles, named: NamedTensors) -> list[Optimizer]:
    """Returns Muon for hidden matrices, AdamW for embeddings, head and vectors. Muon's update has AdamW's size, so one
    `lr` serves both (Liu et al. 2025, https://arxiv.org/abs/2502.16982)."""
    names = frozenset(name for name, tensor in named if len(full_shape(tensor)) == 2) - roles.tables
    hidden = [(name, tensor) for name, tensor in named if name in names]
    rest = [(name, tensor) for name, tensor in named if name not in names]
    groups = decay_groups(roles, hidden, recipe.weight_decay) or [{"params": []}]  # a rank may have no row of any
    muon = Muon(groups, names, recipe.lr, recipe.weight_decay, recipe.momentum)
    return [muon, *(_adamw(recipe, roles, rest) if rest else [])]


BUILDERS: dict[str, Builder] = {
    "adamw": _adamw,
    "adamw_8bit": _bitsandbytes("AdamW8bit"),
    "paged_adamw": _bitsandbytes("PagedAdamW32bit"),
    "paged_adamw_8bit": _bitsandbytes("PagedAdamW8bit"),
    "muon": _muon,
    "sgd": _sgd,
}


_SMALL, _QUANTILES, _BLOCK = 4096, 2 * 256 * 4, 256  # bitsandbytes: elements in 32 bits; bytes of tables; a scale's
_PAGED = 100_000  # minimum elements that bitsandbytes pages (get_state_buffer)


def state_bytes(recipe: OptimizerRecipe, shards: Sequence[Shard], device: str) -> tuple[int, int]:
    """Returns the bytes of the optimizers' state: on the device, and in paged memory."""
    steps = [(shard.numel, shard.weight) for shard in shards if shard.numel]
    paged = recipe.name.startswith("paged") and device == "cuda"
    if recipe.name == "sgd":
        return (sum(numel * weight.size for numel, weight in steps) if recipe.momentum else 0), 0
    if recipe.name == "muon":
        sizes = [(numel * weight.size, weight.is_hidden_matrix) for numel, weight in steps]
        return sum(size if hidden else 2 * size + 4 for size, hidden in sizes), 0
    if recipe.name == "adamw":
        return sum(2 * numel * weight.size + 4 for numel, weight in steps), 0
    assert recipe.name in ("adamw_8bit", "paged_adamw", "paged_adamw_8bit"), recipe.name  # bitsandbytes
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


def _linear(progress: float, schedule: Schedule) -> float:
    return 1.0 - (1.0 - schedule.min_lr_ratio) * progress


def _cosine(progress: float, schedule: Schedule) -> float:
    """Cosine decay: Loshchilov & Hutter 2016, https://arxiv.org/abs/1608.03983."""
    low = schedule.min_lr_ratio
    return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _wsd(progress: float, schedule: Schedule) -> float:
    """Warm-up, stable, decay: full rate, then linear over the last `decay_ratio` of the steps after warm-up."""
    if schedule.decay_ratio == 0.0:
        return 1.0
    into_decay = max(0.0, progress - (1.0 - schedule.decay_ratio)) / schedule.decay_ratio
    return _linear(into_decay, schedule)


SHAPES: dict[str, Callable[[float, Schedule], float]] = {
    "constant": lambda progress, schedule: 1.0,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _wsd,
}
