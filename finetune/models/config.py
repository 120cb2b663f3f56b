"""The Hugging Face config of the model that a recipe trains."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoModelForMultimodalLM, PretrainedConfig, Qwen3Config

from finetune.data.media.family_table import family_of, part_that_hears, rows_of
from finetune.errors import UserError
from finetune.models.base_config import base_config, depends_on_length, rope_types, without_weights
from finetune.models.checkpoint_files import tensor_names
from finetune.models.damage import check_weights, short
from finetune.models.head.token_loss import logit_map
from finetune.models.text_part import check_text_part, is_multimodal, text_part_of
from finetune.recipe.schema import Model, Recipe


def model_config(model: Model) -> PretrainedConfig:
    """Returns the Hugging Face config of the trained model: of a multimodal one the text part, or all of it if
    `model.train` is given. Raises UserError."""
    config = base_config(model)
    if model.train is not None:
        family_of(config)
        # The default of its class may say otherwise than its files do (Mistral 3): only ranks that read them would have
        # an untied head.
        has_head = any(name.endswith("lm_head.weight") for name in tensor_names(model))
        text = config.get_text_config(decoder=True)
        if hasattr(config, "tie_word_embeddings"):
            config.tie_word_embeddings = config.tie_word_embeddings and (text.tie_word_embeddings or not has_head)
        return config
    if not config.sub_configs:
        return config
    if model.config is None:
        part = text_part_of(model)
        return copy.deepcopy(part.text.config) if part else config
    if is_multimodal(config):
        text = config.get_text_config(decoder=True).model_type
        raise UserError(
            f"model.config: {config.model_type!r} has other parts than text, which would never be trained. Fix: give "
            f"its text part alone, `model_type: {text}`"
        )
    return config


def check_scaled_logits(config: PretrainedConfig) -> None:
    """Raises UserError if transformers' class of a model with its tower leaves out the scale of its text model's logits
    (Granite Speech, 5.23): answers by the likeliest token are the same, losses are not."""
    scaling = getattr(config.get_text_config(decoder=True), "logits_scaling", 1.0)
    if scaling == 1.0 or config.get_text_config(decoder=True) is config:
        return
    model = without_weights(copy.deepcopy(config), AutoModelForMultimodalLM)
    if abs(logit_map(model).scale * scaling - 1) > _SAME:
        raise UserError(
            f"model.train: {type(model).__name__} does not divide logits by {scaling:g}. Its config says so "
            "(`logits_scaling`), and the weights were trained with it: losses would be those of other logits. Fix: "
            "leave out model.train to train the text part, or use a transformers whose class divides"
        )


_SAME = 1e-3  # relative


def check_adapter_base(recipe: Recipe) -> None:
    """Raises UserError for adapters of the thinker of a model that also talks: no class loads them on such a base."""
    if recipe.lora is None or recipe.model.train is None or recipe.model.name is None:
        return
    whole = base_config(recipe.model.model_copy(update={"train": None}))
    if part_that_hears(whole) is not whole:
        raise UserError(
            f"lora: {recipe.model.name!r} also talks, and an adapter of its thinker would not load on it. Fix: save "
            f"the thinker by itself (transformers' {type(whole).__name__.removesuffix('Config')}Thinker"
            "ForConditionalGeneration, from_pretrained and save_pretrained, with tokenizer and processor), and name "
            "that folder"
        )


MAX_LAYERS = 1000


def check_sizes(model: Model, config: PretrainedConfig) -> None:
    """Raises UserError for a `model.config` that no model can be built from, by building one without memory; and for a
    multimodal model whose text part is no model by itself.

    Call it before an engine starts: ZeRO-3 changes how models are built.
    """
    if model.config is None:
        check_weights(Path(model.name or "").expanduser())
        if model.train is not None:
            check_scaled_logits(config)
        check_text_part(model)
        return
    layers = getattr(config.get_text_config(), "num_hidden_layers", 1)
    if not 1 <= layers <= MAX_LAYERS:
        raise UserError(
            f"model.config.num_hidden_layers: expected 1 to {MAX_LAYERS:,}, got {layers:,}. Fix: set a number of this "
            "range"
        )
    try:
        without_weights(config)
    except (RuntimeError, ArithmeticError, AssertionError, AttributeError, LookupError, ValueError, TypeError) as error:
        raise UserError(
            f"model.config: no model can be built from these sizes: {short(error)}. Fix: correct the sizes"
        ) from error


def length_dependent_rope(config: PretrainedConfig) -> list[str]:
    """Returns the types of RoPE whose frequencies depend on the length of a document: `dynamic`, `longrope`."""
    types = rope_types(getattr(config.get_text_config(), "rope_parameters", None))
    return sorted(name for name in types if depends_on_length(name))


EXPERTS_STYLE = "moe_tp_experts"  # of stacked experts, in transformers' tensor parallel plans


def tensor_plan(config: PretrainedConfig) -> dict[str, str]:
    """Returns the tensor parallel plan of a transformers config: {pattern: style}; empty without a plan."""
    text = config.get_text_config()
    plan = dict(getattr(text, "base_model_tp_plan", None) or {})
    if not plan and text.model_type == "qwen3_vl_text":  # its layers are Qwen 3's
        plan = dict(Qwen3Config.base_model_tp_plan or {})
    if plan and text.model_type == "qwen3_omni_moe_text":  # it leaves out what Qwen 3's says of the norms of each head
        norms = ("layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm")
        plan |= dict.fromkeys(norms, "replicated_with_grad_allreduce")
    return plan


_OF_OTHER_HEADS = ("classifier", "summary")


def check_no_dropout(config: PretrainedConfig) -> None:
    """Raises UserError if a model has dropout, for `batch.rows_per_device: auto`."""
    for name, value in active_dropouts(config):
        raise UserError(
            f"batch.rows_per_device: `auto` is not possible with dropout (the model's `{name}` is {value}). Dropout is "
            "drawn for each forward, so losses would depend on the hardware. Fix: give a number"
        )


def active_dropouts(config: PretrainedConfig) -> Iterator[tuple[str, float]]:
    """Yields the settings (name, probability) by which a model drops at random."""
    for name, value in config.to_dict().items():
        if not isinstance(value, float) or value <= 0 or name.startswith(_OF_OTHER_HEADS):
            continue
        if "drop" in name or "jitter" in name:
            yield name, value


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """Returns a copy of the config whose model has no dropout."""
    config = copy.deepcopy(config)
    for part in _parts(config):
        for name, _ in list(active_dropouts(part)):
            setattr(part, name, 0.0)
    return config


def with_steady_tower(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the config of a multimodal model, or a copy, whose tower drops nothing at random (`Family.drops`)."""
    drops = [(row.config, name) for row in rows_of(config.model_type).values() for name in row.drops]
    if not any(getattr(getattr(config, tower), name, 0) for tower, name in drops):
        return config
    config = copy.deepcopy(config)
    for tower, name in drops:
        if hasattr(getattr(config, tower), name):
            setattr(getattr(config, tower), name, 0.0)
    return config


def _parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Returns a config, its text part and the others that it has."""
    others = [getattr(config, name, None) for name in config.sub_configs]
    return [config, config.get_text_config(), *(one for one in others if isinstance(one, PretrainedConfig))]


def restore_dropout(config: PretrainedConfig, base: PretrainedConfig) -> None:
    """Give a config the dropout of the one that it was copied from by `without_dropout` or `with_steady_tower`."""
    for part, of_base in zip(_parts(config), _parts(base), strict=True):
        for name, value in active_dropouts(of_base):
            setattr(part, name, value)
