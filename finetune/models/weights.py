"""The model of a recipe: weights from a hub id or folder, or from a config; quantised, frozen and with adapters by the
recipe.

Where the weights are in memory is the engine's decision (`Placement`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from finetune.errors import UserError
from finetune.models.activations import recompute_activations
from finetune.models.adapters import add_adapters
from finetune.models.attention import AttentionChoice
from finetune.models.compiled import compile_layers
from finetune.models.config import first_line
from finetune.models.dtypes import dtypes, keep_weights_unpacked, quantization_config
from finetune.models.rope import rotate_per_document
from finetune.models.score_head import labelled, score_head, start_score_head
from finetune.models.wrapped import SCORE
from finetune.recipe.schema import Recipe
from finetune.utils import full_shape


@dataclass(frozen=True)
class Placement:
    """How this rank gets its weights.

    meta: shapes only, of buffers as well; the engine fills them in from rank 0. device: where quantised weights are
    packed; None where ZeRO-3 places them itself. layers: the decoder layers that need weights, the others may be left
    on `meta`. direct: each weight is read straight to `device`. Otherwise every rank would need a copy of the model in
    host memory where it is in fp32, which checkpoints are not.
    """

    weights: Literal["load", "meta"]
    device: torch.device | None
    layers: frozenset[int] | None = None
    direct: bool = False


def load_model(
    recipe: Recipe,
    config: PretrainedConfig,
    attention: AttentionChoice,
    placement: Placement,
    labels: tuple[str, ...] = (),
) -> PreTrainedModel:
    """Returns the model ready to be wrapped by an engine: in train mode, frozen where frozen, adapters in.

    labels: of a head of scores, in place of the LM head. Seeded: random weights are the same on every rank. Raises
    UserError where it cannot be loaded or has no such head.
    """
    types = dtypes(recipe)
    base_dtype = types.trained if recipe.mode == "full" else types.frozen
    torch.manual_seed(recipe.run.seed)
    if labels:
        model = _scoring_model(recipe, labelled(config, labels), attention, base_dtype, placement)
    else:
        model, _ = _base_model(recipe, config, attention, base_dtype, placement, AutoModelForCausalLM)
    if not labels and model.get_output_embeddings() is None:
        raise UserError(f"{type(config).__name__} has no LM head to train")
    rotate_per_document(model)
    keep_weights_unpacked(model)
    model.config.use_cache = False  # with a cache, transformers stops isolating packed documents
    if recipe.lora is not None:
        torch.manual_seed(recipe.run.seed + 1)  # the adapters do not depend on how many draws the base took
        model = add_adapters(model, recipe.lora, types.trained)
    if types.compute != torch.float32:
        # Hidden states begin in the compute type: the embedding table may be in fp32, and then the full residual stream
        # would be fp32 on one backend and 16 bit on another.
        model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, output: output.to(types.compute))
    if recipe.train.activation_checkpointing:
        recompute_activations(model, recipe.train.activation_checkpointing)
    if recipe.train.compile:
        compile_layers(model)
    return model.train()


def _scoring_model(
    recipe: Recipe, config: PretrainedConfig, attention: AttentionChoice, dtype: torch.dtype, placement: Placement
) -> Any:
    """Returns a sequence classification model, whose head is new where what is loaded has none."""
    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        raise UserError(f"{type(config).__name__} has no sequence classification model in transformers")
    model, missing = _base_model(recipe, config, attention, dtype, placement, AutoModelForSequenceClassification)
    score_head(model)
    if missing is None or any(name.startswith(f"{SCORE}.") for name in missing):
        start_score_head(model, dtypes(recipe).trained, recipe.run.seed)
    return model


def _base_model(
    recipe: Recipe,
    config: PretrainedConfig,
    attention: AttentionChoice,
    dtype: torch.dtype,
    placement: Placement,
    auto: Any,  # transformers' auto class
) -> tuple[Any, set[str] | None]:
    """Returns the model, and the weights that its checkpoint lacks; None: all, it is made from a config."""
    common: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention.implementation}
    if placement.weights == "meta":
        model = without_weights(config, auto, **common)
        model.tie_weights()  # no_init_weights leaves them apart
        return model, None
    if recipe.model.config is not None:
        return auto.from_config(config, **common), None
    if recipe.quantization is not None:
        whole = [SCORE] if auto is AutoModelForSequenceClassification else None
        common["quantization_config"] = quantization_config(recipe.quantization, dtypes(recipe).compute, whole)
    if placement.device is not None and (recipe.quantization is not None or placement.direct):
        common["device_map"] = {"": placement.device}
    name = recipe.model.name
    assert name is not None  # the schema wants it where there is no config
    load: Any = auto
    if placement.layers is not None and recipe.quantization is None:
        load = _some_layers(auto._model_mapping[type(config)], placement.layers)
    try:
        model, report = load.from_pretrained(
            name,
            config=config,
            revision=recipe.model.revision or "main",
            trust_remote_code=recipe.model.trust_remote_code,
            output_loading_info=True,
            **common,
        )
    except (OSError, ValueError) as error:
        raise UserError(f"model.name: {recipe.model.name!r} cannot be loaded: {first_line(error)}") from error
    if load is not auto:
        _complete(model, load.__mro__[1], without_weights(config, auto, **common))
    return model, set(report["missing_keys"])


def without_weights(config: PretrainedConfig, auto: Any = AutoModelForCausalLM, **common: Any) -> Any:
    """Returns a model of shapes alone (device `meta`), not tied; common: arguments of transformers' `from_config`."""
    with torch.device("meta"), no_init_weights():
        return auto.from_config(config, **common)


def _some_layers(model_class: Any, layers: frozenset[int]) -> Any:
    """Returns the class of a model that lacks the other decoder layers before its weights are read, so that theirs are
    not."""

    class SomeLayers(model_class):
        _keys_to_ignore_on_load_unexpected = [r"\.layers\.\d+\."]  # noqa: RUF012 (transformers' name and type)

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            for i in range(len(self.base_model.layers)):
                if i not in layers:
                    self.base_model.layers[i] = torch.nn.Identity()

    return SomeLayers


def _complete(model: Any, model_class: Any, skeleton: Any) -> None:
    """Turn a model of `_some_layers` into one of its own class, with the layers that it lacks on `meta`."""
    model.__class__ = model_class
    for i, layer in enumerate(model.base_model.layers):
        if isinstance(layer, torch.nn.Identity):
            model.base_model.layers[i] = skeleton.base_model.layers[i]


def parameter_counts(model: Any) -> tuple[int, int]:
    """Returns (all, trained) parameters of the full model, also where this rank has a shard or 4-bit weights."""
    counts = [(_full_numel(p), p.requires_grad) for p in model.parameters()]
    return sum(count for count, _ in counts), sum(count for count, trained in counts if trained)


def _full_numel(parameter: torch.nn.Parameter) -> int:
    numel = full_shape(parameter).numel()
    packed = type(parameter).__name__ == "Params4bit"  # two weights a byte
    return numel * 2 * parameter.element_size() if packed else numel
