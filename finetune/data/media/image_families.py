"""Images as text, and the tensors that a forward takes for them, of each family.

    model_type              the chat template writes     an image becomes
    qwen2_5_vl, qwen3_vl    <|image_pad|>                <|image_pad|> for every 2 x 2 patches
    mistral3 (pixtral)      [IMG]                        lines of [IMG], ended by [IMG_BREAK], the last by [IMG_END]
    gemma3                  <start_of_image>             that, 256 x <image_soft_token>, <end_of_image>
    gemma4                  <|image|>                    <|image>, <|image|> for every 3 x 3 patches, <image|>
    smolvlm, idefics3       <image>                      tiles: <fake_token_around_image> <row_1_col_1> 64 x <image>

Both follow from an image's size alone, so that packing, cache and plan never decode one. The processors are
transformers' own ones for Pillow; their text is written here, as some of their classes need torchvision or num2words.

A new family is a row of `family_table.py` and, if none of these writes its images, a subclass of `ImageFamily` here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.image_utils import ChannelDimension

from finetune.data.media.families import FamilySettings, Features, MediaFamily, Written, transformers_module
from finetune.data.media.image_files import BROKEN, StoredImage, decode, find_image
from finetune.data.samples import BadRow, Image
from finetune.errors import UserError


class ImageFamily(MediaFamily):
    """Handling of images. Subclasses say how an image of some size is written, and join the pixels of several."""

    def find(self, reference: str | bytes, data_file: str) -> StoredImage:
        return find_image(reference, self.rules, data_file)

    def written(self, stored: StoredImage) -> Written:
        try:
            return self.write(stored.height, stored.width)
        except ValueError as error:
            raise BadRow(f"an image of {stored.width} x {stored.height} pixels cannot be used: {error}") from None

    def placed(self, stored: StoredImage, begin: int, end: int) -> Image:
        return Image(stored.source, stored.height, stored.width, begin, end)

    def read(self, medium: Image) -> Features:
        name = medium.source if isinstance(medium.source, str) else "an image in the data"
        try:
            decoded = decode(medium.source)
        except BROKEN as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(
                f"{name}: cannot be decoded: {reason}. Fix: restore it; `data.image: {{verify: pixels}}` finds such "
                "images before the run, and with `data.on_bad_row: skip` leaves their rows out"
            ) from None
        if decoded.size != (medium.width, medium.height):
            raise UserError(
                f"{name}: {decoded.width} x {decoded.height} pixels, but it had {medium.width} x {medium.height} when "
                "its row was tokenized. Fix: put it back, or `finetune cache clean` and start again"
            )
        return self.call(decoded)

    def write(self, height: int, width: int) -> Written:
        """Returns the text of an image of so many pixels. Raises ValueError for a shape that it cannot take."""
        raise NotImplementedError

    def bounds(self) -> dict[str, Any]:
        """Returns the processor's settings of an image's size, as the recipe has them."""
        return {"size": dict(self.processor.size)}

    def call(self, image: Any) -> Features:
        """Returns the processor's output for an image in RGB."""
        return dict(self.processor(images=[image], return_tensors="np"))


def _joined(features: Sequence[Features], name: str, axis: int = 0) -> Tensor:
    return torch.from_numpy(np.concatenate([of_image[name] for of_image in features], axis=axis))


class QwenImages(ImageFamily):
    type_id = 1

    def __init__(self, settings: FamilySettings):
        processor = settings.load_processor()
        rules, size = settings.rules, processor.size  # areas
        longest = rules.max_pixels or size["longest_edge"]
        processor.size = {
            "shortest_edge": rules.min_pixels or min(size["shortest_edge"], longest),
            "longest_edge": longest,
        }
        super().__init__(settings, processor, settings.row.placeholder, ("<|vision_start|>", "<|vision_end|>"))

    def write(self, height: int, width: int) -> Written:
        count = self.processor.get_number_of_image_patches(height, width) // self.processor.merge_size**2
        return Written(self.token * count, count)

    def join(self, features: Sequence[Features], input_ids: Tensor) -> dict[str, Tensor]:
        """pixel_values (P, D) of all patches, image_grid_thw (N, 3)."""
        return {name: _joined(features, name) for name in ("pixel_values", "image_grid_thw")}


class MistralImages(ImageFamily):
    def __init__(self, settings: FamilySettings):
        processor = settings.load_processor()
        longest = processor.size["longest_edge"]
        processor.size = {"longest_edge": min(longest, math.isqrt(settings.rules.max_pixels or longest**2))}
        names = (
            ("image_token", settings.row.placeholder),
            ("image_break_token", "[IMG_BREAK]"),
            ("image_end_token", "[IMG_END]"),
        )
        token, self.line_end, self.image_end = (str(settings.processor.get(name, default)) for name, default in names)
        # Pixels on a side that one token stands for.
        self.side = settings.processor.get("patch_size", 16) * settings.processor.get("spatial_merge_size", 1)
        super().__init__(settings, processor, token, (self.line_end, self.image_end), self.side)

    def write(self, height: int, width: int) -> Written:
        # It wants an image for its shape; this one has no memory.
        shaped: Any = np.broadcast_to(np.uint8(0), (height, width, 3))
        longest, side = self.processor.size["longest_edge"], self.side
        size = transformers_module("pixtral.image_processing_pil_pixtral").get_resize_output_image_size(
            shaped, (longest, longest), (side, side), ChannelDimension.LAST
        )
        rows, columns = size[0] // side, size[1] // side
        if not rows * columns:
            raise ValueError("it is so thin that nothing is left of it when its longer side is scaled down")
        text = (self.token * columns + self.line_end) * rows
        return Written(text.removesuffix(self.line_end) + self.image_end, rows * columns)

    def call(self, image: Any) -> Features:
        # As its processor calls it.
        return dict(self.processor(images=[image], return_tensors="np", patch_size=self.side))

    def join(self, features: Sequence[Features], input_ids: Tensor) -> dict[str, Tensor]:
        """pixel_values (N, 3, H, W), zero if an image is smaller than the largest, image_sizes (N, 2)."""
        height, width = (max(of_image["pixel_values"].shape[i] for of_image in features) for i in (2, 3))
        padded = np.zeros((len(features), 3, height, width), np.float32)
        for into, of_image in zip(padded, features, strict=True):
            values = of_image["pixel_values"][0]
            into[:, : values.shape[1], : values.shape[2]] = values
        return {"pixel_values": torch.from_numpy(padded), "image_sizes": _joined(features, "image_sizes")}


class GemmaImages(ImageFamily):
    def __init__(self, settings: FamilySettings):
        processor = settings.load_processor()
        name = settings.model.name
        if settings.rules.max_pixels:
            raise UserError("data.image.max_pixels: Gemma 3 sees every image as a square of one size. Fix: remove it")
        if processor.do_pan_and_scan:
            raise UserError(f"{name}: its image processor cuts out crops (do_pan_and_scan). Fix: set that to false")
        begin, token, end = image_marks(settings)
        count = settings.processor.get("image_seq_length", 256)
        self.of_each = Written(f"\n\n{begin}{token * count}{end}\n\n", count)
        super().__init__(settings, processor, token, (begin, end), placeholder=begin)

    def write(self, height: int, width: int) -> Written:
        return self.of_each

    def call(self, image: Any) -> Features:
        return dict(self.processor(images=[image], return_tensors="np", do_pan_and_scan=False))

    def join(self, features: Sequence[Features], input_ids: Tensor) -> dict[str, Tensor]:
        """pixel_values (N, 3, H, W), token_type_ids (1, T): 1 for tokens of an image, which all see each other."""
        types = (input_ids == self.token_id).to(torch.int64)
        return {"pixel_values": _joined(features, "pixel_values"), "token_type_ids": types}


SOFT_TOKENS = (70, 140, 280, 560, 1120)  # of an image or a frame, at most: those that Gemma 4's processors take


def most_soft_tokens(key: str, most: int | None, stored: int, side: int) -> int:
    """Returns the largest number of tokens that a picture of `most` pixels may have. side: pixels of a token; stored:
    in the model's folder. Raises UserError if there is none."""
    if most is None:
        return stored
    able = [count for count in SOFT_TOKENS if count * side**2 <= most]
    if not able:
        raise UserError(
            f"{key}: Gemma 4 scales every picture to at least {SOFT_TOKENS[0]} tokens. Fix: set it to "
            f"{SOFT_TOKENS[0] * side**2} or more"
        )
    return able[-1]


def scaled_picture(height: int, width: int, look: Any) -> tuple[int, int]:
    """Returns (height, width) that Gemma 4 scales a picture to: as close to its most tokens as its shape allows. look:
    a processor. Raises ValueError for a shape that it cannot take."""
    scaled = transformers_module("gemma4.image_processing_pil_gemma4").get_aspect_ratio_preserving_size
    kernel = look.pooling_kernel_size
    return scaled(height, width, look.patch_size, look.max_soft_tokens * kernel**2, kernel)


class Gemma4Images(ImageFamily):
    type_id = 1

    def __init__(self, settings: FamilySettings):
        processor = settings.load_processor()
        self.side = processor.patch_size * processor.pooling_kernel_size  # pixels of a token
        processor.max_soft_tokens = most_soft_tokens(
            "data.image.max_pixels", settings.rules.max_pixels, processor.max_soft_tokens, self.side
        )
        self.begin, token, self.end = image_marks(settings)
        super().__init__(settings, processor, token, (self.begin, self.end))

    def write(self, height: int, width: int) -> Written:
        height, width = scaled_picture(height, width, self.processor)
        count = height * width // self.side**2
        return Written(f"{self.begin}{self.token * count}{self.end}", count)

    def bounds(self) -> dict[str, Any]:
        return {"max_soft_tokens": self.processor.max_soft_tokens}

    def join(self, features: Sequence[Features], input_ids: Tensor) -> dict[str, Tensor]:
        """pixel_values (N, P, D) of patches, image_position_ids (N, P, 2): columns and rows, -1 behind an image."""
        return {name: _joined(features, name) for name in ("pixel_values", "image_position_ids")}


def image_marks(settings: FamilySettings) -> tuple[str, str, str]:
    """Returns the tokens of an image that a tokenizer of Gemma names: before, of, and behind it. Raises UserError."""
    tokenizer: Any = settings.tokenizer
    try:
        return tokenizer.boi_token, tokenizer.image_token, tokenizer.eoi_token
    except AttributeError as error:
        raise UserError(
            f"{settings.model.name}: its tokenizer does not name the tokens of an image ({error}). Fix: use the "
            "model's own tokenizer"
        ) from None


class IdeficsImages(ImageFamily):
    """Idefics 3 and SmolVLM."""

    def __init__(self, settings: FamilySettings):
        processor = settings.load_processor()
        tile, longest = processor.max_image_size["longest_edge"], processor.size["longest_edge"]
        if most := settings.rules.max_pixels:  # of a square of tiles
            longest = min(longest, max(math.isqrt(most) // tile, 1) * tile)
        processor.size = {"longest_edge": longest}
        self.fake, self.overview = "<fake_token_around_image>", "<global-img>"
        self.length = settings.processor.get("image_seq_len", 169)  # tokens of a tile
        super().__init__(settings, processor, settings.row.placeholder, (self.fake, self.overview), self.length)

    def write(self, height: int, width: int) -> Written:
        processor = self.processor
        rows = columns = 0  # of tiles, if the image is not one
        if processor.do_image_splitting:
            # As their processors resize: `get_number_of_image_patches` rounds otherwise if the longest side is not a
            # whole number of tiles.
            if processor.do_resize:
                resized = transformers_module("idefics3.image_processing_pil_idefics3").get_resize_output_image_size
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

    def call(self, image: Any) -> Features:
        return dict(self.processor(images=[[image]], return_tensors="np", return_row_col_info=True))

    def join(self, features: Sequence[Features], input_ids: Tensor) -> dict[str, Tensor]:
        """pixel_values (1, C, 3, H, W) of all tiles, all of one size, pixel_attention_mask (1, C, H, W)."""
        return {name: _joined(features, name, axis=1) for name in ("pixel_values", "pixel_attention_mask")}
