"""Files of the recipe's model, in a folder or in the hub's cache."""

from __future__ import annotations

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
            f"model.name: {model.name!r} has neither {SAFE_WEIGHTS_INDEX_NAME} nor {SAFE_WEIGHTS_NAME}: the text part "
            "of a multimodal model is read from safetensors files"
        )
    check_tensors(file)
    with safe_open(file, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), SAFE_WEIGHTS_NAME)


def tensor_places(model: Model) -> dict[str, Path]:
    """Returns the file of each tensor of the model's weights, downloaded. Raises UserError if one is missing."""
    names = tensor_names(model)
    files = {name: checkpoint_file(model, name) for name in sorted({*names.values()})}
    if missing := [name for name, file in files.items() if file is None]:
        raise UserError(f"model.name: {model.name!r} lacks {missing[0]}")
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
                f"lora.targets: peft would not find the adapter of {path} again on {type(model).__name__}: it takes it "
                f"for that of {name.removesuffix('.weight')}; name targets without it"
            )
