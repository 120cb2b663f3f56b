"""Videos as text, and the tensors that a forward takes for them, of each family.

    model_type     the chat template writes                       a video becomes
    qwen2_5_vl     <|vision_start|><|video_pad|><|vision_end|>    <|video_pad|> for every 2 x 2 patches of two frames
    qwen3_vl       the same                                       of every two frames: <0.5 seconds>, their mean time,
                                                                  and <|vision_start|> <|video_pad|> ... <|vision_end|>

Both follow from a video's frames, their rate and size alone. transformers' processors of videos need torchvision, whose
wheels want one torch each; what they compute is written here in torch, to the same bits: frames at a rate
(`sample_frames`), scaled as 8-bit integers by `interpolate`, normalized, cut into patches by transformers' `patchify`.
A frame is scaled as it is decoded, so that a long video never lies in memory at its stored size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as scaled_frame
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as scaled_video

from finetune.data.media.families import FamilySettings, Features, MediaFamily, Written, processor_place
from finetune.data.media.video_files import StoredVideo, broken, find_video, frames_at, is_listed, reason
from finetune.data.samples import BadRow, Video
from finetune.errors import UserError
from finetune.recipe.schema import Videos

_BICUBIC = 3  # Pillow's number, in the processor's settings
_FPS = 2.0  # if neither recipe nor processor says: both models' own (`qwen_vl_utils`, FPS)


@dataclass(frozen=True)
class VideoProcessor:
    """Settings of a processor of videos, by transformers' names; `fps` and bounds are the recipe's."""

    patch_size: int
    size: Mapping[str, int]  # shortest_edge, longest_edge: of pixels
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    fps: float
    min_frames: int
    max_frames: int
    max_video_tokens: int
    cap_pixels_per_frame: bool
    temporal_patch_size: int = 2
    merge_size: int = 2
    rescale_factor: float = 1 / 255

    def to_json_string(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


# Attributes of transformers' classes, which files need not name.
_QWEN3: Mapping[str, Any] = {
    "patch_size": 16,
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
    "max_video_tokens": 768,
}
_QWEN25: Mapping[str, Any] = {
    "patch_size": 14,
    "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "max_video_tokens": 128_000,
}
_OLDER = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}


def _video_processor(settings: FamilySettings, defaults: Mapping[str, Any]) -> VideoProcessor:
    """Returns the settings of the model's folder, with the recipe's. Raises UserError."""
    path, revision = processor_place(settings.model, settings.rules)
    try:
        stored = Qwen3VLVideoProcessor.get_video_processor_dict(path, revision=revision)[0]
    except (OSError, ValueError) as error:
        raise UserError(
            f"data.video: {path!r} has no settings of a video processor: {' '.join(str(error).split())[:200]}. Fix: "
            "name another place of it as `data.video.processor`"
        ) from None
    given = {**defaults, **{key: value for key, value in stored.items() if value is not None}}
    if given.get("resample", _BICUBIC) != _BICUBIC or not all(
        given.get(f"do_{step}", True) for step in ("resize", "rescale", "normalize")
    ):
        raise UserError(
            f"data.video: {path!r} scales or normalizes frames in another way than Qwen's models. Fix: name a place of "
            "the model's own settings as `data.video.processor`"
        )
    rules: Videos = settings.rules
    size = {**defaults["size"], **given["size"]}
    if defaults is _QWEN25:  # the older names of the bounds, which come first
        size = {edge: given.get(older) or size[edge] for edge, older in _OLDER.items()}
    longest = rules.max_pixels or size["longest_edge"]
    return VideoProcessor(
        patch_size=given["patch_size"],
        size={"shortest_edge": min(size["shortest_edge"], longest), "longest_edge": longest},
        image_mean=tuple(given["image_mean"]),
        image_std=tuple(given["image_std"]),
        fps=float(rules.fps or given.get("fps") or _FPS),
        min_frames=given.get("min_frames", 4),
        max_frames=rules.max_frames or given.get("max_frames", 768),
        max_video_tokens=given["max_video_tokens"],
        cap_pixels_per_frame=bool(given.get("cap_pixels_per_frame")),
        **{name: given[name] for name in ("temporal_patch_size", "merge_size", "rescale_factor") if name in given},
    )


class QwenVideos(MediaFamily):
    """Handling of videos. Subclasses choose the frames and their size, and write them."""

    def __init__(self, settings: FamilySettings, defaults: Mapping[str, Any]):
        self.of_video = _video_processor(settings, defaults)
        super().__init__(
            settings, self.of_video, settings.row.placeholder, ("<|vision_start|>", "<|vision_end|>"), "video"
        )

    def find(self, reference: str | bytes, data_file: str) -> StoredVideo:
        return find_video(reference, self.rules, data_file, self.rules.frame_rate or self.of_video.fps)

    def written(self, stored: StoredVideo) -> Written:
        try:
            indices = self.frames_of(stored)
            grid = self.grid_of(stored, len(indices))
        except ValueError as error:
            size = f"{stored.frames:,} frames of {stored.width} x {stored.height} pixels"
            raise BadRow(f"a video of {size} cannot be used: {error}") from None
        return self.write(stored, indices, grid)

    def placed(self, stored: StoredVideo, begin: int, end: int) -> Video:
        seen = len(self.frames_of(stored))
        return Video(stored.source, stored.frames, stored.rate, stored.height, stored.width, seen, begin, end)

    def frames_of(self, stored: StoredVideo | Video) -> list[int]:
        """Returns the places of the frames that are seen. Raises ValueError if there are too few."""
        raise NotImplementedError

    def scaled(self, stored: StoredVideo | Video, frames: int) -> tuple[int, int]:
        """Returns (height, width) that frames are scaled to. Raises ValueError for a shape that cannot be."""
        raise NotImplementedError

    def write(self, stored: StoredVideo, indices: Sequence[int], grid: tuple[int, int, int]) -> Written:
        raise NotImplementedError

    def grid_of(self, stored: StoredVideo | Video, frames: int) -> tuple[int, int, int]:
        """Returns the patches in time, height and width."""
        height, width = self.scaled(stored, frames)
        side = self.of_video.patch_size
        return -(-frames // self.of_video.temporal_patch_size), height // side, width // side

    def read(self, medium: Video) -> Features:
        look, indices = self.of_video, self.frames_of(medium)
        size = self.scaled(medium, len(indices))
        try:
            frames = torch.stack([_scaled(frame, size) for frame in frames_at(medium, indices)])
        except broken() as error:
            name = "a video in the data" if isinstance(medium.source, bytes) else medium.source.lstrip("\0")
            raise UserError(
                f"{name.split(chr(0))[0]}: cannot be decoded: {reason(error)}. Fix: restore it, or `finetune cache "
                "clean` and start again; `data.video: {verify: frames}` finds broken videos before the run"
            ) from None
        patches, *grid = Qwen3VLVideoProcessor.patchify(
            None,  # pyright: ignore[reportArgumentType] - a function of its arguments
            _normalized(frames, look)[None],
            patch_size=look.patch_size,
            merge_size=look.merge_size,
            temporal_patch_size=look.temporal_patch_size,
        )
        return {"pixel_values_videos": patches[0].numpy(), "video_grid_thw": np.array([grid], np.int64)}

    def join(self, features: Sequence[Features], input_ids: Tensor) -> dict[str, Tensor]:
        """pixel_values_videos (P, D) of all patches, video_grid_thw (N, 3), see also subclasses."""
        return {name: torch.from_numpy(np.concatenate([one[name] for one in features])) for name in features[0]}


def _scaled(frame: NDArray[np.uint8], size: tuple[int, int]) -> Tensor:
    """Returns a frame (H, W, 3) as (3, *size), as torchvision's `resize` scales integers."""
    picture = torch.from_numpy(frame).permute(2, 0, 1).contiguous()
    if picture.shape[1:] == size:
        return picture
    return torch.nn.functional.interpolate(picture[None], size, mode="bicubic", antialias=True)[0]


def _normalized(frames: Tensor, look: VideoProcessor) -> Tensor:
    """Returns frames (N, 3, H, W) in float32: the mean and deviation are multiplied, not each pixel."""
    mean, deviation = (
        torch.tensor(values) * (1.0 / look.rescale_factor) for values in (look.image_mean, look.image_std)
    )
    return frames.to(torch.float32).sub_(mean.view(-1, 1, 1)).div_(deviation.view(-1, 1, 1))


class Qwen3Videos(QwenVideos):
    def __init__(self, settings: FamilySettings):
        super().__init__(settings, _QWEN3)
        self.tokenizer = settings.tokenizer

    def frames_of(self, stored: StoredVideo | Video) -> list[int]:
        look, rate = self.of_video, float(stored.rate)
        count = stored.frames
        if not (is_listed(stored.source) and rate == look.fps):  # of which all are seen
            count = max(int(stored.frames / rate * look.fps), look.min_frames)
        count = min(count, look.max_frames, stored.frames)
        return np.linspace(0, stored.frames - 1, count).round().astype(int).tolist()

    def scaled(self, stored: StoredVideo | Video, frames: int) -> tuple[int, int]:
        look = self.of_video
        factor, most = look.patch_size * look.merge_size, look.size["longest_edge"]
        if look.cap_pixels_per_frame:
            of_frame = min(look.max_video_tokens * factor**2, most // frames)
            most = max(of_frame, int(look.size["shortest_edge"] * 1.05)) * frames
        return scaled_video(
            frames,
            stored.height,
            stored.width,
            temporal_factor=look.temporal_patch_size,
            factor=factor,
            min_pixels=look.size["shortest_edge"],
            max_pixels=most,
        )

    def write(self, stored: StoredVideo, indices: Sequence[int], grid: tuple[int, int, int]) -> Written:
        each, together = grid[1] * grid[2] // self.of_video.merge_size**2, self.of_video.temporal_patch_size
        filled = [*indices, *[indices[-1]] * (-len(indices) % together)]
        times = [place / float(stored.rate) for place in filled]
        seen = f"<|vision_start|>{self.token * each}<|vision_end|>"
        text = "".join(
            f"<{(times[i] + times[i + together - 1]) / 2:.1f} seconds>{seen}" for i in range(0, len(times), together)
        )
        return Written(text, grid[0] * each)

    def whole(self, input_ids: NDArray[np.int32], begin: int, end: int) -> tuple[int, int]:
        """The first time is a little text of its own before the first frame: from its `<` on."""
        begin -= 1  # <|vision_start|>
        while begin > 0:
            begin -= 1
            if "<" in str(self.tokenizer.convert_ids_to_tokens(int(input_ids[begin]))):
                break
        return begin, end + 1


class Qwen25Videos(QwenVideos):
    def __init__(self, settings: FamilySettings):
        super().__init__(settings, _QWEN25)

    def frames_of(self, stored: StoredVideo | Video) -> list[int]:
        look, rate, total = self.of_video, float(stored.rate), stored.frames
        together = look.temporal_patch_size
        most = min(look.max_frames, total) // together * together
        count = float(total)
        if not (is_listed(stored.source) and rate == look.fps):
            count = max(total / rate * look.fps, look.min_frames)
        count = math.floor(min(count, most) / together) * together
        if not count:
            raise ValueError(f"at least {together} frames are needed")
        return [place for place in torch.arange(0, total, total / count).int().tolist() if place < total]

    def scaled(self, stored: StoredVideo | Video, frames: int) -> tuple[int, int]:
        look = self.of_video
        factor, most = look.patch_size * look.merge_size, look.size["longest_edge"]
        if look.cap_pixels_per_frame:
            of_all = int(look.max_video_tokens * factor**2 * 0.9) * look.temporal_patch_size
            most = max(min(most, of_all // frames), int(look.size["shortest_edge"] * 1.05))
        return scaled_frame(
            stored.height, stored.width, factor=factor, min_pixels=look.size["shortest_edge"], max_pixels=most
        )

    def write(self, stored: StoredVideo, indices: Sequence[int], grid: tuple[int, int, int]) -> Written:
        count = math.prod(grid) // self.of_video.merge_size**2
        return Written(self.token * count, count)

    def read(self, medium: Video) -> Features:
        """Also second_per_grid_ts (1,): seconds between two places in time."""
        shown = len(self.frames_of(medium)) / medium.frames * float(medium.rate)  # frames a second
        seconds = np.array([self.of_video.temporal_patch_size / shown], np.float32)
        return {**super().read(medium), "second_per_grid_ts": seconds}
