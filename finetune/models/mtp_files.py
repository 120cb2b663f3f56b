"""The head that predicts ahead in the files of a base: whether it is there, what it shares with the model, what a
result says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from finetune.errors import UserError
from finetune.models.base_checkpoint import BaseCheckpoint
from finetune.models.base_config import without_weights
from finetune.models.checkpoint_files import FREQUENCIES, tensor_names, tensor_places, unread_names
from finetune.models.mtp import (
    DECLARATIONS,
    attach_without_weights,
    check_head,
    copies_in,
    head_of,
    in_head,
    is_of_head,
    name_of_table,
    named_as_in_files,
)
from finetune.models.packed_linear import is_stored_quantized
from finetune.models.stored_config import stored_format
from finetune.models.stored_formats import StoredFormat
from finetune.models.stored_loading import stored_parameters, without_quantization
from finetune.recipe.schema import Model


def check_base_has_head(model: Model, config: PretrainedConfig) -> None:
    """Raises UserError if a recipe trains a head that its base does not have, before anything large is read."""
    if model.mtp != "train" or model.name is None:
        return
    form = stored_format(config, model.name)
    if form is None and is_stored_quantized(config):
        raise UserError(
            f"model.mtp: train: {model.name!r} is stored as bitsandbytes has it, without its head. Fix: name another "
            "copy, or use `model.mtp: keep`"
        )
    names = tensor_names(model)
    check_head(config, names, model.name)
    tensors, unread = _tensors_of_head(model, config, form)
    layers = config.get_text_config().num_hidden_layers
    own = unread.union(copy.name.format(n=layers) for copy in copies_in(config, names))
    own = own.union(*(a | b for a, b in tensors))
    others = sorted(one for one in names if is_of_head(one, layers) and not one.endswith(FREQUENCIES))
    if other := next((name for name in others if name not in own), None):
        raise UserError(
            f"model.mtp: train: {model.name!r} has `{other}`. No part of a head that is trained here has this name. "
            "Fix: use `model.mtp: keep`"
        )
    # Experts are in files one by one, or stacked as in memory.
    lacking = [one_by_one - {*names} for as_is, one_by_one in tensors if not as_is <= {*names}]
    if missing := sorted(set().union(*lacking)):
        raise UserError(
            f"model.mtp: train: the head of {model.name!r} lacks {len(missing):,} tensors, such as `{missing[0]}`. "
            "They would begin at random. Fix: complete the folder, or use `model.mtp: keep`"
        )


def _tensors_of_head(
    model: Model, config: PretrainedConfig, form: StoredFormat | None
) -> tuple[list[tuple[set[str], set[str]]], set[str]]:
    """Returns for each tensor of a head its name in files if they have it as memory does, and the names of those that
    transformers makes of it as it saves; and names of tensors in files that reading does not need. form: of the files;
    None: plain."""
    plain = config if form is None else without_quantization(config)
    causal = without_weights(plain, trusted=model.trust_remote_code)
    attach_without_weights(causal, torch.float32)
    stored = [] if form is None else [one for one in stored_parameters(causal, form) if in_head(one.path)]
    parts, unread = dict[str, set[str]](), set[str]()
    for one in stored:
        for piece in one.pieces:
            assert form is not None
            kinds = form.parts(piece.rows, one.matrix.columns)
            parts[piece.name] = {form.file_name(piece.name, part) for part in kinds}
            unread |= {form.file_name(piece.name, part) for part in form.unread}

    def in_files(tensors: dict[str, Tensor]) -> set[str]:
        return set[str]().union(*(parts.get(name, {name}) for name in named_as_in_files(causal, tensors)))

    each = ({name: tensor} for name, tensor in causal.state_dict().items() if in_head(name))
    return [(in_files(one), in_files(revert_weight_conversion(causal, one))) for one in each], unread


def share_tables(model: Any, about: Model) -> None:
    """Note which tensors in the head's files are copies of the model's embedding and LM head: a result has them as
    they are trained. Raises UserError if they are others."""
    places, head = tensor_places(about), head_of(model)
    layers = model.config.get_text_config().num_hidden_layers
    head.copies = copies_in(model.config, places)
    for copy in head.copies:
        names = copy.name.format(n=layers), name_of_table(model, copy.of_head)  # which files have, too
        one, other = (_read(places[name], name) for name in names)
        if not torch.equal(one, other):
            raise UserError(
                f"model.mtp: train: `{names[0]}` in {about.name!r} is not `{names[1]}`. Its head has tables by itself, "
                "which are not trained here. Fix: use `model.mtp: keep`"
            )


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name)


def unread_by_base(model: Any, files: BaseCheckpoint) -> dict[str, Path]:
    """Returns the file of each tensor that a multimodal base's class leaves out as it is read, but those of a head that
    the model of its text part has in memory."""
    base = files.part.base
    if head_of(model) is not None:
        base = files.part.base_without_weights()
        attach_without_weights(base, torch.float32, model)
    return {name: files.places[name] for name in unread_names(base, files.places)}


def undeclare_head(folder: Path, config: PretrainedConfig) -> None:
    """Let config.json in a folder say that there is no head."""
    file = folder / "config.json"
    settings = undeclared(json.loads(file.read_text(encoding="utf-8")), config)
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def undeclared(settings: dict[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    """Returns the settings of a config without the declaration of a head; as 0 where the class of the config has one by
    default."""
    text = config.get_text_config()

    def without(section: dict[str, Any], of_section: PretrainedConfig) -> dict[str, Any]:
        left = {key: value for key, value in section.items() if key not in DECLARATIONS}
        told = {key: 0 for key in DECLARATIONS if key in section and getattr(type(of_section)(), key, None)}
        return left | told

    nested = {name: without(one, text) for name, one in settings.items() if isinstance(one, dict)}
    return without({**settings, **nested}, config)
