"""Optimizers by name, over whatever tensors the engine says this rank steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from finetune.errors import UserError
from finetune.recipe.schema import Optimizer as OptimizerRecipe
from finetune.utils import full_shape

NamedTensors = list[tuple[str, Tensor]]
Group = dict[str, Any]


def build_optimizers(recipe: OptimizerRecipe, named: NamedTensors) -> list[Optimizer]:
    """One optimizer, or Muon with an AdamW for what is not a hidden matrix. Raises UserError where a package is
    missing.
    """
    return BUILDERS[recipe.name](recipe, named)


def decay_groups(named: NamedTensors, weight_decay: float) -> list[Group]:
    """Matrices decay; biases, norms and other vectors do not (Loshchilov & Hutter 2017, https://arxiv.org/abs/1711.05101,
    as practised since GPT-2). Empty groups are left out: DeepSpeed does not take them."""
    matrices = [tensor for _, tensor in named if is_matrix(tensor)]
    vectors = [tensor for _, tensor in named if not is_matrix(tensor)]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def is_matrix(tensor: Tensor) -> bool:
    """By the full shape: under ZeRO-3 the tensor itself is flat or empty."""
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
    hidden = [(n, t) for n, t in named if t.ndim == 2 and "embed" not in n and "lm_head" not in n]
    rest = [(n, t) for n, t in named if all(t is not other for _, other in hidden)]
    muon = torch.optim.Muon(
        [tensor for _, tensor in hidden],
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        momentum=recipe.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, *(_adamw(recipe, rest) if rest else [])]


BUILDERS: dict[str, Callable[[OptimizerRecipe, NamedTensors], list[Optimizer]]] = {
    "adamw": _adamw,
    "adamw_8bit": _bitsandbytes("AdamW8bit"),
    "paged_adamw": _bitsandbytes("PagedAdamW32bit"),
    "paged_adamw_8bit": _bitsandbytes("PagedAdamW8bit"),
    "muon": _muon,
    "sgd": _sgd,
}
