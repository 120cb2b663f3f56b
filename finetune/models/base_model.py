"""The base of a run: the model that it starts from, without the weights.

A recipe names its base in several sections (`model`, `tokens`, `data.image`). Here, and only here, a run reads the
config, the tokenizer and the image processor that these name; then they are handed on as one `Base`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig, PreTrainedTokenizerFast
from transformers.utils import FEATURE_EXTRACTOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME

from finetune.data.chat.renderer import Renderer
from finetune.data.examples import recipe_renderer, row_media
from finetune.errors import UserError
from finetune.models.added_tokens import add_tokens
from finetune.models.base_checkpoint import BaseCheckpoint, base_checkpoint
from finetune.models.checkpoint_files import PROCESSORS, checkpoint_file
from finetune.models.config import model_config, with_steady_tower, without_dropout
from finetune.models.tokenizer import load_tokenizer
from finetune.recipe import Recipe
from finetune.recipe.objective_settings import ObjectiveSettings
from finetune.recipe.schema import Audio, Images, Model, Tokens, Videos

if TYPE_CHECKING:
    from finetune.data.media.expansion import RowMedia


@dataclass(frozen=True)
class Base:
    """Each part is read once, when it is first needed: a plan needs the config alone. Parts raise UserError."""

    model: Model
    tokens: Tokens | None = None  # that the tokenizer gets in addition
    image: tuple[Images | Audio | Videos, ...] | None = None  # settings of each kind of files that rows have
    drops_nothing: bool = False  # see `Recipe.drops_nothing`
    given: PretrainedConfig | None = None  # in place of `config`, for a plan of a model that is not here

    @classmethod
    def of(cls, recipe: Recipe, given: PretrainedConfig | None = None) -> Base:
        """Returns the base of a recipe; reads nothing yet."""
        return cls(recipe.model, recipe.tokens, recipe.data.media, recipe.drops_nothing, given)

    @cached_property
    def published(self) -> PretrainedConfig:
        """The config as its files have it, of a multimodal model see `model_config`."""
        return model_config(self.model)

    @cached_property
    def config(self) -> PretrainedConfig:
        """The config as the objective trains it, see `objective.dropout`."""
        if self.given is not None:
            return self.given
        config = without_dropout(self.published) if self.drops_nothing else self.published
        return config if self.model.train is None else with_steady_tower(config)

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer, with the tokens that are added."""
        return self._read_tokenizer[0]

    @property
    def pieces(self) -> list[list[int]]:
        """Of each added token, the ids that its text had before, see `add_tokens`."""
        return self._read_tokenizer[1]

    @cached_property
    def _read_tokenizer(self) -> tuple[PreTrainedTokenizerFast, list[list[int]]]:
        tokenizer = load_tokenizer(self.model)
        return tokenizer, add_tokens(tokenizer, self.tokens) if self.tokens is not None else []

    @cached_property
    def media(self) -> RowMedia | None:
        """How the model takes the files of rows; None without `data.image`, `data.audio` and `data.video`."""
        return row_media(self.model, self.image, self.tokenizer)

    def renderer(self, objective: ObjectiveSettings) -> Renderer:
        """Returns the renderer of rows for an objective, by the chat template that the tokenizer has now."""
        return recipe_renderer(self.model, objective, self.tokenizer, self.media)

    @cached_property
    def files(self) -> BaseCheckpoint | None:
        """The files of a multimodal model whose text part is trained; None for others."""
        return base_checkpoint(self.model)

    def other(self, name: str) -> Base:
        """Returns the base of another model that is read in the same run, such as a reference."""
        changes = {"name": name, "config": None, "tokenizer": None, "revision": None}
        return Base(self.model.model_copy(update=changes), image=self.image)


def check_same_vocabulary(key: str, name: str | None, base: Base) -> None:
    """Raises UserError if the tokenizer of another model, `key: name`, has other tokens or ids than the recipe's.

    name: None if there is no other model.
    """
    if name is None:
        return
    ours, theirs = base.tokenizer.get_vocab(), base.other(name).tokenizer.get_vocab()
    if ours != theirs:
        token = min(token for token in {*ours, *theirs} if ours.get(token) != theirs.get(token))
        raise UserError(
            f"{key}: {name!r} has another vocabulary than the model that is trained. Their log-probabilities cannot be "
            f"compared: {token!r} is id {theirs.get(token)} there and {ours.get(token)} here. Fix: name a model with "
            "the same tokenizer, such as a larger one of the same family"
        )


def check_same_media(key: str, name: str | None, base: Base) -> None:
    """Raises UserError if another model, `key: name`, takes files as other tokens than the recipe's.

    name: None if there is no other model.
    """
    if name is None or base.media is None:
        return
    other = row_media(base.other(name).model, base.image, base.tokenizer)
    ours, theirs = ([one.settings for one in media.families.values()] for media in (base.media, other or base.media))
    if other is None or ours != theirs:
        raise UserError(
            f"{key}: {name!r} reads images in another way than the trained model. It sees them as other tokens, or by "
            "other settings of its processor. Fix: name a model whose processor has the same settings, such as a "
            "larger one of the same family"
        )


def processor_settings(base: Base) -> dict[str, bytes]:
    """Returns the files with the settings of the base's processors, with the recipe's bounds of an image's size."""
    from finetune.data.media.families import processor_place

    model, files = base.model, dict[str, bytes]()
    places = [processor_place(model, rules) for rules in base.image or ()] or [(model.name, model.revision)]
    for name, revision in places:  # the first of them comes first
        place = Model(name=name, revision=revision)
        found = {file: path.read_bytes() for file in PROCESSORS if (path := checkpoint_file(place, file))}
        files = {**found, **files}
    for family in base.media.families.values() if base.media is not None else ():
        if isinstance(family.rules, Videos):
            files |= _of_videos(family.processor, files)
        elif isinstance(family.rules, Images) and (family.rules.max_pixels or family.rules.min_pixels):
            files |= _of_images(family, files)
    return files


def _of_images(family: Any, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns the files with a recipe's bounds of an image's size. family: `image_families.ImageFamily`."""
    changed, bounds = dict[str, bytes](), family.bounds()
    for file in {FEATURE_EXTRACTOR_NAME, PROCESSOR_NAME} & {*files}:
        settings = json.loads(files[file])
        part = settings if file == FEATURE_EXTRACTOR_NAME else settings.get("image_processor")
        if part is None:
            continue
        part |= bounds
        for bound, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            if part.get(bound) is not None:  # Qwen's older names, which come first
                part[bound] = bounds["size"][edge]
        changed[file] = json.dumps(settings, indent=2).encode() + b"\n"
    return changed


def _of_videos(processor: Any, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns the files with the settings by which a run saw videos. processor: `video_families.VideoProcessor`.

    A file of all processors has them if it has a video processor's, as it comes first; else a file of their own.
    """
    whole = json.loads(files.get(PROCESSOR_NAME, b"{}"))
    name = PROCESSOR_NAME if "video_processor" in whole else VIDEO_PROCESSOR_NAME
    older = json.loads(files.get(VIDEO_PROCESSOR_NAME, b"{}"))
    own = whole["video_processor"] if name == PROCESSOR_NAME else older
    for bound, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if own.get(bound) is not None:  # Qwen2.5-VL's older names, which come first
            own[bound] = processor.size[edge]
    own |= {"do_sample_frames": True, **json.loads(processor.to_json_string())}
    content = whole | {"video_processor": own} if name == PROCESSOR_NAME else own
    return {name: json.dumps(content, indent=2).encode() + b"\n"}
