"""The tensors of a run's model, without their values: each once, in the types that they will have.

A model of one layer of each kind is made on `meta`, by the code that a run makes its own with; the other layers repeat
them.
"""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from finetune.engine.sharding import final_norm
from finetune.engine.tensor_parallel import TensorGroup, parallelize
from finetune.models.attention import AttentionChoice
from finetune.models.quantized import linear_weights, state_tensors
from finetune.models.weights import Placement, load_model
from finetune.models.wrapped import output_head
from finetune.objectives import score_labels
from finetune.recipe import Recipe

_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True)
class Weight:
    """A parameter."""

    name: str
    shape: tuple[int, ...]
    size: int  # bytes of an element
    trains: bool
    layer: int | None  # the decoder layer it is in
    unit: str  # what is gathered with it: layer, embedding, tail (final norm and head, tied embedding), rest
    packed: int = 0  # weights in few bits that its elements hold; 0: it is as it is
    scales: int = 0  # bytes of what unpacks them
    expert: bool = False  # dimension 0 counts experts

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.size


@dataclass(frozen=True)
class Shapes:
    weights: tuple[Weight, ...]
    buffers: int  # bytes of those outside of layers: rotary frequencies
    buffers_of_layer: int
    layers: int


def shapes_of(recipe: Recipe, config: PretrainedConfig, tensor: int = 1) -> Shapes:
    """Returns the tensors of one rank of a tensor parallel group, of the full model where `tensor` is 1. Raises
    UserError as loading does."""
    return _shapes(_Key(recipe, config, tensor))


class _Key:
    """What shapes depend on, for a cache."""

    def __init__(self, recipe: Recipe, config: PretrainedConfig, tensor: int):
        self.recipe, self.config, self.tensor = recipe, config, tensor
        parts = {"model", "mode", "lora", "quantization", "tokens", "objective"}
        self.text = (
            f"{recipe.model_dump_json(include=parts)} {recipe.train.precision} {config.to_json_string()} {tensor}"
        )

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.text == other.text


@functools.lru_cache(maxsize=32)
def _shapes(key: _Key) -> Shapes:
    short, kinds = shortened(key.config)
    model = skeleton(key.recipe, short)
    if key.tensor > 1:
        parallelize(model, TensorGroup(None, 0, key.tensor))
    packed = {id(parameter): weights for parameter, weights in linear_weights(model)}
    scales = {
        id(module.weight): sum(tensor.nbytes for _, tensor in state_tensors(module))
        for module in model.modules()
        if isinstance(module, torch.nn.Linear)
    }
    units = _units(model)
    short_weights = [
        Weight(
            name=name,
            shape=tuple(parameter.shape),
            size=parameter.element_size(),
            trains=parameter.requires_grad,
            layer=int(found[1]) if (found := _LAYER.search(name)) else None,
            unit=units.get(id(parameter), "layer" if found else "rest"),
            packed=packed.get(id(parameter), 0),
            scales=scales.get(id(parameter), 0),
            expert=".experts." in name and parameter.ndim == 3,
        )
        for name, parameter in model.named_parameters()
    ]
    buffers = {name: buffer.nbytes for name, buffer in model.named_buffers()}
    of_layers = sum(size for name, size in buffers.items() if _LAYER.search(name))
    weights = tuple(_repeated(short_weights, kinds))
    return Shapes(weights, sum(buffers.values()) - of_layers, of_layers // len(set(kinds)), len(kinds))


def shortened(config: PretrainedConfig) -> tuple[PretrainedConfig, list[int]]:
    """Returns the config of a model with one layer of each kind, and for every layer of the full one which it is like.

    Where layers may differ in another way than `layer_types` says, the config itself.
    """
    text = config.get_text_config()
    count = text.num_hidden_layers
    types = list(getattr(text, "layer_types", None) or [""] * count)
    lists = [
        name for name, value in text.to_dict().items() if isinstance(value, list) and len(value) == count and count > 1
    ]
    if set(lists) - {"layer_types"} or any(getattr(text, name, None) for name in _UNEVEN) or len(types) != count:
        return config, list(range(count))
    kinds = list(dict.fromkeys(types))
    short = copy.deepcopy(config)
    of_text = short.get_text_config()
    of_text.num_hidden_layers = len(kinds)
    if getattr(text, "layer_types", None):
        of_text.layer_types = kinds
    return short, [kinds.index(one) for one in types]


_UNEVEN = (
    "first_k_dense_replace",
    "interleave_moe_layer_step",
    "mlp_only_layers",
    "moe_layer_freq",
    "is_heterogeneous",
)


def skeleton(recipe: Recipe, config: PretrainedConfig, attention: AttentionChoice | None = None) -> Any:
    """Returns the model of a run on `meta`: adapters, types and packed weights as they will be."""
    attention = attention or AttentionChoice("sdpa", "only shapes", True)
    return load_model(recipe, config, attention, Placement("meta", None), score_labels(recipe.objective))


def _units(model: Any) -> dict[int, str]:
    """Returns what is gathered together, by identity of parameters outside of layers; see `engine/sharding.py`."""
    embedding, head = model.get_input_embeddings(), output_head(model)
    tail = {id(p) for module in (final_norm(model), head) if module is not None for p in module.parameters()}
    table = {id(p) for p in embedding.parameters()}
    return {**dict.fromkeys(table, "tail" if table & tail else "embedding"), **dict.fromkeys(tail, "tail")}


def _repeated(short: list[Weight], kinds: list[int]) -> Iterator[Weight]:
    yield from (weight for weight in short if weight.layer is None)
    for index, kind in enumerate(kinds):
        for weight in short:
            if weight.layer == kind:
                name = _LAYER.sub(f"layers.{index}.", weight.name, count=1)
                yield replace(weight, name=name, layer=index)
