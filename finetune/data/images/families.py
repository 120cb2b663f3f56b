"""Families of models: the text of an image in each, and the tensors that its forward takes for it.

    model_type              the chat template writes     an image becomes
    qwen2_5_vl, qwen3_vl    <|image_pad|>                <|image_pad|> for every 2 x 2 patches
    mistral3 (pixtral)      [IMG]                        lines of [IMG], ended by [IMG_BREAK], the last by [IMG_END]
    gemma3                  <start_of_image>             that, 256 x <image_soft_token>, <end_of_image>
    smolvlm, idefics3       <image>                      tiles: <fake_token_around_image> <row_1_col_1> 64 x <image>

Both follow from an image's size alone, so that packing, cache and plan never decode one. The processors are
transformers' own ones for Pillow; their text is written here, as some of their classes need torchvision or num2words.

A new family is a row of `family_table.py` and, if none of these writes its images, a subclass of `ImageFamily` here.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase, ProcessorMixin
from transformers.image_utils import ChannelDimension

from finetune.data.images.family_table import family_of
from finetune.errors import UserError
from finetune.recipe.schema import Images, Model

Pixels = dict[str, NDArray[Any]]  # output of a processor for one image, by its names


class Written(NamedTuple):
    """An image as text."""

    text: str  # replaces the chat template's text
    count: int  # of the tokens that the model replaces by image features


@dataclass(frozen=True)
class _Settings:
    """Settings that a family is built from."""

    model: Model
    model_type: str
    image_token_id: int | None  # the model's
    images: Images
    tokenizer: PreTrainedTokenizerBase
    processor: dict[str, Any]  # processor_config.json

    def image_processor(self, module: str, name: str) -> Any:
        """Returns transformers' image processor with the settings of the model's folder."""
        path, revision = processor_place(self.model, self.images)
        try:
            return getattr(_pil_module(module), name).from_pretrained(path, revision=revision)
        except (OSError, ValueError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"data.image: {path!r} has no image processor that can be loaded: {reason}. Fix: name another place of "
                "it as `data.image.processor`"
            ) from None


def _pil_module(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.image_processing_pil_{name}")


class ImageFamily:
    """Image handling of one model. Build it with `image_family`."""

    def __init__(
        self,
        settings: _Settings,
        processor: Any,
        token: str,
        marks: Sequence[str],
        *more: Any,
        placeholder: str | None = None,
    ):
        """
        Args:
            processor: transformers' image processor for Pillow, with the recipe's sizes
            token: token that the model replaces by image features
            marks: other tokens of an image, of lines and borders
            more: further settings that an image's tokens depend on
            placeholder: the chat template's text for an image, `token` unless given
        """
        number: Any = settings.tokenizer.convert_tokens_to_ids(token)
        if number is None or number == settings.tokenizer.unk_token_id:
            raise UserError(
                f"data.image: the tokenizer has no token {token!r}, which stands for images. Fix: use the model's own "
                "tokenizer"
            )
        if number != settings.image_token_id:
            raise UserError(
                f"data.image: {token!r} is token {number} of the tokenizer, but {settings.image_token_id} of the "
                "model's config. Fix: use the model's own tokenizer"
            )
        vocabulary: dict[str, int] = settings.tokenizer.get_vocab()
        ids = {int(number), *(vocabulary[mark] for mark in marks if mark in vocabulary)}
        self.processor, self.token, self.placeholder = processor, token, placeholder or token
        self.token_id = int(number)
        self.mark_ids: NDArray[np.int32] = np.array(sorted(ids), np.int32)  # never trained
        # All that an image's tokens depend on.
        self.settings = f"{settings.model_type} {processor.to_json_string()} {more}"

    def write(self, height: int, width: int) -> Written:
        """Returns the text of an image of so many pixels. Raises ValueError for a shape that it cannot take."""
        raise NotImplementedError

    def call(self, image: Any) -> Pixels:
        """Returns the processor's output for an image in RGB."""
        return dict(self.processor(images=[image], return_tensors="np"))

    def join(self, pixels: Sequence[Pixels], input_ids: Tensor) -> dict[str, Tensor]:
        """Returns the tensors of a forward for a row's images. input_ids: (1, T)."""
        raise NotImplementedError


def _joined(pixels: Sequence[Pixels], name: str, axis: int = 0) -> Tensor:
    return torch.from_numpy(np.concatenate([of_image[name] for of_image in pixels], axis=axis))


class _Qwen(ImageFamily):
    def __init__(self, settings: _Settings):
        processor = settings.image_processor("qwen2_vl", "Qwen2VLImageProcessorPil")
        images, size = settings.images, processor.size  # areas
        longest = images.max_pixels or size["longest_edge"]
        processor.size = {
            "shortest_edge": images.min_pixels or min(size["shortest_edge"], longest),
            "longest_edge": longest,
        }
        super().__init__(settings, processor, "<|image_pad|>", ("<|vision_start|>", "<|vision_end|>"))

    def write(self, height: int, width: int) -> Written:
        count = self.processor.get_number_of_image_patches(height, width) // self.processor.merge_size**2
        return Written(self.token * count, count)

    def join(self, pixels: Sequence[Pixels], input_ids: Tensor) -> dict[str, Tensor]:
        """pixel_values (P, D) of all patches, image_grid_thw (N, 3)."""
        return {name: _joined(pixels, name) for name in ("pixel_values", "image_grid_thw")}


class _Mistral(ImageFamily):
    def __init__(self, settings: _Settings):
        processor = settings.image_processor("pixtral", "PixtralImageProcessorPil")
        longest = processor.size["longest_edge"]
        processor.size = {"longest_edge": min(longest, math.isqrt(settings.images.max_pixels or longest**2))}
        names = (("image_token", "[IMG]"), ("image_break_token", "[IMG_BREAK]"), ("image_end_token", "[IMG_END]"))
        token, self.line_end, self.image_end = (str(settings.processor.get(name, default)) for name, default in names)
        # Pixels on a side that one token stands for.
        self.side = settings.processor.get("patch_size", 16) * settings.processor.get("spatial_merge_size", 1)
        super().__init__(settings, processor, token, (self.line_end, self.image_end), self.side)

    def write(self, height: int, width: int) -> Written:
        # It wants an image for its shape; this one has no memory.
        shaped: Any = np.broadcast_to(np.uint8(0), (height, width, 3))
        longest, side = self.processor.size["longest_edge"], self.side
        size = _pil_module("pixtral").get_resize_output_image_size(
            shaped, (longest, longest), (side, side), ChannelDimension.LAST
        )
        rows, columns = size[0] // side, size[1] // side
        if not rows * columns:
            raise ValueError("it is so thin that nothing is left of it when its longer side is scaled down")
        text = (self.token * columns + self.line_end) * rows
        return Written(text.removesuffix(self.line_end) + self.image_end, rows * columns)

    def call(self, image: Any) -> Pixels:
        # As its processor calls it.
        return dict(self.processor(images=[image], return_tensors="np", patch_size=self.side))

    def join(self, pixels: Sequence[Pixels], input_ids: Tensor) -> dict[str, Tensor]:
        """pixel_values (N, 3, H, W), zero if an image is smaller than the largest, image_sizes (N, 2)."""
        height, width = (max(of_image["pixel_values"].shape[i] for of_image in pixels) for i in (2, 3))
        padded = np.zeros((len(pixels), 3, height, width), np.float32)
        for into, of_image in zip(padded, pixels, strict=True):
            values = of_image["pixel_values"][0]
            into[:, : values.shape[1], : values.shape[2]] = values
        return {"pixel_values": torch.from_numpy(padded), "image_sizes": _joined(pixels, "image_sizes")}


class _Gemma(ImageFamily):
    def __init__(self, settings: _Settings):
        processor = settings.image_processor("gemma3", "Gemma3ImageProcessorPil")
        name, tokenizer = settings.model.name, cast("Any", settings.tokenizer)
        if settings.images.max_pixels:
            raise UserError("data.image.max_pixels: Gemma 3 sees every image as a square of one size. Fix: remove it")
        if processor.do_pan_and_scan:
            raise UserError(f"{name}: its image processor cuts out crops (do_pan_and_scan). Fix: set that to false")
        try:
            begin, token, end = tokenizer.boi_token, tokenizer.image_token, tokenizer.eoi_token
        except AttributeError as error:
            raise UserError(
                f"{name}: its tokenizer does not name the tokens of an image ({error}). Fix: use the model's own "
                "tokenizer"
            ) from None
        count = settings.processor.get("image_seq_length", 256)
        self.written = Written(f"\n\n{begin}{token * count}{end}\n\n", count)
        super().__init__(settings, processor, token, (begin, end), placeholder=begin)

    def write(self, height: int, width: int) -> Written:
        return self.written

    def call(self, image: Any) -> Pixels:
        return dict(self.processor(images=[image], return_tensors="np", do_pan_and_scan=False))

    def join(self, pixels: Sequence[Pixels], input_ids: Tensor) -> dict[str, Tensor]:
        """pixel_values (N, 3, H, W), token_type_ids (1, T): 1 for tokens of an image, which all see each other."""
        types = (input_ids == self.token_id).to(torch.int64)
        return {"pixel_values": _joined(pixels, "pixel_values"), "token_type_ids": types}


class _Idefics(ImageFamily):
    """Idefics 3 and SmolVLM."""

    def __init__(self, settings: _Settings):
        name = "SmolVLMImageProcessorPil" if settings.model_type == "smolvlm" else "Idefics3ImageProcessorPil"
        processor = settings.image_processor(settings.model_type, name)
        tile, longest = processor.max_image_size["longest_edge"], processor.size["longest_edge"]
        if most := settings.images.max_pixels:  # of a square of tiles
            longest = min(longest, max(math.isqrt(most) // tile, 1) * tile)
        processor.size = {"longest_edge": longest}
        self.fake, self.overview = "<fake_token_around_image>", "<global-img>"
        self.length = settings.processor.get("image_seq_len", 169)  # tokens of a tile
        super().__init__(settings, processor, "<image>", (self.fake, self.overview), self.length)

    def write(self, height: int, width: int) -> Written:
        processor = self.processor
        rows = columns = 0  # of tiles, if the image is not one
        if processor.do_image_splitting:
            # As their processors resize: `get_number_of_image_patches` rounds otherwise if the longest side is not a
            # whole number of tiles.
            if processor.do_resize:
                resized = _pil_module("idefics3").get_resize_output_image_size
                height, width = resized(np.broadcast_to(np.uint8(0), (height, width)), processor.size["longest_edge"])
            side, ratio = processor.max_image_size["longest_edge"], width / height
            if width >= height:
                columns = math.ceil(width / side)
                rows = math.ceil(int(columns * side / ratio) / side)
            else:
                rows = math.ceil(height / side)
                columns = math.ceil(int(rows * side * ratio) / side)
            if max(rows, columns) == 1:
                rows = columns = 0
        tile = self.token * self.length
        lines = [
            "".join(f"{self.fake}<row_{i + 1}_col_{j + 1}>{tile}" for j in range(columns)) + "\n" for i in range(rows)
        ]
        text = "".join(lines) + ("\n" if lines else "") + f"{self.fake}{self.overview}{tile}{self.fake}"
        return Written(text, (rows * columns + 1) * self.length)

    def call(self, image: Any) -> Pixels:
        return dict(self.processor(images=[[image]], return_tensors="np", return_row_col_info=True))

    def join(self, pixels: Sequence[Pixels], input_ids: Tensor) -> dict[str, Tensor]:
        """pixel_values (1, C, 3, H, W) of all tiles, all of one size, pixel_attention_mask (1, C, H, W)."""
        return {name: _joined(pixels, name, axis=1) for name in ("pixel_values", "pixel_attention_mask")}


_HANDLING: dict[str, Callable[[_Settings], ImageFamily]] = {
    "qwen": _Qwen,
    "mistral": _Mistral,
    "gemma": _Gemma,
    "idefics": _Idefics,
}


def processor_place(model: Model, images: Images) -> tuple[str, str]:
    """Returns (hub id or folder, revision) of the settings of the processors."""
    assert model.name is not None  # a rule of the recipe
    return (model.name, model.revision or "main") if images.processor is None else (images.processor, "main")


def image_family(model: Model, images: Images, tokenizer: PreTrainedTokenizerBase) -> ImageFamily:
    """Returns the image handling of the recipe's model. Raises UserError if its family is not in the table."""
    assert model.name is not None  # a rule of the recipe
    try:
        config: Any = AutoConfig.from_pretrained(
            model.name, revision=model.revision or "main", trust_remote_code=model.trust_remote_code
        )
        path, revision = processor_place(model, images)
        processor = ProcessorMixin.get_processor_dict(path, revision=revision)[0]
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"data.image: {model.name!r} cannot be read: {reason}. Fix: check model.name and data.image.processor"
        ) from None
    kind, handling = config.model_type, family_of(config).handling
    if images.min_pixels and handling != "qwen":
        raise UserError(f"data.image.min_pixels: only Qwen's processors scale up, {kind!r} has none. Fix: remove it")
    return _HANDLING[handling](_Settings(model, kind, config.image_token_id, images, tokenizer, processor))
