"""Bytes that a run keeps between its steps, on one rank, as its engine shards them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from finetune.engine.launch import Launch
from finetune.models.attention.choice import AttentionChoice
from finetune.models.weights import Placement, load_model
from finetune.objectives import score_labels
from finetune.recipe import Recipe


@dataclass(frozen=True)
class State:
    persistent: dict[str, int]  # bytes on the device: weights, gradients, optimizer state
    host: int  # bytes of this process in host memory
    disk: int
    layers: int  # decoder layers of this rank

    @property
    def device_bytes(self) -> int:
        return sum(self.persistent.values())


def skeleton(recipe: Recipe, config: PretrainedConfig) -> Any:
    """Returns the model of a run on `meta`: adapters and types as they will be, frozen weights not yet in 4 bits."""
    attention = AttentionChoice("sdpa", "only shapes", True)
    return load_model(recipe, config, attention, Placement("meta", None), score_labels(recipe.objective))


def state_of(recipe: Recipe, config: PretrainedConfig, launch: Launch, rank: int, device: str) -> State:
    """Returns what `rank` keeps. device: of the compute, cuda or cpu."""
    model = skeleton(recipe, config)
    shards = launch.parallelism.shard if launch.kind != "replicated" else 1
    weights = gradients = optimizer = 0
    for parameter in _unique(model):
        numel = math.ceil(parameter.numel() / shards)
        weights += numel * parameter.element_size()
        if parameter.requires_grad:
            gradients += numel * parameter.element_size()
            optimizer += numel * 2 * 4
    layers = len(list(_layers(model)))
    return State({"weights": weights, "gradients": gradients, "optimizer state": optimizer}, 0, 0, layers)


def _unique(model: Any) -> Iterator[Tensor]:
    yield from model.parameters()


def _layers(model: Any) -> Iterator[torch.nn.Module]:
    from finetune.utils import unwrap_peft

    yield from unwrap_peft(model).base_model.layers
