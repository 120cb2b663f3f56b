"""Modules whose weights ZeRO-3 gathers once for all calls inside of them, of which ranks have different numbers:

    a head with adapters     once per chunk of positions
    a mixer                  once per document
    a tower of sound         once per clip (models/clips_alone.py), or per part of all clips (Qwen3-Omni)
    adapters on experts      read without a call of theirs, in the bytes of their files: peft's way is to add them to
                             plain weights

DeepSpeed reduces the gradients of such a leaf in torch's full backward hook. This one needs an input with a gradient
and a module that returns a tensor or a tuple: towers read features, which have none, and return transformers' outputs,
so that their gradients would stay where autograd put them. Here they are reduced in the backward of the input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from finetune.models.attention.mixers import is_mixer, with_positional_input
from finetune.models.clips_alone import is_run_alone, is_run_in_parts
from finetune.models.stored_layers import stored_stacks
from finetune.models.wrapped import trained_head


def set_leaves(model: Any) -> None:
    """Mark the leaves of a model, before DeepSpeed has it."""
    from deepspeed.utils import set_z3_leaf_module

    mixers = [module for module in model.modules() if is_mixer(module)]
    paths = (path.partition(".base_layer")[0] for path in stored_stacks(model) if "base_layer" in path)
    for module in (trained_head(model), *mixers, *_towers(model), *map(model.get_submodule, paths)):
        if next(module.children(), None) is not None:
            set_z3_leaf_module(module, True)
    trained = [tower for tower in _towers(model) if any(p.requires_grad for p in tower.parameters())]
    for module in (*mixers, *trained):
        module.register_forward_pre_hook(with_positional_input, with_kwargs=True)


def reduce_towers(model: Any) -> None:
    """Let DeepSpeed reduce the gradients of towers, after it has the model."""
    for tower in _towers(model):
        for reduce in _taken(tower._backward_hooks):
            tower.register_forward_pre_hook(_reducing(reduce), with_kwargs=True)


def _towers(model: Any) -> list[nn.Module]:
    return [module for module in model.modules() if is_run_alone(module) or is_run_in_parts(module)]


def _taken(hooks: Any) -> list[Any]:
    taken = list(hooks.values())
    hooks.clear()
    return taken


def _reducing(reduce: Callable[..., None]) -> Callable[..., Any]:
    """Returns a hook before a forward, inside of DeepSpeed's own: the backward frees the weights after it."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        features = args[0]
        if features.requires_grad and torch.is_grad_enabled():
            features = _AfterBackward.apply(features, lambda: reduce(module, (), ()))
        return (features, *args[1:]), kwargs

    return hook


class _AfterBackward(torch.autograd.Function):
    """An input as it is; its backward, the last of the module's, calls."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return gradient, None
