"""Files of the recipe's model, in a folder or in the hub's cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.utils import (
    FEATURE_EXTRACTOR_NAME,
    PROCESSOR_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    VIDEO_PROCESSOR_NAME,
    cached_file,
)

from finetune.errors import UserError
from finetune.models.damage import check_tensors, weight_map
from finetune.recipe.schema import Model
from finetune.utils import unwrap_peft

PROCESSORS = (FEATURE_EXTRACTOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME)  # files of their settings


def checkpoint_file(model: Model, name: str) -> Path | None:
    """Returns a file of the model on this machine, downloaded if needed; None if the model has none of that name."""
    assert model.name is not None
    file = cached_file(
        model.name,
        name,
        revision=model.revision or "main",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(file) if file else None


def tensor_names(model: Model) -> dict[str, str]:
    """Returns the name of the file of each tensor of the model's weights; if there are several, without a download.

    Raises UserError if there are no safetensors files.
    """
    if index := checkpoint_file(model, SAFE_WEIGHTS_INDEX_NAME):
        return weight_map(index, whole=False)
    if (file := checkpoint_file(model, SAFE_WEIGHTS_NAME)) is None:
        raise UserError(
            f"model.name: {model.name!r} has neither {SAFE_WEIGHTS_INDEX_NAME} nor {SAFE_WEIGHTS_NAME}. The text part "
            "of a multimodal model is read from safetensors files. Fix: name a copy that has them"
        )
    check_tensors(file)
    with safe_open(file, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), SAFE_WEIGHTS_NAME)


def tensor_places(model: Model) -> dict[str, Path]:
    """Returns the file of each tensor of the model's weights, downloaded. Raises UserError if one is missing."""
    names = tensor_names(model)
    files = {name: checkpoint_file(model, name) for name in sorted({*names.values()})}
    if missing := [name for name, file in files.items() if file is None]:
        raise UserError(f"model.name: {model.name!r} lacks {missing[0]}. Fix: add this file, or name a complete copy")
    for file in files.values():
        if file is not None:
            check_tensors(file)
    return {tensor: file for tensor, name in names.items() if (file := files[name])}


def check_names_kept(model: Any, paths: list[str]) -> None:
    """Raises UserError if peft could not load an adapter of these modules again: it gives names in adapters the changes
    that transformers makes to names in the base's files, which some of the model's own names would not survive."""
    renamings = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]
    for path in paths:
        name = f"{path}.weight"
        for renaming in renamings:  # transformers 5.17 has no function for it
            name, _ = renaming.rename_source_key(name)
        if name != f"{path}.weight":
            raise UserError(
                f"lora.targets: peft would not find the adapter of {path} again. On {type(model).__name__} it takes it "
                f"for that of {name.removesuffix('.weight')}. Fix: name targets without it"
            )


def unloaded_tensors(model: Any, about: Model) -> dict[str, Path]:
    """Returns the file of each tensor of a base that its class leaves out as it is read: heads that predict several
    tokens (`mtp.*`, or layers behind the last). config.json still declares them, so a result keeps them."""
    if not (left_out := left_out_pattern(model)) or about.name is None:
        return {}
    if not any(checkpoint_file(about, name) for name in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME)):
        return {}
    return {name: file for name, file in tensor_places(about).items() if left_out.search(name)}


def left_out_pattern(model: Any) -> re.Pattern[str] | None:
    """Returns the pattern of tensors that transformers leaves out as it reads a model; None if it reads all."""
    # The attribute by which model classes of transformers declare them.
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns)) if patterns else None


def kept_tensors(model: Any) -> dict[str, Path]:
    """Returns what `unloaded_tensors` found as the model was read; {} on a rank that has read no weights."""
    return getattr(unwrap_peft(model), "kept_tensors", {})


def kept_words(names: list[str]) -> str:
    """Returns the sentence for tensors that a result keeps from its base."""
    return (
        f"{len(names)} tensors that transformers does not load ({names[0]}, ...) are kept from the base as they are: "
        "a head that predicts several tokens is not trained with the model, so fewer of its tokens are accepted"
    )
