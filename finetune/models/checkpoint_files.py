"""Files of the recipe's model, in a folder or in the hub's cache."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
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
from finetune.models.mtp import is_of_head, places_of_head
from finetune.models.mtp import renames as renames_of
from finetune.recipe.schema import Model
from finetune.utils import unwrap_peft

FREQUENCIES = "rotary_emb.inv_freq"  # buffers that older versions of transformers saved
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


def loaded_names(
    model: Any, files: Iterable[str], renames: dict[str, str] | None = None
) -> tuple[dict[str, str | None], list[Any]]:
    """Returns the model's tensor (the first, if several) that `from_pretrained` makes of each tensor of a checkpoint,
    None if it is not used; and the conversions by which it does."""
    names, conversions = renamed(model, files, renames)
    own = model.state_dict()
    return {name: loaded if loaded in own else None for name, loaded in names.items()}, conversions


def renamed(
    model: Any, files: Iterable[str], renames: dict[str, str] | None = None
) -> tuple[dict[str, str], list[Any]]:
    """Returns the name that `from_pretrained` gives each tensor of a checkpoint, whether the model has it or not; and
    the conversions by which it does."""
    renames = {**renames_of(places_of_head(model)), **(renames or {})}
    conversions = get_model_conversion_mapping(model, renames or None)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    own, prefix = model.state_dict(), model.base_model_prefix
    names = {name: rename_source_key(name, renamings, converters, prefix, own)[0] for name in files}
    return names, [one for one in conversions if one.was_used()]


def unread_names(model: Any, files: Iterable[str]) -> list[str]:
    """Returns the tensors of a checkpoint that become nothing in a model as transformers reads it: heads that predict
    several tokens (`mtp.*`, or layers behind the last), and buffers of older versions."""
    names, own = loaded_names(model, files)[0], model.state_dict()
    return [name for name, loaded in names.items() if loaded is None and name not in own]


def unread_tensors(model: Any, about: Model, is_packed: bool = False) -> dict[str, Path]:
    """Returns the file of each tensor of a base that its class leaves out as it is read. config.json still declares
    what they are, so a result keeps them. is_packed: names in the files are those of packed weights, and only what the
    class says that it leaves out is told apart."""
    if about.name is None:
        return {}
    if not any(checkpoint_file(about, name) for name in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME)):
        return {}
    places = tensor_places(about)
    if not is_packed:
        return {name: places[name] for name in unread_names(model, places)}
    # The attribute by which model classes of transformers declare them.
    patterns = [re.compile(one) for one in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    return {name: file for name, file in places.items() if any(one.search(name) for one in patterns)}


def kept_tensors(model: Any) -> dict[str, Path]:
    """Returns what `unread_tensors` found as the model was read; {} on a rank that has read no weights."""
    return getattr(unwrap_peft(model), "kept_tensors", {})


def dropped_tensors(model: Any) -> set[str] | None:
    """Returns the base's tensors of a head that a result leaves out under `model.mtp: drop`; None under another, and on
    a rank that has read no weights."""
    return getattr(unwrap_peft(model), "dropped_tensors", None)


def lost_tensors(model: Any) -> list[str]:
    """Returns the base's tensors that a model of scores has no use for, and its result not either."""
    return getattr(unwrap_peft(model), "lost_tensors", [])


def kept_words(names: list[str], config: PretrainedConfig) -> str:
    """Returns the sentence for tensors that a result keeps from its base."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", None) or math.inf
    few = f"{names[0]}, ..." if names[1:] else names[0]
    kept = f"{len(names):,} tensors that transformers does not load ({few}) are kept from the base as they are"
    if not any(is_of_head(name, layers) for name in names if not name.endswith(FREQUENCIES)):
        return kept
    stale = "a head that predicts several tokens is not trained with the model, so fewer of its tokens are accepted"
    return f"{kept}: {stale}"


def tensors_text(names: list[str]) -> str:
    """Returns the number of tensors with the name of the first.

    >>> tensors_text(["mtp.fc.weight", "mtp.norm.weight"]), tensors_text(["pooler.bias"])
    ('2 tensors (mtp.fc.weight, ...)', '1 tensor (pooler.bias)')
    """
    return f"{len(names):,} tensors ({names[0]}, ...)" if names[1:] else f"1 tensor ({names[0]})"
