"""From a loaded model to the module that a backend wraps: the same for a run, a plan and a check."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from finetune.models.activations import ActivationOffload
from finetune.models.attention import AttentionChoice
from finetune.models.base_config import dtypes
from finetune.models.base_model import Base
from finetune.models.dropout import drops, seed_layers
from finetune.models.experts_trial import choose_experts
from finetune.models.fused_layers import choose_kernels, fuse_layers
from finetune.models.head.chunked import HeadDevice, is_small
from finetune.models.loss_model import CausalLMWithLoss
from finetune.models.moe import Routers, compute_experts_in
from finetune.models.score_model import ScoreModel
from finetune.models.towers import TowerPart
from finetune.models.weights import (
    Placement,
    compute_in_fp8,
    fuse_adapters,
    keep_input_types,
    load_model,
    may_add_to_products,
)
from finetune.models.wrapped import WrappedModel
from finetune.recipe import Recipe
from finetune.utils import unwrap_peft


def skeleton(recipe: Recipe, base: Base, attention: AttentionChoice, labels: tuple[str, ...] = ()) -> Any:
    """Returns the model of a run on `meta`: adapters, types and packed weights as they will be. Its layers are not
    compiled: once they ran under a dispatch mode (`plan`), torch would leave the code of their forward alone for good.
    Arguments and errors as of `load_model`."""
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"compile": False})})
    # Adapters would be created with random numbers. Added tokens are counted, and packed weights have tables.
    alone = recipe.tokens is None and recipe.quantization is None
    with torch.device("meta") if alone else contextlib.nullcontext():
        return load_model(recipe, base, attention, Placement("meta", None), labels)


def assemble(
    model: Any,
    recipe: Recipe,
    device: torch.device,
    *,
    has_scores: bool,
    only_sums: bool,
    routers: Routers | None = None,
    schedule: str | None = None,
    gathers_in_forward: bool = False,
    vocabulary_ranks: int = 1,
    emulates_fp8: bool | None = None,
    head_device: HeadDevice | None = None,
) -> WrappedModel:
    """Returns the module that returns losses or scores, computing in the recipe's types; changes `model` in place.

    model: of `load_model`, before an engine divides it; has_scores: whether its head has a score for each label;
    only_sums: see `CausalLMWithLoss`; routers: those whose logits are recorded; schedule: of a pipeline;
    gathers_in_forward: whether all ranks must run the image tower in each forward; vocabulary_ranks: those that share
    embedding and head; emulates_fp8: None: unless the
    device is a GPU; head_device: the device that is planned for, in place of `device`. Raises UserError if a precision,
    kernels or a cross entropy are not possible.
    """
    types = dtypes(recipe)
    casts = types.compute != types.trained
    if casts:
        compute_experts_in(model, types.compute)
        keep_input_types(model)
    if recipe.train.precision == "fp8":
        compute_in_fp8(model, device.type != "cuda" if emulates_fp8 is None else emulates_fp8)
    if drops(recipe.lora, model.config):
        seed_layers(model)
    fuse_adapters(model, recipe.train.activation_checkpointing, schedule)
    again = recipe.train.activation_checkpointing == "selective" or schedule == "zero_bubble"
    if head_device is None:
        gib = torch.cuda.get_device_properties(device).total_memory / 2**30 if device.type == "cuda" else None
        head_device = HeadDevice(device.type, is_small(gib), recipe.model.kernels != "plain", vocabulary_ranks)
    choice = choose_kernels(recipe.model.kernels, head_device.type, recipe.train.compile, again)
    adds = may_add_to_products(recipe.train.activation_checkpointing, schedule) and not recipe.train.compile
    of_experts = choose_experts(
        model,
        recipe.model.kernels,
        device,
        types.compute,
        device_type=head_device.type,
        may_group_adapters=adds,
    )
    of_layers = fuse_layers(model, unwrap_peft(model).config, choice)
    surroundings: dict[str, Any] = {
        "device_type": device.type,
        "autocast": types.compute if casts else None,
        "offload": ActivationOffload(device) if recipe.train.activation_offload else None,
        "routers": routers,
        "kernels": f"{of_layers}; {of_experts}" if of_experts else of_layers,
    }
    if has_scores:
        return ScoreModel(model, **surroundings)
    kinds = recipe.data.media_kinds
    images = TowerPart(model, gathers_in_forward, kinds) if recipe.model.train is not None else None
    return CausalLMWithLoss(
        model, recipe.model.cross_entropy, only_sums, head_device=head_device, images=images, **surroundings
    )
