"""The files of a multimodal base whose text part is trained: those that are read, and those that a result keeps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import CONFIG_NAME

from finetune.errors import UserError
from finetune.models.checkpoint_files import PROCESSORS, check_names_kept, checkpoint_file, tensor_places
from finetune.models.text_part import TextPart, key_mapping, text_part_of
from finetune.recipe.schema import Model


@dataclass(frozen=True)
class BaseCheckpoint:
    """places: the file of each tensor; renames: `key_mapping` of `from_pretrained`, for the text part alone."""

    part: TextPart
    renames: dict[str, str]
    places: dict[str, Path]
    config: Path
    processors: tuple[Path, ...]


def base_checkpoint(model: Model) -> BaseCheckpoint | None:
    """Returns the files of a recipe's model, None if its text part is all of it.

    Missing ones are downloaded. Raises UserError if the text part's tensors are not in them, or would not be written
    as they are there; and if transformers would tie the LM head, as it has the embedding's values, and we would not,
    or the other way round.
    """
    if (part := text_part_of(model)) is None:
        return None
    places = tensor_places(model)
    loaded, ours = {*part.files.values()}, {part.in_base(name) for name in part.text.state_dict()}
    state: dict[str, Tensor] = part.base.state_dict()
    tensors = {name: tensor for name, tensor in state.items() if name in loaded & ours}
    if other := sorted({*revert_weight_conversion(part.base, tensors)} - {*part.files}):
        raise UserError(
            f"model.name: a result cannot be stored in the layout of {model.name!r}. transformers would write "
            f"{other[0]!r}, which it does not have. Fix: name another checkpoint of this model, or another model"
        )
    ends = [name for name, own in part.files.items() if own in (f"{part.head}.weight", f"{part.embedding}.weight")]
    if getattr(part.base.config, "tie_word_embeddings", False) and len(ends) == 2:
        with (
            safe_open(places[ends[0]], framework="pt") as first,
            safe_open(places[ends[1]], framework="pt") as second,
        ):
            same = torch.equal(first.get_tensor(ends[0]), second.get_tensor(ends[1]))
        if same != part.text.config.tie_word_embeddings:
            raise UserError(
                f"model.name: {model.name!r} contradicts its own `tie_word_embeddings`. It has an embedding and an LM "
                "head, which its config ties or does not although their values say otherwise. Fix: set "
                "`tie_word_embeddings` in the `text_config` of its config.json to match"
            )
    config = checkpoint_file(model, CONFIG_NAME)
    assert config is not None  # it was read
    processors = tuple(path for name in PROCESSORS if (path := checkpoint_file(model, name)))
    return BaseCheckpoint(part, key_mapping(part), places, config, processors)


def lost_to_scores(files: BaseCheckpoint) -> list[str]:
    """Returns the tensors of a multimodal base that a model of scores on its text part has no use for."""
    part = files.part
    own = {part.in_base(name) for name in part.text.state_dict()} - {f"{part.head}.weight"}
    return [name for name, loaded in part.files.items() if loaded not in own]


def check_loaded_again(part: TextPart, paths: list[str]) -> None:
    """Raises UserError if peft could not load an adapter again on the base. paths: of the modules with adapters, in the
    text part."""
    check_names_kept(part.base, [part.in_base(path) for path in paths])
