"""The tensors of a run's model without their values, each once, in the types of the run.

A model with one layer of each kind is made on `meta` by the code of a run; the other layers repeat them.
"""

from __future__ import annotations

import copy
import functools
import re
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig

from finetune.engine.costs import Costs, Shapes, Weight, costs_of
from finetune.engine.launch import Launch
from finetune.engine.sharding import final_norm
from finetune.engine.split_trial import token_split_problem
from finetune.engine.tensor_group import ShardedParameters, TensorGroup
from finetune.engine.tensor_packed import PackedShard, shard_scales
from finetune.engine.tensor_parallel import parallelize
from finetune.models import assemble
from finetune.models.attention import AttentionChoice
from finetune.models.base_model import Base
from finetune.models.moe import stacked_experts
from finetune.models.mtp import head_of, in_head
from finetune.models.packed_linear import linear_weights, state_tensors
from finetune.models.parameter_roles import parameter_roles
from finetune.models.text_part import name_body
from finetune.models.towers import tower_modules
from finetune.models.wrapped import output_head
from finetune.recipe import Recipe
from finetune.training.optim import state_bytes
from finetune.utils import unwrap_peft

_LAYER = re.compile(r"\blayers\.(\d+)\.")


class CacheKey:
    """A recipe's model, some of its keys of `train`, and other values, for a cache of what depends on these alone."""

    def __init__(self, recipe: Recipe, config: PretrainedConfig, train: set[str], *others: Any):
        self.recipe, self.config, self.others = recipe, config, others
        parts = {"model", "mode", "lora", "quantization", "tokens", "objective"}
        settings = recipe.model_dump_json(include=parts), recipe.train.model_dump_json(include=train)
        self._values = (*settings, config.to_json_string(), others)

    def __hash__(self) -> int:
        return hash(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CacheKey) and self._values == other._values


def costs_at(recipe: Recipe, config: PretrainedConfig, launch: Launch, device: str) -> Costs:
    """Returns the costs of the recipe on a launch. device: of the compute, cuda or cpu. Raises UserError as loading
    does."""
    shapes = shapes_of(recipe, config, launch.parallelism.tensor)
    return costs_of(recipe, launch, shapes, device, partial(state_bytes, recipe.optimizer))


def shapes_of(recipe: Recipe, config: PretrainedConfig, tensor: int = 1) -> Shapes:
    """Returns the tensors of one rank of a tensor parallel group, or of the full model if `tensor` is 1. Raises
    UserError as loading does."""
    return _shapes(CacheKey(recipe, config, {"precision"}, tensor))


@functools.lru_cache(maxsize=32)
def _shapes(key: CacheKey) -> Shapes:
    short, kinds = shortened(key.config)
    model, (tensor,) = skeleton(key.recipe, short), key.others
    splits, divided = tensor > 1 and token_split_problem(key.config) is None, ShardedParameters({}, frozenset())
    if tensor > 1:
        divided = parallelize(model, TensorGroup(None, 0, tensor), splits_tokens=splits)
        shard_scales(model, divided.shards)
    shards = divided.shards
    unequal = {name for name, shard in shards.items() if not isinstance(shard, PackedShard)}  # if not divisible
    packed = {id(parameter): weights for parameter, weights in linear_weights(model)}
    scales = {
        id(module.weight): sum(tensor.nbytes for _, tensor in state_tensors(module))
        for module in model.modules()
        if isinstance(module, torch.nn.Linear)
    }
    of_media, roles = _image_units(model), parameter_roles(model)
    # Biases of experts too, as `engine/expert_parallel.py` divides them.
    of_experts = {id(tensor) for experts in stacked_experts(model).values() for tensor in experts.parameters(False)}
    # Tensors outside of decoder layers by what is gathered together, see `engine/sharding.py`.
    table = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    ends = [module for module in (final_norm(model), output_head(model)) if module is not None]
    tail = {id(parameter) for module in ends for parameter in module.parameters()}
    units = {
        **of_media,
        **_ahead_units(model),
        **dict.fromkeys(table, "tail" if table & tail else "embedding"),
        **dict.fromkeys(tail, "tail"),
    }

    def layer_of(name: str, tensor: torch.Tensor) -> int | None:
        # A tower and a head that predicts ahead have layers of their own.
        match = None if id(tensor) in of_media or in_head(name) else _LAYER.search(name)
        return int(match[1]) if match else None

    short_weights: list[Weight] = []
    for name, parameter in model.named_parameters():
        layer = layer_of(name, parameter)
        short_weights.append(
            Weight(
                name=name,
                shape=tuple(parameter.shape),
                size=parameter.element_size(),
                trains=parameter.requires_grad,
                layer=layer,
                unit=units.get(id(parameter), "rest" if layer is None else "layer"),
                packed=packed.get(id(parameter), 0),
                scales=scales.get(id(parameter), 0),
                parts=tensor if name in shards else 1,
                expert=id(parameter) in of_experts,
                partial=name in divided.partial,
                rows=shards[name].total if name in unequal and shards[name].dim == 0 else 0,
                table=name in roles.tables,
                of_media=name in roles.of_media,
            )
        )
    buffers = dict(model.named_buffers())
    of_layers = sum(tensor.nbytes for name, tensor in buffers.items() if layer_of(name, tensor) is not None)
    others = sum(tensor.nbytes for tensor in buffers.values()) - of_layers
    # The full model's weights in its order: all layers at the place of the short one's first.
    of_kind = {kind: [weight for weight in short_weights if weight.layer == kind] for kind in set(kinds)}
    layers = [
        replace(weight, name=_LAYER.sub(f"layers.{index}.", weight.name, count=1), layer=index)
        for index, kind in enumerate(kinds)
        for weight in of_kind[kind]
    ]
    first = next((i for i, weight in enumerate(short_weights) if weight.layer is not None), len(short_weights))
    after = [weight for weight in short_weights[first:] if weight.layer is None]
    weights = (*short_weights[:first], *layers, *after)
    return Shapes(weights, others, of_layers // len(set(kinds)), len(kinds), splits)


def shortened(config: PretrainedConfig) -> tuple[PretrainedConfig, list[int]]:
    """Returns the config of a model with one layer of each kind, and the kind of every layer of the full model.

    If layers may differ in another way than the lists of the config say (`layer_types`), the config itself.
    """
    text = config.get_text_config()
    count, lists = text.num_hidden_layers, per_layer(text)
    given = [values for values in lists.values() if values != list(range(count))]
    unclear = any(not isinstance(value, str) and value not in (0, 1) for values in given for value in values)
    if unclear or any(getattr(text, key, None) and by not in lists for key, by in _UNEVEN.items()):
        return config, list(range(count))
    rows = [*zip(*given, map(repr, _overrides(text)), strict=True)]
    kinds = list(dict.fromkeys(rows))
    return with_layers(config, [rows.index(kind) for kind in kinds]), [kinds.index(row) for row in rows]


_UNEVEN = {  # settings that make layers differ, and the list that replaces them in some configs
    "first_k_dense_replace": "mlp_layer_types",
    "interleave_moe_layer_step": "moe_layers",
    "mlp_only_layers": "mlp_layer_types",
    "moe_layer_freq": "mlp_layer_types",
    "num_kv_shared_layers": "",  # the last ones have no keys and values, and may be twice as wide: see `standing_for`
}


def standing_for(config: PretrainedConfig) -> list[int]:
    """Returns, for each layer of the model of `config`, the one that computes the same with the same memory.

    Each stands for itself, but in models whose last layers take the keys and values of earlier ones (Gemma 4 E2B),
    which `shortened` leaves whole. Of each kind of attention, these do more there than others like them:

        the first                 its backward is the last to read the rotations, and frees them
        the last with keys        the keys and values that others take live until the last of these has its backward
        the last of all           its backward creates their gradient, to which the others add
    """
    text = config.get_text_config()
    count, lists = text.num_hidden_layers, per_layer(text)
    taken, kinds = getattr(text, "num_kv_shared_layers", 0), lists.get("layer_types")
    if not taken or kinds is None or any(getattr(text, key, None) for key in _UNEVEN if key != "num_kv_shared_layers"):
        return list(range(count))
    alone: set[int] = set()
    for kind in set(kinds):
        places = [i for i in range(count) if kinds[i] == kind]
        with_keys = [i for i in places if i < count - taken]
        alone |= {places[0], *with_keys[-1:], places[-1]}
    rows = [
        (i < count - taken, *map(repr, row))
        for i, row in enumerate(zip(*lists.values(), _overrides(text), strict=True))
    ]
    first = {row: i for i, row in reversed(list(enumerate(rows))) if i not in alone}
    return [i if i in alone else first[row] for i, row in enumerate(rows)]


def per_layer(text: PretrainedConfig) -> dict[str, list[Any]]:
    """Returns the lists of a text config that have an entry for each layer."""
    count = text.num_hidden_layers
    lists = {name: value for name, value in text.to_dict().items() if isinstance(value, list)}
    return {name: value for name, value in lists.items() if len(value) == count > 1}


def _overrides(text: PretrainedConfig) -> list[dict[str, Any] | None]:
    """Returns the settings of each layer that differ from the config's own, such as `head_dim`."""
    own = {int(layer): values for layer, values in (text.to_dict().get("per_layer_config") or {}).items()}
    return [own.get(layer) for layer in range(text.num_hidden_layers)]


def with_layers(config: PretrainedConfig, layers: list[int]) -> PretrainedConfig:
    """Returns the config of a model with only these layers of `config`."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    overrides = [_overrides(text)[layer] for layer in layers]
    for name, values in per_layer(text).items():
        counts = values == list(range(len(values)))  # indices of layers: each is an expert one, has keys of its own
        setattr(text, name, list(range(len(layers))) if counts else [values[i] for i in layers])
    text.num_hidden_layers = len(layers)
    if any(overrides):
        text.per_layer_config = {layer: values for layer, values in enumerate(overrides) if values}
    return config


def skeleton(recipe: Recipe, config: PretrainedConfig, attention: AttentionChoice | None = None) -> Any:
    """Returns the model of a run on `meta`, see `assemble.skeleton`; its body has a name."""
    attention = attention or AttentionChoice("eager", "only shapes", True)
    model = assemble.skeleton(recipe, Base.of(recipe, config), attention, recipe.objective.score_labels)
    name_body(unwrap_peft(model))
    return model


def _ahead_units(model: Any) -> dict[int, str]:
    """Returns the unit of the layer of a head that predicts ahead, for each of its tensors."""
    if (head := head_of(model)) is None:
        return {}
    return {id(parameter): "mtp.layers.0" for parameter in head.layers.parameters()}


def _image_units(model: Any) -> dict[int, str]:
    """Returns the units of a tower's and a projector's tensors, by their identity; {} for a text model."""
    whole = unwrap_peft(model)
    inner = {id(module) for images in tower_modules(model) for module in images.modules()}
    modules: list[tuple[str, Any]] = [one for one in whole.named_modules() if id(one[1]) in inner]
    units: dict[int, str] = {id(t): "rest" for _, module in modules for t in (*module.parameters(), *module.buffers())}
    for path, module in modules:  # inner ones after outer ones, whose tensors they take
        # In which transformers' models declare what is not divided over devices: the layers.
        if type(module).__name__ in (whole._no_split_modules or ()):
            units |= dict.fromkeys(map(id, module.parameters()), path)
    return units
