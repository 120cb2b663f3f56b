"""The heaviest micro-batch of a run and the model that reads it, on `meta`, built by the functions of a run itself;
`timeline.py` weighs it on fake tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from finetune.data.samples import Example, MediaKind
from finetune.data.samples import Sequence as TokenSequence
from finetune.engine import tensor_packed, tensor_parallel
from finetune.engine.split_trial import token_split_problem
from finetune.errors import UserError
from finetune.models.assemble import assemble
from finetune.models.attention import AttentionChoice, Kernels, attention_for, kernels, per_document
from finetune.models.head.chunked import HeadDevice
from finetune.models.moe import adapters_of, dispatch_tokens, experts_of
from finetune.models.packed_linear import linear_weights
from finetune.models.patches import replace_forward
from finetune.objectives import make_objective
from finetune.objectives.forward import ForwardPass
from finetune.objectives.objective import Objective, Term
from finetune.objectives.table import OBJECTIVES
from finetune.plan.images import SeenFile
from finetune.plan.shapes import shortened, skeleton, with_layers
from finetune.plan.stand_ins import EvenExchange, unpacked_product
from finetune.recipe import Recipe
from finetune.recipe.objective_settings import ObjectiveSettings, RewardObjective


@dataclass(frozen=True)
class HeaviestBatch:
    """The largest micro-batch of a run."""

    documents: tuple[int, ...]  # tokens of each
    targets: int  # supervised tokens
    images: tuple[tuple[SeenFile, ...], ...] = ()  # of each document; () without images

    @classmethod
    def of_rows(cls, rows: int, length: int, share: float = 1.0) -> HeaviestBatch:
        """`rows` rows of one document of `length` tokens, a `share` of them supervised."""
        return cls((length,) * rows, max(1, int(rows * (length - 1) * share)))


@dataclass(frozen=True)
class How:
    """Properties of an engine and a device that forward and backward depend on."""

    device: str = "cuda"
    capability: tuple[int, int] | None = (9, 0)  # None: AMD
    small: bool = False  # an accelerator with few GiB, by `is_small`
    casts_weights: bool = False  # gathered in the compute type (FSDP2)
    keeps_inputs_alone: bool = False  # linear layers without casts of their weights (ZeRO-3)
    gradients_there: bool = False  # of an earlier micro-batch, which are added to
    drops_gradients: bool = False  # each is freed as soon as its parameter has been stepped
    tensor: int = 1  # ranks that share matrices
    expert: int = 1  # ranks that share experts
    pipeline: int = 1  # ranks that share layers


class NotEstimated(UserError):
    """The memory of a recipe cannot be calculated from shapes, though the recipe can be trained."""


def examples_of(
    objective: ObjectiveSettings, batch: HeaviestBatch, tokens: Mapping[MediaKind, int] | None = None
) -> list[Example]:
    """Returns documents with targets at their ends; for a reward, each is a pair of answers of half its length. tokens:
    see `file_tokens`."""
    left, examples = batch.targets, []
    row = OBJECTIVES.get(objective.name)  # None: of a wing
    columns = {} if row is not None and row.averages_tokens else {"label": 0.0}
    for length, images in zip(batch.documents, batch.images or ((),) * len(batch.documents), strict=True):
        targets = min(length - 1, left)
        left -= targets
        lengths = (length // 2, length - length // 2) if isinstance(objective, RewardObjective) else (length,)
        sequences = [
            TokenSequence(np.zeros(n, dtype=np.int32), np.arange(n) >= n - min(n - 1, targets)) for n in lengths
        ]
        begin = 1
        for image in images:  # a token between two
            sequences[0].input_ids[begin : begin + image.tokens] = (tokens or {})[image.as_still]
            begin += image.tokens + 1
        examples.append(Example("", 1, 0, tuple(sequences), columns))
    return examples


def short_model(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the config of a timeline's model: a layer of each kind, and the first kind again, whose neighbours are
    layers on both sides."""
    short, kinds = shortened(config)
    count = len(set(kinds))
    return with_layers(config, [*map(kinds.index, range(count)), 0]) if count < len(kinds) else short


def kernels_at(device: str, capability: tuple[int, int] | None, requested: str = "auto") -> Kernels:
    """Returns the kernels of a device that this machine need not have: as `Kernels.here` on it, without packages that
    only some install, unless requested (`model.attention`)."""
    if device != "cuda":
        return Kernels()
    kernels = Kernels(capability, flash_kernels=capability is not None, triton=True)
    return replace(kernels, no_flash_3=None) if requested == "flash_attention_3" else kernels


def attention_at(recipe: Recipe, config: PretrainedConfig, how: How) -> AttentionChoice:
    """Returns the attention of a run on such a device, which this machine need not have, for fake tensors."""
    eager = recipe.model_copy(update={"train": recipe.train.model_copy(update={"compile": False})})
    choice = attention_for(eager, config, how.device, kernels_at(how.device, how.capability, recipe.model.attention))
    if choice.implementation == kernels.VARLEN:
        return replace(choice, prepare=partial(kernels.prepare_varlen, device="cpu"))
    if choice.implementation == kernels.FLEX:  # it keeps the same tensors as a kernel for each document
        return replace(choice, implementation=per_document.DOCUMENTS, prepare=per_document.prepare)
    return choice


def model_at(recipe: Recipe, config: PretrainedConfig, attention: AttentionChoice, how: How) -> tuple[Any, ForwardPass]:
    """Returns the wrapped model on `meta` and its forward pass, as a run makes them."""
    model = skeleton(recipe, config, attention)
    if recipe.quantization is not None:
        if recipe.lora is not None and recipe.lora.dora:
            raise NotEstimated("`lora.dora` on packed weights unpacks them for their norm, which only real weights can")
        packed = {id(parameter) for parameter, _ in linear_weights(model)}
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and id(module.weight) in packed:
                replace_forward(module, partial(unpacked_product, module), "unpacked product")
    settings = recipe.objective.model_copy(update={"router_aux_loss_coef": None})  # a number for each token and expert
    row = OBJECTIVES.get(settings.name)  # None: of a wing
    if settings.score_labels or (row is not None and row.reads_tokens_alone):
        objective = make_objective(settings, mtp_weight=recipe.mtp_weight)
    else:  # it reads more than the batch has here: the gradient of every token's loss
        objective = Objective(
            lambda outputs, _batch: {"loss": Term(outputs.token_losses.sum(), None, 1.0)}, differentiable=True
        )
    if how.device == "cpu":  # its activations are in host memory already
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"activation_offload": False})})
    wrapped = assemble(
        model,
        recipe,
        torch.device("cpu"),
        has_scores=bool(objective.num_scores),
        only_sums=objective.only_sums,
        emulates_fp8=how.device == "cpu",
        head_device=HeadDevice(how.device, how.small, recipe.model.kernels != "plain", how.tensor),
    )
    if how.keeps_inputs_alone:  # stage 3 gathers in hooks, with which adapters are not fused
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: None)
    if how.tensor > 1:
        group, splits = tensor_parallel.TensorGroup(None, 0, how.tensor), token_split_problem(config) is None
        shards = tensor_parallel.parallelize(model, group, splits_tokens=splits).shards
        tensor_packed.shard_scales(model, shards)
    if how.expert > 1:  # a rank keeps its experts, and tokens travel, as in `engine/expert_parallel.py`
        for path, experts in experts_of(model).items():
            for name, weight in list(experts.named_parameters(recurse=False)):
                own = torch.empty_like(weight[: len(weight) // how.expert])
                experts.register_parameter(name, torch.nn.Parameter(own, weight.requires_grad))
            dispatch_tokens(experts, EvenExchange(how.expert), adapters_of(model, path), 0)
    return wrapped, ForwardPass(attention, objective)


def fill(model: Any, dtype: torch.dtype | None = None) -> None:
    """Gives parameters and buffers on `meta` a place on the CPU, which takes no memory under a mode of fake tensors.
    Tied weights stay tied. dtype: of floating-point parameters; None: their own."""
    filled: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in filled:
                kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
                on_cpu = torch.empty(parameter.shape, dtype=kind)
                filled[id(parameter)] = torch.nn.Parameter(on_cpu, parameter.requires_grad)
            setattr(module, name, filled[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
