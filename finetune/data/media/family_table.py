"""The families of models that are trained on files: a row for each kind of file that a model takes, by `model_type`.

    table          rows                                             kinds
    FAMILIES       of all models, of the kind that comes first      images, sound
    SEE_IMAGES     of models that hear and see                      images
    SEE_VIDEOS     of models that see and film                      videos

A run on several kinds has several rows as one (`family_of`). A row says how a file becomes tokens (the class of
`image_families.py`, `audio_families.py` or `video_families.py`, transformers' processor, the placeholder), where tower
and projector are in the model (models/towers.py), and whether the tower drops at random. Only names and functions are
here: the processors take a second to import. Families that are not in the table are refused: if their forward mixes the
files of a row, or takes them by another attention, they would be trained wrongly in silence.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from finetune.data.media import clip_shapes
from finetune.data.media.clip_shapes import Ear, values
from finetune.data.samples import MediaKind
from finetune.errors import UserError

# (config, cells) -> the tower's inputs for files of so many tokens each, if a family has files of any size.
Pictures = Callable[[Any, Sequence[int]], dict[str, Tensor]]
VIDEO_INPUT = "pixel_values_videos"  # `Family.main_input` of all families that see videos
Kinds = MediaKind | Sequence[MediaKind] | None


@dataclass(frozen=True)
class Family:
    """Traits of the models of a `model_type`."""

    handling: str  # module and class of this room that writes its files
    processor: str  # module and class of transformers' processor, below transformers.models
    placeholder: str  # token that the model fills with features, if the processor's settings name no other
    language: str  # path of the text model in the base model; empty: the base model itself
    tower: str
    projector: tuple[str, ...]
    pictures: Pictures
    kind: MediaKind = "image"  # of the files that its tower reads
    config: str = "vision_config"  # of its tower, in the model's
    token_id: str = "image_token_id"  # of a file, in the model's config, or in a part of it: "audio_config.token_id"
    main_input: str = "pixel_values"  # of its forward, which is there if there are files
    tokens: Callable[[Any], int] | None = None  # of an image by the config, if all have as many
    most_tokens: int | None = None  # of an image, or a frame, by the processor's class
    sees_whole_images: bool = False  # an image's tokens see each other, also those that follow
    in_windows_only: bool = False  # in layers with a sliding window they do, as far back as that, and in no others
    joins_images: bool = False  # its tower computes attention over all images of a row, under a mask
    attention: str = "sdpa"  # of the tower, transformers' name
    as_weights: bool = False  # its forward casts the tower's output to the weights' type, and needs such embeddings
    scales_up: bool = False  # its processor scales small files up
    features: Callable[[Any, dict[str, Tensor]], list[Any]] | None = None  # see `tower_outputs`
    # Settings of the tower's config by which it drops at random. They are 0 in a run, or no two documents would be
    # computed alike; a layer that is dropped would also leave ranks waiting for its gradient.
    drops: tuple[str, ...] = ()
    frames_apart: bool = False  # text stands between the frames of a video
    # Modules of the tower whose output is unused: they stay frozen, or DDP would wait.
    unused: tuple[str, ...] = ()
    others: tuple[str, ...] = ()  # towers and projectors of another kind of file, which a run on this one leaves
    ear: Ear | None = None  # sizes of clips, if the tower hears
    # The module that computes a clip otherwise beside a longer one: it runs once for each (models/clips_alone.py), and
    # a document has one clip at most.
    alone: str | None = None
    alone_by_mask: bool = False  # its mask, not zeros, tells the frames of each clip; a clip alone gets none
    # Its forward takes a row of the embedding's table beside the embedding's own forward.
    reads_table: bool = False
    embeds_again: bool = False  # its forward embeds all tokens once more if there are files
    # Tower and projector are never in training mode: batch norms would mix the clips of a step, and keep of them; or it
    # would draw at random where a chunk of a clip begins.
    steady: bool = False
    # The module of the base model that returns embeddings with the features among them, if `language` is empty:
    # `features` has `inputs_embeds` of one token among its inputs.
    joined_in: str | None = None
    call: str = "get_image_features"  # method of the base model that runs the tower
    turn: int = 0  # place of that call among those of other kinds in transformers' forward
    # (config, row) -> the row of a model whose config has more or less than others of its type.
    fitted: Callable[[Any, Family], Family] = lambda _config, row: row
    also: tuple[Family, ...] = ()  # rows of the other kinds of files of a run

    @property
    def each(self) -> tuple[Family, ...]:
        """Returns the rows of all kinds of files of a run, in the order of transformers' forward."""
        return tuple(sorted((self, *self.also), key=lambda row: row.turn))


def _qwen_patches(config: Any, cells: Sequence[int]) -> dict[str, Tensor]:
    """Qwen: patches in a row, `merge` x `merge` of them a token; an image is one token high."""
    vision = config.vision_config
    merge, channels = vision.spatial_merge_size, getattr(vision, "in_channels", None) or vision.in_chans
    size = channels * vision.temporal_patch_size * vision.patch_size**2
    grid = torch.tensor([[1, merge, merge * count] for count in cells])
    return {"pixel_values": values(int(grid.prod(1).sum()), size), "image_grid_thw": grid}


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
    return {"pixel_values": values(len(cells), 3, side, side * max(cells)), "image_sizes": sizes}


def _idefics_crops(config: Any, cells: Sequence[int]) -> dict[str, Tensor]:
    """Idefics 3: all crops of all images, of one size. Crops of zeros would be taken for padding."""
    side = config.vision_config.image_size
    shape = (1, len(cells), side, side)
    return {
        "pixel_values": values(1, len(cells), 3, side, side) + 2.0,
        "pixel_attention_mask": torch.ones(shape, dtype=torch.int64),
    }


def _gemma4_patches(config: Any, cells: Sequence[int]) -> dict[str, Tensor]:
    """Gemma 4: patches in a row and their places, `kernel` x `kernel` of them a token; an image is one token high, and
    has places of -1 behind its end."""
    vision = config.vision_config
    kernel, size = vision.pooling_kernel_size, 3 * vision.patch_size**2
    longest = kernel**2 * max(cells)
    places = torch.full((len(cells), longest, 2), -1)
    for place, count in zip(places, cells, strict=True):
        rows, columns = torch.arange(kernel), torch.arange(kernel * count)
        place[: kernel**2 * count] = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1).reshape(-1, 2)
    pixels = values(len(cells), longest, size) * (places[..., :1] >= 0)
    return {"pixel_values": pixels, "image_position_ids": places}


def _gemma4_frames(config: Any, cells: Sequence[int]) -> dict[str, Tensor]:
    """Gemma 4's videos: as many frames as `cells` says, each of two tokens."""
    inputs = _gemma4_patches(config, [2] * sum(cells))
    return {
        VIDEO_INPUT: inputs["pixel_values"],
        "video_position_ids": inputs["image_position_ids"],
        "num_frames_per_video": torch.tensor(cells),
    }


def _gemma_squares(config: Any, cells: Sequence[int]) -> dict[str, Tensor]:
    """Gemma 3: squares of one size."""
    side = config.vision_config.image_size
    return {"pixel_values": values(len(cells), 3, side, side)}


def _voxtral_pieces(config: Any, cells: Sequence[int]) -> dict[str, Tensor]:
    """Voxtral: pieces of 30 s."""
    audio = config.audio_config
    return {"input_features": values(len(cells), audio.num_mel_bins, 2 * audio.max_source_positions)}


def _qwen2_audio_features(model: Any, inputs: dict[str, Tensor]) -> list[Any]:
    return [model.multi_modal_projector(model.audio_tower(inputs["input_features"]).last_hidden_state)]


def _audio_features(model: Any, inputs: dict[str, Tensor]) -> list[Any]:
    return [model.get_audio_features(**inputs, return_dict=True).pooler_output]


def _video_features(model: Any, inputs: dict[str, Tensor]) -> list[Any]:
    features = model.get_video_features(inputs[VIDEO_INPUT], inputs["video_grid_thw"], return_dict=True)
    return [features.pooler_output, getattr(features, "deepstack_features", None)]


def _gemma4_image_features(model: Any, inputs: dict[str, Tensor]) -> list[Any]:
    return list(model.get_image_features(**inputs, return_dict=True).pooler_output)


def _gemma4_video_features(model: Any, inputs: dict[str, Tensor]) -> list[Any]:
    return list(model.get_video_features(**inputs, return_dict=True).pooler_output)


def _gemma3n_features(model: Any, inputs: dict[str, Tensor]) -> list[Any]:
    heard = model.get_audio_features(inputs["input_features"], ~inputs["input_features_mask"]).pooler_output
    behind = model.embed_audio(input_ids=torch.full((1, 1), model.vocab_size - 1, device=heard.device))
    return [heard, behind]  # its forward embeds what stands behind a clip's end after each clip


def _granite_features(model: Any, inputs: dict[str, Tensor]) -> list[Any]:
    return [model.get_audio_features(inputs["input_features"]).pooler_output]


def _phi4_features(model: Any, inputs: dict[str, Tensor]) -> list[Any]:
    """Phi-4: embeddings (1, t, D) of a row of these clips. inputs: with `inputs_embeds` (1, 1, D) of a token, as its
    module gets a row's embeddings: ZeRO-3 gathers in the order of all modules that return a tensor with a gradient."""
    inputs = {**inputs}
    embeddings, count = inputs.pop("inputs_embeds"), int(inputs["audio_embed_sizes"].sum())
    ids = torch.full((1, count), model.config.audio_config.audio_token_id, device=embeddings.device)
    return [model.embed_tokens_extend.audio_embed(ids, embeddings.expand(1, count, -1), **inputs)]


def tower_outputs(family: Family, model: Any, inputs: dict[str, Tensor]) -> list[Any]:
    """Returns all that the language model gets from the tower for these inputs. model: transformers' base model."""
    if family.features is not None:
        return family.features(model, inputs)
    features = model.get_image_features(**inputs, return_dict=True)
    return [features.pooler_output, getattr(features, "deepstack_features", None)]


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
        unused=("vision_tower.head",),
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
    pictures=clip_shapes.THIRTY_SECONDS.clips,
    kind="audio",
    config="audio_config",
    token_id="audio_token_id",
    main_input="input_features",
    drops=("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "layerdrop"),
    features=_qwen2_audio_features,
    ear=clip_shapes.THIRTY_SECONDS,
    call="get_audio_features",
)


def _hears(ear: Ear, handling: str, like: Family = _HEARS, **traits: Any) -> Family:
    """Returns a row that differs from another one in its clips. handling: a class of `audio_families.py`."""
    common: dict[str, Any] = {"pictures": ear.clips, "ear": ear, "features": _audio_features}
    return replace(like, handling=f"audio_families.{handling}", **{**common, **traits})


_OMNI = replace(_HEARS, others=("visual",))
_PHI_4_EAR = "embed_tokens_extend.audio_embed"
FAMILIES |= {
    "qwen2_audio": _HEARS,
    "voxtral": _hears(
        clip_shapes.PIECES_OF_THIRTY,
        "VoxtralClips",
        placeholder="[AUDIO]",
        pictures=_voxtral_pieces,
        tokens=clip_shapes.voxtral_tokens,
    ),
    "qwen3_asr": _hears(
        clip_shapes.WHOLE_SECONDS,
        "Qwen3AsrClips",
        processor="qwen3_asr.feature_extraction_qwen3_asr.Qwen3ASRFeatureExtractor",
        placeholder="<|audio_pad|>",
    ),
    "qwen2_5_omni_thinker": _hears(
        clip_shapes.TWO_SECONDS,
        "QwenOmniClips",
        _OMNI,
        projector=("audio_tower.proj",),
        unused=("audio_tower.audio_bos_eos_token",),
    ),
    "qwen3_omni_moe_thinker": _hears(
        clip_shapes.EIGHT_SECONDS,
        "Qwen3OmniClips",
        _OMNI,
        placeholder="<|audio_pad|>",
        projector=("audio_tower.proj1", "audio_tower.proj2"),
    ),
    "gemma4": _hears(
        clip_shapes.GEMMA_4,
        "Gemma4Clips",
        processor="gemma4.feature_extraction_gemma4.Gemma4AudioFeatureExtractor",
        placeholder="<|audio|>",
        projector=("embed_audio",),
        others=("vision_tower", "embed_vision"),
        attention="eager",
        turn=2,
        reads_table=True,
    ),
    "gemma3n": _hears(
        clip_shapes.GEMMA_3N,
        "Gemma3nClips",
        processor="gemma3n.feature_extraction_gemma3n.Gemma3nAudioFeatureExtractor",
        placeholder="<audio_soft_token>",
        projector=("embed_audio",),
        others=("vision_tower", "embed_vision"),
        pictures=clip_shapes.gemma3n_clips,
        tokens=lambda config: config.audio_soft_tokens_per_image,
        features=_gemma3n_features,
        attention="eager",
        alone="audio_tower",
    ),
    "granite_speech": _hears(
        clip_shapes.GRANITE,
        "GraniteClips",
        processor="granite_speech.feature_extraction_granite_speech.GraniteSpeechFeatureExtractor",
        placeholder="<|audio|>",
        tower="encoder",
        projector=("projector",),
        config="encoder_config",
        pictures=clip_shapes.granite_clips,
        features=_granite_features,
        alone="encoder",
        steady=True,
        embeds_again=True,
    ),
    "phi4_multimodal": _hears(
        clip_shapes.PHI_4,
        "Phi4Clips",
        processor="phi4_multimodal.feature_extraction_phi4_multimodal.Phi4MultimodalFeatureExtractor",
        placeholder="<|audio|>",
        language="",
        tower=_PHI_4_EAR,
        projector=(f"{_PHI_4_EAR}.up_proj_for_speech", f"{_PHI_4_EAR}.down_proj_for_speech"),
        # Of rows that have pictures as well.
        others=(
            "embed_tokens_extend.image_embed",
            f"{_PHI_4_EAR}.up_proj_for_vision_speech",
            f"{_PHI_4_EAR}.down_proj_for_vision_speech",
        ),
        token_id="audio_config.audio_token_id",
        main_input="audio_input_features",
        pictures=clip_shapes.phi4_clips,
        drops=("dropout_rate",),
        features=_phi4_features,
        alone=f"{_PHI_4_EAR}.encoder",
        alone_by_mask=True,
        steady=True,
        joined_in="embed_tokens_extend",
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
    call="get_video_features",
    turn=1,
)


def _fitted_gemma4(config: Any, row: Family) -> Family:
    """Larger models have no sound; some let the tokens of an image see each other."""
    others = row.others if config.audio_config is not None else ()
    sees_whole = config.get_text_config().use_bidirectional_attention == "vision"
    return replace(row, others=others, sees_whole_images=sees_whole, in_windows_only=sees_whole)


_GEMMA4_IMAGES = Family(
    handling="image_families.Gemma4Images",
    processor="gemma4.image_processing_pil_gemma4.Gemma4ImageProcessorPil",
    placeholder="<|image|>",
    language="language_model",
    tower="vision_tower",
    projector=("embed_vision",),
    pictures=_gemma4_patches,
    features=_gemma4_image_features,
    most_tokens=280,
    others=("audio_tower", "embed_audio"),
    fitted=_fitted_gemma4,
)
# Of the models of `FAMILIES` that hear, those that see images, too.
SEE_IMAGES: dict[str, Family] = {"gemma4": _GEMMA4_IMAGES}
# Of the models of both that see videos, too.
SEE_VIDEOS: dict[str, Family] = {
    "qwen2_5_vl": _VIDEOS,
    "qwen3_vl": replace(
        _VIDEOS,
        handling="video_families.Qwen3Videos",
        pictures=_qwen_frames,
        projector=FAMILIES["qwen3_vl"].projector,
        frames_apart=True,
    ),
    "gemma4": replace(
        _GEMMA4_IMAGES,
        handling="video_families.Gemma4Videos",
        placeholder="<|video|>",
        pictures=_gemma4_frames,
        kind="video",
        token_id="video_token_id",
        main_input=VIDEO_INPUT,
        features=_gemma4_video_features,
        most_tokens=70,
        frames_apart=True,
        call="get_video_features",
        turn=1,
    ),
}
_REFUSALS = {
    # transformers' `_prepare_cross_attention_mask`: rows of its mask that are all closed become all open.
    "mllama": "In its cross attention a token that stands before its document's images looks at those of all others",
    "llava_next": "Its images end their lines with a token that is trained, which a row of several images would mix",
}


def kinds_taken(model_type: str) -> tuple[MediaKind, ...]:
    """Returns the kinds of files that models of a type take, the usual one first; () for those of text."""
    return tuple(rows_of(model_type))


def file_tokens(config: Any, kinds: Sequence[MediaKind]) -> dict[MediaKind, int]:
    """Returns the token that stands for files of each of these kinds in a model's rows."""
    return {row.kind: file_token(config, row) for row in family_of(config, kinds).each} if kinds else {}


def file_token(config: Any, row: Family) -> int:
    """Returns the token that stands for files of a row's kind."""
    return operator.attrgetter(row.token_id)(config)


def set_file_token(config: Any, row: Family, token: int) -> None:
    *parts, name = row.token_id.split(".")
    setattr(functools.reduce(getattr, parts, config), name, token)


def part_that_hears(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the config of the thinker of a model that also talks (Qwen2.5-Omni, Qwen3-Omni), else the same."""
    if (thinker := getattr(config, "thinker_config", None)) is None:
        return config
    thinker.name_or_path, thinker.architectures = config.name_or_path, None
    return thinker


SPEECH = ("talker.", "token2wav.", "code2wav.")  # tensors of the parts that talk, which a thinker does not have


def rows_of(model_type: str) -> dict[MediaKind, Family]:
    """Returns the rows of a model, by the kind of file; {} for a model that is not in the table."""
    rows = (table.get(model_type) for table in (FAMILIES, SEE_IMAGES, SEE_VIDEOS))
    return {row.kind: row for row in rows if row is not None}


def family_of(config: PretrainedConfig, kinds: Kinds = None) -> Family:
    """Returns the family of a multimodal config. kinds: of the files of a run; None, or one that the model does not
    take: the first kind whose tower it has. Several: the row of the first of them, with the others in `also`.

    Raises UserError for those that are not verified.
    """
    if not (rows := rows_of(config.model_type)):
        families, why = ", ".join(sorted(FAMILIES)), _REFUSALS.get(config.model_type)
        raise UserError(
            f"images and sound: {config.model_type!r} is not among the models trained on them here ({families})."
            f"{f' {why}.' if why else ''} Fix: leave out `data.image`, `data.audio`, `data.video` and `model.train`; "
            "that trains its text part"
        )
    asked = (kinds,) if isinstance(kinds, str) else tuple(kinds or ())
    there = [row for row in rows.values() if getattr(config, row.config, None) is not None]
    taken = [rows[kind] for kind in asked if kind in rows] or there[:1] or [*rows.values()][:1]
    first, *also = (row.fitted(config, row) for row in taken)
    used = {path for row in (first, *also) for path in (row.tower, *row.projector)}
    others = dict.fromkeys(path for row in (first, *also) for path in row.others if path not in used)
    return replace(first, also=tuple(also), others=tuple(others))
