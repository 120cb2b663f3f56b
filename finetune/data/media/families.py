"""A family's handling of files in rows: the tokens that stand for a file, and the tensors of a forward for it.

Tokens follow from the size of a file alone, so that packing, cache and plan never decode one. What a family does is in
`image_families.py`, `audio_families.py` and `video_families.py`; which one a model has, in `family_table.py`.
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

from finetune.data.media.family_table import Family, family_of, file_token, part_that_hears
from finetune.data.media.stored_files import FileRules
from finetune.data.samples import MediaKind, Medium
from finetune.errors import UserError
from finetune.recipe.schema import Audio, Images, Model, Videos

Features = dict[str, NDArray[Any]]  # output of a processor for one file, by its names


class Written(NamedTuple):
    """A file as text."""

    text: str  # replaces the chat template's text
    count: int  # of the tokens that the model replaces by features of the file


@dataclass(frozen=True)
class FamilySettings:
    """Settings that a family's handling is built from."""

    model: Model
    config: Any  # of the whole model
    row: Family
    rules: Any  # `FileRules` of the row's kind
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
                f"data.{self.row.kind}: {path!r} has no {self.row.kind} processor that can be loaded: "
                f"{reason}. Fix: name another place of it as `data.{self.row.kind}.processor`"
            ) from None


_TOKEN_IDS = ("image_token_id", "video_token_id", "audio_token_id")  # of a file, in transformers' configs
_NAMES = {"image": "images", "audio": "sound", "video": "videos"}


def transformers_module(name: str) -> Any:
    """Returns a module below `transformers.models`."""
    return importlib.import_module(f"transformers.models.{name}")


class MediaFamily:
    """Handling of the files of one kind of one model. Build it with `media_family`."""

    type_id = 0  # of its tokens in `mm_token_type_ids` of transformers' own forward; 0: that reads none of them
    # Of a clip while its features are made: samples, spectrum (complex), bands, and copies of them.
    bytes_a_sample = 48

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
        row = settings.row
        number: Any = settings.tokenizer.convert_tokens_to_ids(token)
        if number is None or number == settings.tokenizer.unk_token_id:
            raise UserError(
                f"data.{row.kind}: the tokenizer has no token {token!r}, which stands for {_NAMES[row.kind]}. Fix: use "
                "the model's own tokenizer"
            )
        if number != (of_model := file_token(settings.config, row)):
            raise UserError(
                f"data.{row.kind}: {token!r} is token {number} of the tokenizer, but {of_model} of the "
                "model's config. Fix: use the model's own tokenizer"
            )
        vocabulary: dict[str, int] = settings.tokenizer.get_vocab()
        ids = {int(number), *(vocabulary[mark] for mark in marks if mark in vocabulary)}
        self.kind: MediaKind = row.kind
        self.takes_one = row.alone is not None  # a document has one file at most
        self.rules: Any = settings.rules
        self.processor, self.token, self.placeholder = processor, token, placeholder or token
        self.token_id = int(number)
        self.mark_ids: NDArray[np.int32] = np.array(sorted(ids), np.int32)  # never trained
        # Of files of every kind that the model takes: nothing may write them, as a forward would look for features.
        self.file_ids = sorted({getattr(settings.config, key, number) for key in _TOKEN_IDS} - {None})
        # All that a file's tokens depend on.
        self.settings = f"{settings.config.model_type} {processor.to_json_string()} {more}"

    def find(self, reference: str | bytes, data_file: str) -> Any:
        """Returns a file as it is stored, with its size. Raises BadRow."""
        raise NotImplementedError

    def written(self, stored: Any) -> Written:
        """Returns the text of a file that `find` returned. Raises BadRow for a size that the model cannot take."""
        raise NotImplementedError

    def placed(self, stored: Any, begin: int, end: int) -> Medium:
        """Returns a file that `find` returned, at its tokens of a sequence."""
        raise NotImplementedError

    def whole(self, input_ids: NDArray[np.int32], begin: int, end: int) -> tuple[int, int]:
        """Returns the tokens [begin, end) of a file of a sequence. begin, end: of those that the model fills."""
        return begin, end

    def read(self, medium: Any) -> Features:
        """Returns the features of a file. Raises UserError if it is damaged, or not the one that was tokenized."""
        raise NotImplementedError

    def kept(self, medium: Any) -> Features:
        """Returns what a cache keeps of a file: its features, or less from which they are made. Raises as `read`."""
        return self.read(medium)

    def from_kept(self, kept: Features, medium: Any) -> Features:
        """Returns the features of a file from what a cache has kept of it."""
        return kept

    def join(self, features: Sequence[Features], input_ids: Tensor) -> dict[str, Tensor]:
        """Returns the tensors of a forward for a row's files. input_ids: (1, T)."""
        raise NotImplementedError


def processor_place(model: Model, rules: FileRules) -> tuple[str, str]:
    """Returns (hub id or folder, revision) of the settings of the processors."""
    assert model.name is not None  # a rule of the recipe
    return (model.name, model.revision or "main") if rules.processor is None else (rules.processor, "main")


def media_family(model: Model, rules: FileRules, tokenizer: PreTrainedTokenizerBase) -> MediaFamily:
    """Returns the file handling of the recipe's model. Raises UserError if its family is not in the table."""
    assert model.name is not None  # a rule of the recipe
    kind: MediaKind = "audio" if isinstance(rules, Audio) else "video" if isinstance(rules, Videos) else "image"
    try:
        whole = AutoConfig.from_pretrained(
            model.name, revision=model.revision or "main", trust_remote_code=model.trust_remote_code
        )
        config: Any = part_that_hears(whole)
        path, revision = processor_place(model, rules)
        processor = ProcessorMixin.get_processor_dict(path, revision=revision)[0]
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"data.{kind}: {model.name!r} cannot be read: {reason}. Fix: check model.name and data.{kind}.processor"
        ) from None
    name, row = config.model_type, family_of(config, kind)
    if row.kind != kind or getattr(config, row.config, None) is None:
        raise UserError(
            f"data.{kind}: {name!r} is trained on {_NAMES[row.kind]} here, not on {_NAMES[kind]}. Fix: use "
            f"`data.{row.kind}` alone, or another model"
        )
    if isinstance(rules, Images) and rules.min_pixels and not row.scales_up:
        raise UserError(f"data.image.min_pixels: only Qwen's processors scale up, {name!r} has none. Fix: remove it")
    module, _, handling = row.handling.rpartition(".")
    build: Callable[[FamilySettings], MediaFamily]
    build = getattr(importlib.import_module(f"{__package__}.{module}"), handling)
    return build(FamilySettings(model, config, row, rules, tokenizer, processor))
