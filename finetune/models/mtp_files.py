"""The head that predicts ahead in the files of a base: whether it is there, what it shares with the model, what a
result says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PretrainedConfig

from finetune.errors import UserError
from finetune.models.base_checkpoint import BaseCheckpoint
from finetune.models.checkpoint_files import tensor_names, tensor_places, unread_names
from finetune.models.mtp import DECLARATIONS, attach_without_weights, check_head, copies_in, head_of, name_of_table
from finetune.models.packed_linear import is_stored_quantized
from finetune.recipe.schema import Model


def check_base_has_head(model: Model, config: PretrainedConfig) -> None:
    """Raises UserError if a recipe trains a head that its base does not have, before anything large is read."""
    if model.mtp != "train" or model.name is None:
        return
    if is_stored_quantized(config):
        raise UserError(
            f"model.mtp: train: {model.name!r} is stored quantized, and its head with it. Fix: name an unquantized "
            "copy, or use `model.mtp: keep`"
        )
    check_head(config, tensor_names(model), model.name)


def share_tables(model: Any, about: Model) -> None:
    """Note which tensors in the head's files are copies of the model's embedding and LM head: a result has them as
    they are trained. Raises UserError if they are others."""
    places, head = tensor_places(about), head_of(model)
    layers = model.config.get_text_config().num_hidden_layers
    head.copies = copies_in(model.config, places)
    for copy in head.copies:
        name = copy.name.format(n=layers)
        with safe_open(places[name], framework="pt") as file:
            values = file.get_tensor(name)
        table = model.get_parameter(name_of_table(model, copy.of_head))
        if table.is_meta:  # another rank has it
            continue
        if not torch.equal(values.to(table.device, table.dtype), table):
            raise UserError(
                f"model.mtp: train: `{name}` in {about.name!r} is not the model's own. Its head has tables by itself, "
                "which are not trained here. Fix: use `model.mtp: keep`"
            )


def unread_by_base(model: Any, files: BaseCheckpoint) -> dict[str, Path]:
    """Returns the file of each tensor that a multimodal base's class leaves out as it is read, but those of a head that
    the model of its text part has in memory."""
    base = files.part.base_without_weights()
    if head_of(model) is not None:
        attach_without_weights(base, torch.float32, model)
    return {name: files.places[name] for name in unread_names(base, files.places)}


def undeclare_head(folder: Path, config: PretrainedConfig) -> None:
    """Let config.json in a folder say that there is no head. Where the class of the config has one unless it is told,
    the key stays, as 0."""
    file = folder / "config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    text = config.get_text_config()
    parts = [(settings, config), *((one, text) for one in settings.values() if isinstance(one, dict))]
    for section, of_section in parts:
        for key in DECLARATIONS:
            if section.pop(key, None) is not None and getattr(type(of_section)(), key, None):
                section[key] = 0
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
