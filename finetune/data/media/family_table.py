"""The families of models that are trained on images or sound: one row each, by `model_type`.

A row says how a file becomes tokens (the class of `image_families.py`, `audio_families.py` or `video_families.py`,
transformers' processor, the placeholder), where tower and projector are in the model (models/towers.py), and whether
the tower drops at random. Only names and functions are here: the processors take a second to import. Families that are
not in the table are refused: if their forward mixes the files of a row, or takes them by another attention, they would
be trained wrongly in silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from finetune.data.samples import MediaKind
from finetune.errors import UserError

# (config, cells) -> the tower's inputs for files of so many tokens each, if a family has files of any size.
Pictures = Callable[[Any, Sequence[int]], dict[str, Tensor]]
VIDEO_INPUT = "pixel_values_videos"  # `Family.main_input` of all families that see videos


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
    kind: MediaKind = "image"  # of the files that its tower reads
    config: str = "vision_config"  # of its tower, in the model's
    token_id: str = "image_token_id"  # of a file, in the model's config
    main_input: str = "pixel_values"  # of its forward, which is there if there are files
    tokens: Callable[[Any], int] | None = None  # of an image by the config, if all have as many
    sees_whole_images: bool = False  # an image's tokens see each other, also those that follow
    joins_images: bool = False  # its tower computes attention over all images of a row, under a mask
    as_weights: bool = False  # its forward casts the tower's output to the weights' type, and needs such embeddings
    scales_up: bool = False  # its processor scales small files up
    features: Callable[[Any, dict[str, Tensor]], list[Any]] | None = None  # see `tower_outputs`
    # Settings of the tower's config by which it drops at random. They are 0 in a run, or no two documents would be
    # computed alike; a layer that is dropped would also leave ranks waiting for its gradient.
    drops: tuple[str, ...] = ()
    frames_apart: bool = False  # text stands between the frames of a video
    unused: str | None = None  # a module of the tower whose output is unused: it stays frozen, or DDP would wait


def _qwen_patches(config: Any, cells: Sequence[int]) -> dict[str, Tensor]:
    """Qwen: patches in a row, `merge` x `merge` of them a token; an image is one token high."""
    vision = config.vision_config
    merge, channels = vision.spatial_merge_size, getattr(vision, "in_channels", None) or vision.in_chans
    size = channels * vision.temporal_patch_size * vision.patch_size**2
    grid = torch.tensor([[1, merge, merge * count] for count in cells])
    return {"pixel_values": _values(int(grid.prod(1).sum()), size), "image_grid_thw": grid}


def _qwen_frames(config: Any, cells: Sequence[int]) -> dict[str, Tensor]:
    """Qwen's videos: as images, with as many places in time as `cells` says, each of two tokens."""
    inputs = _qwen_patches(config, [2 * count for count in cells])
    merge = config.vision_config.spatial_merge_size
    grid = torch.tensor([[count, merge, 2 * merge] for count in cells])
    return {"pixel_values_videos": inputs["pixel_values"], "video_grid_thw": grid}


def _timed_frames(config: Any, cells: Sequence[int]) -> dict[str, Tensor]:
    """Qwen2.5-VL: and the seconds between two places in time."""
    seconds = torch.tensor([0.5 * (i % 3 + 1) for i in range(len(cells))])
    return {**_qwen_frames(config, cells), "second_per_grid_ts": seconds}


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


def _half_minutes(config: Any, cells: Sequence[int]) -> dict[str, Tensor]:
    """Qwen2-Audio: clips of 30 s under a mask; four frames of it are a token."""
    audio = config.audio_config
    frames = torch.arange(2 * audio.max_source_positions)
    mask = (frames < torch.tensor([[4 * count - 1] for count in cells])).to(torch.int32)
    shape = (len(cells), audio.num_mel_bins, len(frames))
    return {"input_features": _values(*shape), "feature_attention_mask": mask}


def _voxtral_pieces(config: Any, cells: Sequence[int]) -> dict[str, Tensor]:
    """Voxtral: pieces of 30 s."""
    audio = config.audio_config
    return {"input_features": _values(len(cells), audio.num_mel_bins, 2 * audio.max_source_positions)}


def _whole_seconds(config: Any, cells: Sequence[int]) -> dict[str, Tensor]:
    """Qwen3-ASR: seconds of 100 frames, which are 13 tokens; eight frames of the last one are a token."""
    window = 2 * config.audio_config.n_window
    of_window = -(-window // 8)
    frames = [window * (count // of_window) + 8 * (count % of_window) for count in cells]
    longest = -(-max(frames) // window) * window
    mask = (torch.arange(longest) < torch.tensor(frames)[:, None]).to(torch.int32)
    features = _values(len(cells), config.audio_config.num_mel_bins, longest) * mask[:, None]
    return {"input_features": features, "input_features_mask": mask}


def _qwen2_audio_features(model: Any, inputs: dict[str, Tensor]) -> list[Any]:
    return [model.multi_modal_projector(model.audio_tower(inputs["input_features"]).last_hidden_state)]


def _audio_features(model: Any, inputs: dict[str, Tensor]) -> list[Any]:
    return [model.get_audio_features(**inputs, return_dict=True).pooler_output]


def _video_features(model: Any, inputs: dict[str, Tensor]) -> list[Any]:
    features = model.get_video_features(inputs[VIDEO_INPUT], inputs["video_grid_thw"], return_dict=True)
    return [features.pooler_output, getattr(features, "deepstack_features", None)]


def tower_outputs(family: Family, model: Any, inputs: dict[str, Tensor]) -> list[Any]:
    """Returns all that the language model gets from the tower for these inputs. model: transformers' base model."""
    if family.features is not None:
        return family.features(model, inputs)
    features = model.get_image_features(**inputs, return_dict=True)
    return [features.pooler_output, getattr(features, "deepstack_features", None)]


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
_HEARS = Family(
    handling="audio_families.Qwen2AudioClips",
    processor="whisper.feature_extraction_whisper.WhisperFeatureExtractor",
    placeholder="<|AUDIO|>",
    language="language_model",
    tower="audio_tower",
    projector=("multi_modal_projector",),
    pictures=_half_minutes,
    kind="audio",
    config="audio_config",
    token_id="audio_token_id",
    main_input="input_features",
    drops=("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "layerdrop"),
    features=_qwen2_audio_features,
)
FAMILIES |= {
    "qwen2_audio": _HEARS,
    "voxtral": replace(
        _HEARS,
        handling="audio_families.VoxtralClips",
        placeholder="[AUDIO]",
        pictures=_voxtral_pieces,
        tokens=lambda config: (
            config.audio_config.max_source_positions
            * config.audio_config.d_model
            // config.audio_config.intermediate_size
        ),
        features=_audio_features,
    ),
    "qwen3_asr": replace(
        _HEARS,
        handling="audio_families.Qwen3AsrClips",
        processor="qwen3_asr.feature_extraction_qwen3_asr.Qwen3ASRFeatureExtractor",
        placeholder="<|audio_pad|>",
        pictures=_whole_seconds,
        features=_audio_features,
    ),
}
_VIDEOS = replace(
    _QWEN,
    handling="video_families.Qwen25Videos",
    placeholder="<|video_pad|>",
    pictures=_timed_frames,
    kind="video",
    token_id="video_token_id",
    main_input=VIDEO_INPUT,
    features=_video_features,
)
# Of the models of `FAMILIES` that see videos, too.
SEE_VIDEOS: dict[str, Family] = {
    "qwen2_5_vl": _VIDEOS,
    "qwen3_vl": replace(
        _VIDEOS,
        handling="video_families.Qwen3Videos",
        pictures=_qwen_frames,
        projector=FAMILIES["qwen3_vl"].projector,
        frames_apart=True,
    ),
}
_REFUSALS = {
    # transformers' `_prepare_cross_attention_mask`: rows of its mask that are all closed become all open.
    "mllama": "In its cross attention a token that stands before its document's images looks at those of all others",
    "llava_next": "Its images end their lines with a token that is trained, which a row of several images would mix",
}


def family_of(config: PretrainedConfig, kind: MediaKind | None = None) -> Family:
    """Returns the family of a multimodal config. kind: `video` for its handling of videos, in place of images.

    Raises UserError for those that are not verified.
    """
    if kind == "video" and (family := SEE_VIDEOS.get(config.model_type)) is not None:
        return family
    if (family := FAMILIES.get(config.model_type)) is None:
        families, why = ", ".join(sorted(FAMILIES)), _REFUSALS.get(config.model_type)
        raise UserError(
            f"images and sound: {config.model_type!r} is not among the models trained on them here ({families})."
            f"{f' {why}.' if why else ''} Fix: leave out `data.image`, `data.audio`, `data.video` and `model.train`; "
            "that trains its text part"
        )
    return family
