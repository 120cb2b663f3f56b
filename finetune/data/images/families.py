"""Families of models: the text of an image in each, and the tensors that its forward takes for it.

    model_type              the chat template writes     an image becomes
    qwen2_5_vl, qwen3_vl    <|image_pad|>                <|image_pad|> for every 2 x 2 patches
    mistral3 (pixtral)      [IMG]                        lines of [IMG], ended by [IMG_BREAK], the last by [IMG_END]
    gemma3                  <start_of_image>             that, 256 x <image_soft_token>, <end_of_image>
    smolvlm, idefics3       <image>                      tiles: <fake_token_around_image> <row_1_col_1> 64 x <image>

Both follow from an image's size alone, so that packing, cache and plan never decode one. The processors are
transformers' own ones for Pillow; their text is written here, as some of their classes need torchvision or num2words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase, ProcessorMixin
from transformers.image_utils import ChannelDimension

from finetune.errors import UserError
from finetune.recipe.schema import Images, Model


class Written(NamedTuple):
    """An image as text."""

    text: str  # replaces the chat template's text
    count: int  # of the tokens that the model replaces by image features


Pixels = dict[str, NDArray[Any]]  # output of a processor for one image, by its names


@dataclass(frozen=True)
class ImageFamily:
    """Image handling of one model. Build it with `image_family`."""

    model_type: str
    processor: Any  # transformers' image processor for Pillow, with the recipe's sizes
    placeholder: str  # the chat template's text for an image
    token: str  # whose places the model fills
    token_id: int
    marks: frozenset[int]  # ids of an image's tokens, of lines and borders too: never trained
    write: Callable[[int, int], Written]  # (height, width) in pixels -> text; ValueError for a shape it cannot take
    call: Callable[[Any], Pixels]  # of an image in RGB
    join: Callable[[Sequence[Pixels], Tensor], dict[str, Tensor]]  # of a row's images and ids (1, T)
    settings: str  # all that an image's tokens depend on

    @cached_property
    def mark_ids(self) -> NDArray[np.int32]:
        return np.array(sorted(self.marks), np.int32)


# --- Qwen


def _write_patches(processor: Any, token: str, height: int, width: int) -> Written:
    patches = processor.get_number_of_image_patches(height, width)
    count = patches // processor.merge_size**2
    return Written(token * count, count)


def _call(processor: Any, image: Any, **arguments: Any) -> Pixels:
    return dict(processor(images=[image], return_tensors="np", **arguments))


def _join_patches(pixels: Sequence[Pixels], _: Tensor) -> dict[str, Tensor]:
    """pixel_values (P, D) of all patches, image_grid_thw (N, 3)."""
    return {name: _joined(pixels, name) for name in ("pixel_values", "image_grid_thw")}


def _joined(pixels: Sequence[Pixels], name: str) -> Tensor:
    return torch.from_numpy(np.concatenate([of_image[name] for of_image in pixels]))


def _qwen(load: _FamilyLoader) -> ImageFamily:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor: Any = load.processor(Qwen2VLImageProcessorPil)
    size = {name: processor.size[name] for name in ("shortest_edge", "longest_edge")}  # areas
    size["longest_edge"] = load.images.max_pixels or size["longest_edge"]
    size["shortest_edge"] = load.images.min_pixels or min(size["shortest_edge"], size["longest_edge"])
    processor.size = size
    token = "<|image_pad|>"
    marks = ("<|vision_start|>", "<|vision_end|>")
    return load.family(
        processor,
        token,
        token,
        marks,
        partial(_write_patches, processor, token),
        partial(_call, processor),
        _join_patches,
    )


# --- Mistral 3


def _write_lines(processor: Any, tokens: tuple[str, str, str], side: int, height: int, width: int) -> Written:
    """side: pixels that one token stands for."""
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

    # It wants an image for its shape; this one has no memory.
    shaped: Any = np.broadcast_to(np.uint8(0), (height, width, 3))
    longest = processor.size["longest_edge"]
    size = get_resize_output_image_size(shaped, (longest, longest), (side, side), ChannelDimension.LAST)
    rows, columns = size[0] // side, size[1] // side
    if not rows * columns:
        raise ValueError("it is so thin that nothing is left of it where its longer side is scaled down")
    token, line_end, image_end = tokens
    text = (token * columns + line_end) * rows
    return Written(text.removesuffix(line_end) + image_end, rows * columns)


def _join_sizes(pixels: Sequence[Pixels], _: Tensor) -> dict[str, Tensor]:
    """pixel_values (N, 3, H, W), zero if an image is smaller than the largest, image_sizes (N, 2)."""
    height, width = (max(of_image["pixel_values"].shape[i] for of_image in pixels) for i in (2, 3))
    padded = np.zeros((len(pixels), 3, height, width), np.float32)
    for into, of_image in zip(padded, pixels, strict=True):
        values = of_image["pixel_values"][0]
        into[:, : values.shape[1], : values.shape[2]] = values
    return {"pixel_values": torch.from_numpy(padded), "image_sizes": _joined(pixels, "image_sizes")}


def _mistral(load: _FamilyLoader) -> ImageFamily:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    processor: Any = load.processor(PixtralImageProcessorPil)
    longest = processor.size["longest_edge"]
    processor.size = {"longest_edge": min(longest, math.isqrt(load.images.max_pixels or longest**2))}
    names = (("image_token", "[IMG]"), ("image_break_token", "[IMG_BREAK]"), ("image_end_token", "[IMG_END]"))
    token, line_end, image_end = (str(load.settings.get(name, default)) for name, default in names)
    side = load.settings.get("patch_size", 16) * load.settings.get("spatial_merge_size", 1)
    write = partial(_write_lines, processor, (token, line_end, image_end), side)
    call = partial(_call, processor, patch_size=side)  # as its processor calls it
    return load.family(processor, token, token, (line_end, image_end), write, call, _join_sizes, side)


# --- Gemma 3


def _write_fixed(written: Written, height: int, width: int) -> Written:
    return written


def _join_squares(token_id: int, pixels: Sequence[Pixels], input_ids: Tensor) -> dict[str, Tensor]:
    """pixel_values (N, 3, H, W), token_type_ids (1, T): 1 for tokens of an image, which all see each other."""
    return {
        "pixel_values": _joined(pixels, "pixel_values"),
        "token_type_ids": (input_ids == token_id).to(torch.int64),
    }


def _gemma(load: _FamilyLoader) -> ImageFamily:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    processor: Any = load.processor(Gemma3ImageProcessorPil)
    if load.images.max_pixels:
        raise UserError("data.image.max_pixels: Gemma 3 sees every image as a square of one size: remove it")
    if processor.do_pan_and_scan:
        raise UserError(f"{load.model.name}: its image processor cuts out crops (do_pan_and_scan): set that to false")
    tokenizer: Any = load.tokenizer
    try:
        begin, token, end = tokenizer.boi_token, tokenizer.image_token, tokenizer.eoi_token
    except AttributeError as error:
        raise UserError(f"{load.model.name}: its tokenizer does not name the tokens of an image ({error})") from None
    count = load.settings.get("image_seq_length", 256)
    written = Written(f"\n\n{begin}{token * count}{end}\n\n", count)
    join = partial(_join_squares, load.id_of(token))
    call = partial(_call, processor, do_pan_and_scan=False)
    return load.family(processor, begin, token, (begin, end), partial(_write_fixed, written), call, join)


# --- SmolVLM, Idefics 3


def _write_tiles(processor: Any, names: tuple[str, str, str], length: int, height: int, width: int) -> Written:
    """length: tokens of a tile."""
    fake, overview, token = names
    rows, columns = _tiles(processor, height, width)
    tiles = [
        "".join(f"{fake}<row_{i + 1}_col_{j + 1}>{token * length}" for j in range(columns)) + "\n" for i in range(rows)
    ]
    text = "".join(tiles) + ("\n" if tiles else "") + f"{fake}{overview}{token * length}{fake}"
    return Written(text, (rows * columns + 1) * length)


_LARGEST_SIDE = 4096  # pixels, of their processors


def _tiles(processor: Any, height: int, width: int) -> tuple[int, int]:
    """(rows, columns) of tiles, (0, 0) if an image is one.

    As their processors resize: `get_number_of_image_patches` rounds otherwise if the longest side is not a whole
    number of tiles.
    """
    if not processor.do_image_splitting:
        return 0, 0
    tile, longest = processor.max_image_size["longest_edge"], processor.size["longest_edge"]
    ratio, is_wide = width / height, width >= height
    if processor.do_resize:
        # The longer side becomes `longest`, the other follows, rounded up to an even number of pixels; then a bound.
        other = int(longest / ratio) if is_wide else int(longest * ratio)
        sides = longest, max(other + other % 2, 1)
        if sides[0] > _LARGEST_SIDE:
            shrunk = sides[0] / sides[1]
            sides = _LARGEST_SIDE, max(int(_LARGEST_SIDE / shrunk if is_wide else _LARGEST_SIDE * (1 / shrunk)), 1)
        height, width = sides[::-1] if is_wide else sides
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return (height // tile, width // tile) if max(height, width) > tile else (0, 0)


def _call_tiles(processor: Any, image: Any) -> Pixels:
    return _call(processor, [image], return_row_col_info=True)


def _join_tiles(pixels: Sequence[Pixels], _: Tensor) -> dict[str, Tensor]:
    """pixel_values (1, C, 3, H, W) of all tiles, all of one size, pixel_attention_mask (1, C, H, W)."""
    names = ("pixel_values", "pixel_attention_mask")
    return {name: torch.from_numpy(np.concatenate([one[name] for one in pixels], axis=1)) for name in names}


def _idefics(load: _FamilyLoader) -> ImageFamily:
    if load.model_type == "smolvlm":
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil as Class
    else:
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil as Class

    processor: Any = load.processor(Class)
    tile, longest = processor.max_image_size["longest_edge"], processor.size["longest_edge"]
    if load.images.max_pixels:  # of a square of tiles
        longest = min(longest, max(math.isqrt(load.images.max_pixels) // tile, 1) * tile)
    processor.size = {"longest_edge": longest}
    fake, overview, token = "<fake_token_around_image>", "<global-img>", "<image>"
    length = load.settings.get("image_seq_len", 169)
    write = partial(_write_tiles, processor, (fake, overview, token), length)
    call = partial(_call_tiles, processor)
    return load.family(processor, token, token, (fake, overview), write, call, _join_tiles, length)


FAMILIES: dict[str, Callable[[_FamilyLoader], ImageFamily]] = {
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "mistral3": _mistral,
    "gemma3": _gemma,
    "smolvlm": _idefics,
    "idefics3": _idefics,
}
_SCALES_UP = ("qwen2_5_vl", "qwen3_vl")


@dataclass(frozen=True)
class _FamilyLoader:
    """Inputs that a family is built from."""

    model: Model
    model_type: str
    image_token_id: int | None  # the model's
    images: Images
    tokenizer: PreTrainedTokenizerBase
    settings: dict[str, Any]  # of processor_config.json

    def processor(self, cls: Any) -> Any:
        """Returns transformers' image processor with the settings of the model's folder."""
        name, revision = processor_place(self.model, self.images)
        try:
            return cls.from_pretrained(name, revision=revision)
        except (OSError, ValueError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"data.image: {name!r} has no image processor that can be loaded: {reason}; `data.image.processor` "
                "names another place of it"
            ) from None

    def id_of(self, token: str) -> int:
        number: Any = self.tokenizer.convert_tokens_to_ids(token)
        if number is None or number == self.tokenizer.unk_token_id:
            raise UserError(
                f"data.image: the tokenizer has no token {token!r}, which stands for images: is it the model's?"
            )
        return int(number)

    def family(
        self,
        processor: Any,
        placeholder: str,
        token: str,
        marks: Sequence[str],
        write: Callable[[int, int], Written],
        call: Callable[[Any], Pixels],
        join: Callable[[Sequence[Pixels], Tensor], dict[str, Tensor]],
        *more: Any,
    ) -> ImageFamily:
        token_id = self.id_of(token)
        if token_id != self.image_token_id:
            raise UserError(
                f"data.image: {token!r} is token {token_id} of the tokenizer, but the model's config says "
                f"{self.image_token_id}: their folders do not belong together"
            )
        known: dict[str, int] = self.tokenizer.get_vocab()
        ids = frozenset([token_id, *(known[mark] for mark in marks if mark in known)])
        settings = f"{self.model_type} {processor.to_json_string()} {more}"
        return ImageFamily(self.model_type, processor, placeholder, token, token_id, ids, write, call, join, settings)


def processor_place(model: Model, images: Images) -> tuple[str, str]:
    """Returns (hub id or folder, revision) of the settings of the processors."""
    assert model.name is not None  # a rule of the recipe
    return (model.name, model.revision or "main") if images.processor is None else (images.processor, "main")


def image_family(model: Model, images: Images, tokenizer: PreTrainedTokenizerBase) -> ImageFamily:
    """Returns the image handling of the recipe's model. Raises UserError if it takes no images, or its family is not
    in `FAMILIES`."""
    assert model.name is not None  # a rule of the recipe
    revision = model.revision or "main"
    try:
        config: Any = AutoConfig.from_pretrained(
            model.name, revision=revision, trust_remote_code=model.trust_remote_code
        )
        name, of_processor = processor_place(model, images)
        settings = ProcessorMixin.get_processor_dict(name, revision=of_processor)[0]
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"data.image: {model.name!r} cannot be read: {reason}") from None
    kind = config.model_type
    if kind not in FAMILIES:
        raise UserError(
            f"data.image: {kind!r} is not among the models that are trained on images here ({', '.join(FAMILIES)}); "
            "without `data.image` its text part is trained"
        )
    if images.min_pixels and kind not in _SCALES_UP:
        raise UserError(f"data.image.min_pixels: only Qwen's processors scale up, {kind!r} has none: remove it")
    return FAMILIES[kind](_FamilyLoader(model, kind, config.image_token_id, images, tokenizer, settings))
