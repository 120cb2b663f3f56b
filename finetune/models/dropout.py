"""Random numbers of dropout, as a function of (seed, step, micro-batch, decoder layer): the same masks on whatever
process a micro-batch runs, and in a pipeline stage that has no layers before its own."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from finetune.models.config import active_dropouts
from finetune.models.patches import mix_in
from finetune.recipe.schema import Lora

_LAYER_BITS = 12  # of a seed: more than `MAX_LAYERS`


def drops(lora: Lora | None, config: PretrainedConfig) -> bool:
    """Returns whether dropout is drawn in each forward, so that rows per device change the result."""
    return bool(lora and lora.dropout) or any(True for _ in active_dropouts(config))


def seed_micro_batch(seed: int, step: int, index: int) -> None:
    """Seeds the dropout of a micro-batch. index: global, of the step."""
    seed_generators(((seed * 1_000_003 + step) * 1_000_003 + index << _LAYER_BITS) & (2**63 - 1))


def seed_generators(seed: int) -> None:
    """Seeds the generators of the CPU and of CUDA devices in use, as torch.manual_seed does; that also formats a stack
    trace for each kind of device that this process has not started: 0.3 ms, in each layer with dropout."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def seed_layers(model: Any) -> None:
    """Let each decoder layer of a transformers or peft model seed its own dropout, by its number and the micro-batch's
    seed."""
    # transformers' models declare in it what their decoder layers are.
    layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    for number, layer in enumerate(layers):
        layer.number_for_dropout = number
        mix_in(layer, _Seeding, "dropout of a layer")


class _Seeding:
    """Mixed into the class of a decoder layer, around activation checkpointing and `torch.compile`: a recomputation
    begins with the random state that the first computation had."""

    number_for_dropout: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self
        if layer.training:
            of_micro_batch = torch.initial_seed() >> _LAYER_BITS << _LAYER_BITS
            seed_generators(of_micro_batch | self.number_for_dropout + 1)
        return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]  (mixed into)
