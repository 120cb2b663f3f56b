"""The families of models that are trained on images: one row each, by `model_type`.

A row says how a file becomes tokens (the class of `image_families.py` that writes them, transformers' processor, the
placeholder) and where tower and projector are in the model (models/towers.py). Only names and functions are here: the
processors take a second to import. Families that are not in the table are refused: if their forward mixes the files of
a row, or sees them by another attention, they would be trained wrongly in silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from finetune.errors import UserError

# (config, cells) -> the tower's inputs for images of so many tokens each, if a family has images of any size.
Pictures = Callable[[Any, Sequence[int]], dict[str, Tensor]]


@dataclass(frozen=True)
class Family:
    """Traits of the models of a `model_type`."""

    handling: str  # module and class of this room that writes its files
    processor: str  # module and class of transformers' processor, below transformers.models
    placeholder: str  # token that the model fills with features, if the processor's settings name no other
    language: str  # path of the text model in the base model
    tower: str
    projector: tuple[str, ...]
    pictures: Pictures
    tokens: Callable[[Any], int] | None = None  # of an image by the config, if all have as many
    sees_whole_images: bool = False  # an image's tokens see each other, also those that follow
    joins_images: bool = False  # its tower computes attention over all images of a row, under a mask
    as_weights: bool = False  # its forward casts the tower's output to the weights' type, and needs such embeddings
    scales_up: bool = False  # its processor scales small files up
    unused: str | None = None  # a module of the tower whose output is unused: it stays frozen, or DDP would wait


def _qwen_patches(config: Any, cells: Sequence[int]) -> dict[str, Tensor]:
    """Qwen: patches in a row, `merge` x `merge` of them a token; an image is one token high."""
    vision = config.vision_config
    merge, channels = vision.spatial_merge_size, getattr(vision, "in_channels", None) or vision.in_chans
    size = channels * vision.temporal_patch_size * vision.patch_size**2
    grid = torch.tensor([[1, merge, merge * count] for count in cells])
    return {"pixel_values": _values(int(grid.prod(1).sum()), size), "image_grid_thw": grid}


def _pixtral_images(config: Any, cells: Sequence[int]) -> dict[str, Tensor]:
    """Pixtral: images as large as the largest, and the size of each."""
    side = config.vision_config.patch_size * config.spatial_merge_size
    sizes = torch.tensor([[side, side * count] for count in cells])
    return {"pixel_values": _values(len(cells), 3, side, side * max(cells)), "image_sizes": sizes}


def _idefics_crops(config: Any, cells: Sequence[int]) -> dict[str, Tensor]:
    """Idefics 3: all crops of all images, of one size. Crops of zeros would be taken for padding."""
    side = config.vision_config.image_size
    shape = (1, len(cells), side, side)
    return {
        "pixel_values": _values(1, len(cells), 3, side, side) + 2.0,
        "pixel_attention_mask": torch.ones(shape, dtype=torch.int64),
    }


def _gemma_squares(config: Any, cells: Sequence[int]) -> dict[str, Tensor]:
    """Gemma 3: squares of one size."""
    side = config.vision_config.image_size
    return {"pixel_values": _values(len(cells), 3, side, side)}


def _values(*shape: int) -> Tensor:
    """Returns numbers between -1 and 1, different in neighbouring places."""
    return torch.sin(torch.arange(math.prod(shape), dtype=torch.float32) * 0.7311).reshape(shape)


_CROPS = Family(
    handling="image_families.IdeficsImages",
    processor="idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil",
    placeholder="<image>",
    language="text_model",
    tower="vision_model",
    projector=("connector",),
    pictures=_idefics_crops,
    tokens=lambda config: (
        (config.vision_config.image_size // config.vision_config.patch_size) ** 2 // config.scale_factor**2
    ),
    as_weights=True,
)
_QWEN = Family(
    handling="image_families.QwenImages",
    processor="qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
    placeholder="<|image_pad|>",
    language="language_model",
    tower="visual",
    projector=("visual.merger",),
    pictures=_qwen_patches,
    scales_up=True,
)
FAMILIES: dict[str, Family] = {
    "smolvlm": replace(_CROPS, processor="smolvlm.image_processing_pil_smolvlm.SmolVLMImageProcessorPil"),
    "idefics3": _CROPS,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": replace(_QWEN, projector=("visual.merger", "visual.deepstack_merger_list")),
    "gemma3": Family(
        handling="image_families.GemmaImages",
        processor="gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
        placeholder="<image_soft_token>",
        language="language_model",
        tower="vision_tower",
        projector=("multi_modal_projector",),
        pictures=_gemma_squares,
        tokens=lambda config: config.mm_tokens_per_image,
        sees_whole_images=True,
        unused="vision_tower.head",
    ),
    "mistral3": Family(
        handling="image_families.MistralImages",
        processor="pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil",
        placeholder="[IMG]",
        language="language_model",
        tower="vision_tower",
        projector=("multi_modal_projector",),
        pictures=_pixtral_images,
        joins_images=True,
    ),
}
_REFUSALS = {
    # transformers' `_prepare_cross_attention_mask`: rows of its mask that are all closed become all open.
    "mllama": "In its cross attention a token that stands before its document's images looks at those of all others",
    "llava_next": "Its images end their lines with a token that is trained, which a row of several images would mix",
}


def family_of(config: PretrainedConfig) -> Family:
    """Returns the family of a multimodal config. Raises UserError for those that are not verified."""
    if (family := FAMILIES.get(config.model_type)) is None:
        families, why = ", ".join(sorted(FAMILIES)), _REFUSALS.get(config.model_type)
        raise UserError(
            f"images: {config.model_type!r} is not among the models trained on images here ({families})."
            f"{f' {why}.' if why else ''} Fix: leave out `data.image` and `model.train`, which trains its text part"
        )
    return family
