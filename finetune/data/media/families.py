"""A family's handling of files in rows: the tokens that stand for a file, and the tensors of a forward for it.

Tokens follow from the size of a file alone, so that packing, cache and plan never decode one. What a family does is in
`image_families.py`; which one a model has is in its row of `family_table.py`, the one table of families.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase, ProcessorMixin

from finetune.data.media.family_table import Family, family_of
from finetune.errors import UserError
from finetune.recipe.schema import Images, Model

Features = dict[str, NDArray[Any]]  # output of a processor for one file, by its names


class Written(NamedTuple):
    """A file as text."""

    text: str  # replaces the chat template's text
    count: int  # of the tokens that the model replaces by features of the file


@dataclass(frozen=True)
class FamilySettings:
    """Settings that a family's handling is built from."""

    model: Model
    model_type: str
    row: Family
    token_id: int | None  # the model's, of a file
    rules: Images
    tokenizer: PreTrainedTokenizerBase
    processor: Mapping[str, Any]  # processor_config.json

    def load_processor(self) -> Any:
        """Returns transformers' processor of the row, with the settings of the model's folder. Raises UserError."""
        path, revision = processor_place(self.model, self.rules)
        module, _, name = self.row.processor.rpartition(".")
        try:
            return getattr(transformers_module(module), name).from_pretrained(path, revision=revision)
        except (OSError, ValueError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"data.image: {path!r} has no image processor that can be loaded: {reason}. Fix: name another place of "
                "it as `data.image.processor`"
            ) from None


def transformers_module(name: str) -> Any:
    """Returns a module below `transformers.models`."""
    return importlib.import_module(f"transformers.models.{name}")


class MediaFamily:
    """Handling of the files of one model. Build it with `media_family`."""

    def __init__(
        self,
        settings: FamilySettings,
        processor: Any,
        token: str,
        marks: Sequence[str],
        *more: Any,
        placeholder: str | None = None,
    ):
        """
        Args:
            processor: transformers' processor of one kind of file, with the recipe's sizes
            token: token that the model replaces by features
            marks: other tokens of a file, of lines and borders
            more: further settings that a file's tokens depend on
            placeholder: the chat template's text for a file, `token` unless given
        """
        number: Any = settings.tokenizer.convert_tokens_to_ids(token)
        if number is None or number == settings.tokenizer.unk_token_id:
            raise UserError(
                f"data.image: the tokenizer has no token {token!r}, which stands for images. Fix: use the model's own "
                "tokenizer"
            )
        if number != settings.token_id:
            raise UserError(
                f"data.image: {token!r} is token {number} of the tokenizer, but {settings.token_id} of the "
                "model's config. Fix: use the model's own tokenizer"
            )
        vocabulary: dict[str, int] = settings.tokenizer.get_vocab()
        ids = {int(number), *(vocabulary[mark] for mark in marks if mark in vocabulary)}
        self.processor, self.token, self.placeholder = processor, token, placeholder or token
        self.token_id = int(number)
        self.mark_ids: NDArray[np.int32] = np.array(sorted(ids), np.int32)  # never trained
        # All that a file's tokens depend on.
        self.settings = f"{settings.model_type} {processor.to_json_string()} {more}"

    def write(self, height: int, width: int) -> Written:
        """Returns the text of an image of so many pixels. Raises ValueError for a shape that it cannot take."""
        raise NotImplementedError

    def call(self, image: Any) -> Features:
        """Returns the processor's output for an image in RGB."""
        return dict(self.processor(images=[image], return_tensors="np"))

    def join(self, features: Sequence[Features], input_ids: Tensor) -> dict[str, Tensor]:
        """Returns the tensors of a forward for a row's files. input_ids: (1, T)."""
        raise NotImplementedError


def processor_place(model: Model, images: Images) -> tuple[str, str]:
    """Returns (hub id or folder, revision) of the settings of the processors."""
    assert model.name is not None  # a rule of the recipe
    return (model.name, model.revision or "main") if images.processor is None else (images.processor, "main")


def media_family(model: Model, rules: Images, tokenizer: PreTrainedTokenizerBase) -> MediaFamily:
    """Returns the file handling of the recipe's model. Raises UserError if its family is not in the table."""
    assert model.name is not None  # a rule of the recipe
    try:
        config: Any = AutoConfig.from_pretrained(
            model.name, revision=model.revision or "main", trust_remote_code=model.trust_remote_code
        )
        path, revision = processor_place(model, rules)
        processor = ProcessorMixin.get_processor_dict(path, revision=revision)[0]
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"data.image: {model.name!r} cannot be read: {reason}. Fix: check model.name and data.image.processor"
        ) from None
    kind, row = config.model_type, family_of(config)
    if rules.min_pixels and not row.scales_up:
        raise UserError(f"data.image.min_pixels: only Qwen's processors scale up, {kind!r} has none. Fix: remove it")
    module, _, name = row.handling.rpartition(".")
    build: Callable[[FamilySettings], MediaFamily]
    build = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    return build(FamilySettings(model, kind, row, config.image_token_id, rules, tokenizer, processor))
