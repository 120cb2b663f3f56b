"""Videos as text, and the tensors that a forward takes for them, of each family.

    model_type     the chat template writes                       a video becomes
    qwen2_5_vl     <|vision_start|><|video_pad|><|vision_end|>    <|video_pad|> for every 2 x 2 patches of two frames
    qwen3_vl       the same                                       of every two frames: <0.5 seconds>, their mean time,
                                                                  and <|vision_start|> <|video_pad|> ... <|vision_end|>
    gemma4         <|video|>                                      of every frame: 00:01, its time, and <|image>
                                                                  <|video|> for every 3 x 3 patches <image|>

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
from torch.nn.functional import pad
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as scaled_frame
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as scaled_video

from finetune.data.media.families import FamilySettings, Features, MediaFamily, Written, processor_place
from finetune.data.media.image_families import image_marks, most_soft_tokens, scaled_picture
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


def _stored_settings(settings: FamilySettings, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the model's folder, or the defaults of its processor's class. Raises UserError."""
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
            f"data.video: {path!r} scales or normalizes frames in another way than the model's processor. Fix: name a "
            "place of the model's own settings as `data.video.processor`"
        )
    return given


def _video_processor(settings: FamilySettings, defaults: Mapping[str, Any]) -> VideoProcessor:
    """Returns the settings of the model's folder, with the recipe's. Raises UserError."""
    given = _stored_settings(settings, defaults)
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


class VideoFamily(MediaFamily):
    """Handling of videos. Subclasses choose the frames and their size, and write them."""

    type_id = 2
    listed_rate: float  # frames a second of one that is pictures, if the recipe does not say

    def find(self, reference: str | bytes, data_file: str) -> StoredVideo:
        return find_video(reference, self.rules, data_file, self.rules.frame_rate or self.listed_rate)

    def written(self, stored: StoredVideo) -> Written:
        try:
            return self.write(stored, self.frames_of(stored))
        except ValueError as error:
            size = f"{stored.frames:,} frames of {stored.width} x {stored.height} pixels"
            raise BadRow(f"a video of {size} cannot be used: {error}") from None

    def placed(self, stored: StoredVideo, begin: int, end: int) -> Video:
        seen = len(self.frames_of(stored))
        return Video(stored.source, stored.frames, stored.rate, stored.height, stored.width, seen, begin, end)

    def frames_of(self, stored: StoredVideo | Video) -> list[int]:
        """Returns the places of the frames that are seen. Raises ValueError if there are too few."""
        raise NotImplementedError

    def scaled(self, stored: StoredVideo | Video, frames: int) -> tuple[int, int]:
        """Returns (height, width) that frames are scaled to. Raises ValueError for a shape that cannot be."""
        raise NotImplementedError

    def write(self, stored: StoredVideo, indices: Sequence[int]) -> Written:
        """Returns the text of a video. indices: of its frames that are seen. Raises ValueError as `scaled`."""
        raise NotImplementedError

    def frames(self, medium: Video) -> Tensor:
        """Returns the frames that are seen (N, 3, H, W), scaled, in 8 bits. Raises UserError."""
        indices = self.frames_of(medium)
        size = self.scaled(medium, len(indices))
        try:
            return torch.stack([_scaled(frame, size) for frame in frames_at(medium, indices)])
        except broken() as error:
            name = "a video in the data" if isinstance(medium.source, bytes) else medium.source.lstrip("\0")
            raise UserError(
                f"{name.split(chr(0))[0]}: cannot be decoded: {reason(error)}. Fix: restore it, or `finetune cache "
                "clean` and start again; `data.video: {verify: frames}` finds broken videos before the run"
            ) from None

    def read(self, medium: Video) -> Features:
        return self.features_of(self.frames(medium), medium)

    def kept(self, medium: Video) -> Features:
        """Scaled frames in 8 bits, a quarter of their features or less."""
        return {"frames": self.frames(medium).numpy()}

    def from_kept(self, kept: Features, medium: Video) -> Features:
        return self.features_of(torch.from_numpy(kept["frames"]), medium)

    def features_of(self, frames: Tensor, medium: Video) -> Features:
        """Returns the features of a video from its scaled frames (N, 3, H, W) in 8 bits."""
        raise NotImplementedError

    def join(self, features: Sequence[Features], input_ids: Tensor) -> dict[str, Tensor]:
        """The tensors of all videos end to end: pixel_values_videos, and see subclasses."""
        return {name: torch.from_numpy(np.concatenate([one[name] for one in features])) for name in features[0]}


class QwenVideos(VideoFamily):
    """pixel_values_videos (P, D) of all patches, video_grid_thw (N, 3)."""

    def __init__(self, settings: FamilySettings, defaults: Mapping[str, Any]):
        self.of_video = _video_processor(settings, defaults)
        self.listed_rate = self.of_video.fps
        super().__init__(
            settings, self.of_video, settings.row.placeholder, ("<|vision_start|>", "<|vision_end|>"), "video"
        )

    def grid_of(self, stored: StoredVideo | Video, frames: int) -> tuple[int, int, int]:
        """Returns the patches in time, height and width."""
        height, width = self.scaled(stored, frames)
        side = self.of_video.patch_size
        return -(-frames // self.of_video.temporal_patch_size), height // side, width // side

    def features_of(self, frames: Tensor, medium: Video) -> Features:
        look = self.of_video
        patches, *grid = Qwen3VLVideoProcessor.patchify(
            None,  # pyright: ignore[reportArgumentType] - a function of its arguments
            _normalized(frames, look.image_mean, look.image_std, look.rescale_factor)[None],
            patch_size=look.patch_size,
            merge_size=look.merge_size,
            temporal_patch_size=look.temporal_patch_size,
        )
        return {"pixel_values_videos": patches[0].numpy(), "video_grid_thw": np.array([grid], np.int64)}


def _scaled(frame: NDArray[np.uint8], size: tuple[int, int]) -> Tensor:
    """Returns a frame (H, W, 3) as (3, *size), as torchvision's `resize` scales integers."""
    picture = torch.from_numpy(frame).permute(2, 0, 1).contiguous()
    if picture.shape[1:] == size:
        return picture
    return torch.nn.functional.interpolate(picture[None], size, mode="bicubic", antialias=True)[0]


def _normalized(frames: Tensor, mean: Sequence[float], deviation: Sequence[float], factor: float) -> Tensor:
    """Returns frames (N, 3, H, W) in float32: the mean and deviation are multiplied, not each pixel."""
    centre, spread = (torch.tensor(values) * (1.0 / factor) for values in (mean, deviation))
    return frames.to(torch.float32).sub_(centre.view(-1, 1, 1)).div_(spread.view(-1, 1, 1))


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

    def write(self, stored: StoredVideo, indices: Sequence[int]) -> Written:
        grid = self.grid_of(stored, len(indices))
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

    def write(self, stored: StoredVideo, indices: Sequence[int]) -> Written:
        count = math.prod(self.grid_of(stored, len(indices))) // self.of_video.merge_size**2
        return Written(self.token * count, count)

    def features_of(self, frames: Tensor, medium: Video) -> Features:
        """Also second_per_grid_ts (1,): seconds between two places in time."""
        shown = len(self.frames_of(medium)) / medium.frames * float(medium.rate)  # frames a second
        seconds = np.array([self.of_video.temporal_patch_size / shown], np.float32)
        return {**super().features_of(frames, medium), "second_per_grid_ts": seconds}


@dataclass(frozen=True)
class Gemma4VideoProcessor:
    """Settings of Gemma 4's processor of videos, by transformers' names; `fps`, frames and tokens are the recipe's."""

    patch_size: int
    pooling_kernel_size: int
    max_soft_tokens: int  # of a frame
    num_frames: int | None  # None if `fps` is not
    fps: float | None
    max_frames: int | None
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    rescale_factor: float

    def to_json_string(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


# Attributes of transformers' class, which files need not name.
_GEMMA4: Mapping[str, Any] = {
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "max_soft_tokens": 70,
    "num_frames": 32,
    "image_mean": (0.0, 0.0, 0.0),
    "image_std": (1.0, 1.0, 1.0),
    "rescale_factor": 1 / 255,
}
_UNTIMED = 24.0  # frames a second of pictures without a rate, as transformers' processor of Gemma 4 has it


def _gemma4_processor(settings: FamilySettings) -> Gemma4VideoProcessor:
    """Returns the settings of the model's folder, with the recipe's. Raises UserError."""
    given, rules = _stored_settings(settings, _GEMMA4), settings.rules
    fps = rules.fps or given.get("fps")  # in files one of `fps` and `num_frames`
    side = given["patch_size"] * given["pooling_kernel_size"]
    return Gemma4VideoProcessor(
        max_soft_tokens=most_soft_tokens("data.video.max_pixels", rules.max_pixels, given["max_soft_tokens"], side),
        num_frames=None if fps else rules.max_frames or given["num_frames"],
        fps=fps,
        max_frames=rules.max_frames or given.get("max_frames") if fps else None,
        patch_size=given["patch_size"],
        pooling_kernel_size=given["pooling_kernel_size"],
        rescale_factor=given["rescale_factor"],
        image_mean=tuple(given["image_mean"]),
        image_std=tuple(given["image_std"]),
    )


class Gemma4Videos(VideoFamily):
    """pixel_values_videos (F, P, D) of all frames, video_position_ids (F, P, 2), num_frames_per_video (N,)."""

    def __init__(self, settings: FamilySettings):
        self.of_video = _gemma4_processor(settings)
        self.listed_rate = self.of_video.fps or _UNTIMED
        self.begin, _, self.end = image_marks(settings)
        self.tokenizer = settings.tokenizer
        super().__init__(settings, self.of_video, settings.row.placeholder, (self.begin, self.end), "video")

    def frames_of(self, stored: StoredVideo | Video) -> list[int]:
        look, total = self.of_video, stored.frames
        count = look.num_frames or total
        if look.fps:
            count = min(max(1, int(total / float(stored.rate) * look.fps)), look.max_frames or total)
        count = min(count, total)
        return (np.arange(count) * total // count).tolist()

    def scaled(self, stored: StoredVideo | Video, frames: int) -> tuple[int, int]:
        return scaled_picture(stored.height, stored.width, self.of_video)

    def write(self, stored: StoredVideo, indices: Sequence[int]) -> Written:
        height, width = self.scaled(stored, len(indices))
        each = height * width // (self.of_video.patch_size * self.of_video.pooling_kernel_size) ** 2
        seconds = [place / float(stored.rate) for place in indices]
        seen = f"{self.begin}{self.token * each}{self.end}"
        text = " ".join(f"{int(time // 60):02d}:{int(time % 60):02d} {seen}" for time in seconds)
        return Written(text, each * len(indices))

    def whole(self, input_ids: NDArray[np.int32], begin: int, end: int) -> tuple[int, int]:
        """From the first frame's time on, which is 00:00."""
        tokenizer: Any = self.tokenizer
        begin, last = begin - 1, begin - 1  # the mark before the first frame
        while begin > 0 and _FIRST_TIME not in tokenizer.decode(input_ids[begin:last]):
            begin -= 1
        return begin, end + 1

    def features_of(self, frames: Tensor, medium: Video) -> Features:
        look = self.of_video
        pixels = _normalized(frames, look.image_mean, look.image_std, look.rescale_factor)
        count, _, height, width = pixels.shape
        rows, columns = height // look.patch_size, width // look.patch_size
        patches = pixels.reshape(count, 3, rows, look.patch_size, columns, look.patch_size).permute(0, 2, 4, 3, 5, 1)
        places = torch.stack(torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy"), dim=-1)
        behind = look.max_soft_tokens * look.pooling_kernel_size**2 - rows * columns
        return {
            "pixel_values_videos": pad(patches.reshape(count, rows * columns, -1), (0, 0, 0, behind)).numpy(),
            "video_position_ids": pad(places.reshape(-1, 2), (0, 0, 0, behind), value=-1).repeat(count, 1, 1).numpy(),
            "num_frames_per_video": np.array([count], np.int64),
        }


_FIRST_TIME = "00:00"
