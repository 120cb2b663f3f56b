"""The heaviest micro-batch of a run: rows of its lengths, and the model that reads them, as an engine shows it.

On `meta`, by the functions that a run makes its own with; `timeline.py` weighs it on fake tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from finetune.data.samples import Example
from finetune.data.samples import Sequence as TokenSequence
from finetune.engine import tensor_parallel
from finetune.errors import UserError
from finetune.models.assemble import assemble
from finetune.models.attention import AttentionChoice, Kernels, attention_for, kernels, per_document
from finetune.models.head.chunked import rows_at_once
from finetune.models.loss_model import CausalLMWithLoss
from finetune.models.moe import adapters_of, dispatch_tokens, experts_of
from finetune.models.packed_linear import linear_weights
from finetune.models.patches import replace_forward
from finetune.objectives import make_objective, score_labels
from finetune.objectives.forward import ForwardPass
from finetune.objectives.objective import Objective, Term
from finetune.objectives.table import OBJECTIVES
from finetune.plan.shapes import shortened, skeleton, with_layers
from finetune.plan.stand_ins import EvenExchange, unpacked_product
from finetune.recipe import Recipe


@dataclass(frozen=True)
class HeaviestBatch:
    """The largest micro-batch of a run."""

    documents: tuple[int, ...]  # tokens of each
    targets: int  # supervised tokens
    images: tuple[tuple[int, ...], ...] = ()  # of each document, tokens of its images; (): none has any

    @classmethod
    def of_rows(cls, rows: int, length: int, share: float = 1.0) -> HeaviestBatch:
        """`rows` rows of one document of `length` tokens, a `share` of them supervised."""
        return cls((length,) * rows, max(1, int(rows * (length - 1) * share)))


@dataclass(frozen=True)
class How:
    """What of an engine a forward and a backward show."""

    device: str = "cuda"
    capability: tuple[int, int] = (9, 0)
    casts_weights: bool = False  # gathered in the compute type (FSDP2)
    keeps_inputs_alone: bool = False  # linear layers without casts of their weights (ZeRO-3)
    gradients_there: bool = False  # those of an earlier micro-batch, that are added to
    drops_gradients: bool = False  # each is stepped by and freed as soon as it is there
    tensor: int = 1  # ranks that share matrices
    expert: int = 1  # ranks that share experts


class NotEstimated(UserError):
    """What cannot be calculated from shapes, though it can be trained."""


# --- rows


def examples_of(recipe: Recipe, batch: HeaviestBatch, image_token: int = 0) -> list[Example]:
    """Returns documents with targets at their ends; for a reward, each is a pair of answers of half its length."""
    left, made = batch.targets, []
    columns = {} if OBJECTIVES[recipe.objective.name].averages_tokens else {"label": 0.0}
    for length, images in zip(batch.documents, batch.images or ((),) * len(batch.documents), strict=True):
        targets = min(length - 1, left)
        left -= targets
        lengths = (length // 2, length - length // 2) if recipe.objective.name == "reward" else (length,)
        sequences = [_document(one, min(one - 1, targets)) for one in lengths]
        begin = 1
        for count in images:  # a token between two
            sequences[0].input_ids[begin : begin + count] = image_token
            begin += count + 1
        made.append(Example("", 1, 0, tuple(sequences), columns))
    return made


def _document(length: int, targets: int) -> TokenSequence:
    return TokenSequence(np.zeros(length, dtype=np.int32), np.arange(length) >= length - targets)


# --- the model


def short_model(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the config of the model that a timeline is of: a layer of each kind, and the first kind again, whose
    neighbours are layers on both sides."""
    short, kinds = shortened(config)
    count = len(set(kinds))
    return with_layers(config, [*map(kinds.index, range(count)), 0]) if count < len(kinds) else short


def attention_at(recipe: Recipe, config: PretrainedConfig, how: How) -> AttentionChoice:
    """Returns the attention of a run on such a device, which this machine need not have, for fake tensors."""
    there = (
        Kernels(how.capability, flash_kernels=True, triton=True, no_flash_3=None) if how.device == "cuda" else Kernels()
    )
    eager = recipe.model_copy(update={"train": recipe.train.model_copy(update={"compile": False})})
    choice = attention_for(eager, config, how.device, there)
    if choice.implementation == kernels.VARLEN:
        return replace(choice, prepare=partial(kernels.prepare_varlen, device="cpu"))
    if choice.implementation == kernels.FLEX:  # it keeps the same tensors as a kernel for each document
        return replace(choice, implementation=per_document.DOCUMENTS, prepare=per_document.prepare)
    return choice


def model_at(recipe: Recipe, config: PretrainedConfig, attention: AttentionChoice, how: How) -> tuple[Any, ForwardPass]:
    """Returns the wrapped model on `meta`, and what calls it; as a run makes them."""
    model = skeleton(recipe, config, attention)
    if how.tensor > 1:
        tensor_parallel.parallelize(model, tensor_parallel.TensorGroup(None, 0, how.tensor))
    if recipe.quantization is not None:
        if recipe.lora is not None and recipe.lora.dora:
            raise NotEstimated("`lora.dora` on packed weights unpacks them for their norm, which only real weights can")
        _unpack_in_forwards(model)
    if how.expert > 1:
        _divide_experts(model, how.expert)
    settings = recipe.objective.model_copy(update={"router_aux_loss_coef": None})  # a number for each token and expert
    known = score_labels(settings) or OBJECTIVES[settings.name].reads_tokens_alone
    objective = make_objective(settings) if known else _any_tokens()
    if how.device == "cpu":  # whose activations are in host memory already
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"activation_offload": False})})
    has_scores = bool(objective.num_scores)
    wrapped = assemble(
        model,
        recipe,
        torch.device("cpu"),
        has_scores=has_scores,
        only_sums=objective.only_sums,
        emulates_fp8=how.device == "cpu",
    )
    if isinstance(wrapped, CausalLMWithLoss) and wrapped.choice.implementation != "plain":
        wrapped._rows = rows_at_once(config.get_text_config().vocab_size, how.device)
    return wrapped, ForwardPass(attention, objective)


def _unpack_in_forwards(model: Any) -> None:
    packed = {id(parameter) for parameter, _ in linear_weights(model)}
    for module in model.modules():
        if id(getattr(module, "weight", None)) in packed and isinstance(module, torch.nn.Linear):
            layer: Any = module
            forward = partial(unpacked_product, (layer.out_features, layer.in_features))
            replace_forward(layer, forward, "unpacked product")


def _divide_experts(model: Any, ranks: int) -> None:
    """Leaves a rank its experts, and lets tokens travel, as `engine/expert_parallel.py`."""
    for path, experts in experts_of(model).items():
        for name, weight in list(experts.named_parameters(recurse=False)):
            own = torch.empty_like(weight[: len(weight) // ranks])
            experts.register_parameter(name, torch.nn.Parameter(own, weight.requires_grad))
        dispatch_tokens(experts, EvenExchange(ranks), adapters_of(model, path), 0)


def _any_tokens() -> Objective:
    """Of objectives that read more than a batch has here: the gradient of every token's loss."""
    return Objective(lambda outputs, _batch: {"loss": Term(outputs.token_losses.sum(), None, 1.0)}, differentiable=True)


def fill(model: Any, dtype: torch.dtype | None = None) -> None:
    """Give what is on `meta` a place on the CPU, which under a mode of fake tensors has no memory. Tied weights stay
    tied. dtype: of floating-point parameters; None: their own."""
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
                made[id(parameter)] = torch.nn.Parameter(
                    torch.empty(parameter.shape, dtype=kind), parameter.requires_grad
                )
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
