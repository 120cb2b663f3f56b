"""Tiny models that see videos, and rows with some: squares whose colours are the answer."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiny
from numpy.typing import NDArray
from PIL import Image

TOKENS = ("<|video_pad|>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
# Of each family: video_preprocessor_config.json. Bounds are of a frame, of Qwen3-VL of all frames.
FILMING: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"patch_size": 14, "size": {"shortest_edge": 28 * 28, "longest_edge": 4 * 28 * 28}},
    "qwen3_vl": {"patch_size": 14, "size": {"shortest_edge": 2 * 28 * 28, "longest_edge": 24 * 28 * 28}},
}
COLOURS = {"red": (220, 30, 40), "green": (20, 180, 60), "blue": (40, 60, 220)}


def save_filming(folder: Path, name: str, **changes: Any) -> Path:
    """A model of `FILMING` with tokenizer, template and processors, in `folder/<name>_films`."""
    from transformers import PreTrainedTokenizerFast

    roles = ("video_token", "image_token", "vision_start_token", "vision_end_token")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tiny.tokenizer().backend_tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        extra_special_tokens=dict(zip(roles, TOKENS, strict=True)),
    )
    content = tiny.PARTS_OF_CONTENT.replace("PLACEHOLDER", "<|vision_start|><|image_pad|><|vision_end|>")
    video = "{% elif p.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}"
    fast.chat_template = tiny.CHATML.replace(
        "{{ m.content }}", content.replace("{% else %}{{ p.text", video + "{{ p.text")
    )
    ids = {f"{role}_id": fast.convert_tokens_to_ids(token) for role, token in zip(roles, TOKENS, strict=True)}
    made = tiny.save_multimodal(folder / "made", name, **{**ids, **changes})
    fast.save_pretrained(made)
    (made / "preprocessor_config.json").write_text(json.dumps(tiny.SEEING[name][2]), encoding="utf-8")
    (made / "video_preprocessor_config.json").write_text(json.dumps(FILMING[name]), encoding="utf-8")
    shutil.rmtree(into := folder / f"{name}_films", ignore_errors=True)
    return made.rename(into)


def noise(frames: int, height: int, width: int, seed: int) -> NDArray[np.uint8]:  # (frames, H, W, 3)
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), np.uint8)


def write_frames(folder: Path, frames: NDArray[np.uint8]) -> Path:
    """Writes a folder of pictures, whose names do not sort as their numbers do."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, frame in enumerate(frames):
        Image.fromarray(frame).save(folder / f"{i}.png")
    return folder


def write_video(path: Path, frames: NDArray[np.uint8], rate: int = 8, codec: str = "libx264", **settings: Any) -> Path:
    """Writes frames (N, H, W, 3) by PyAV; its container follows from the name. settings: of the stream."""
    import av

    pixels = {"gif": "rgb8", "mjpeg": "yuvj420p"}.get(codec, "yuv420p")
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], pixels
        for key, value in settings.items():
            setattr(stream, key, value)
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path


def square(colour: str, frames: int, height: int, width: int, rng: random.Random) -> NDArray[np.uint8]:
    """A coloured square that crosses a grey ground."""
    film = np.full((frames, height, width, 3), rng.randrange(90, 150), np.uint8)
    side = min(height, width) // 2
    for i in range(frames):
        left = (width - side) * i // max(frames - 1, 1)
        film[i, side // 2 : side // 2 + side, left : left + side] = COLOURS[colour]
    return film


def write_films(
    folder: Path, name: str, count: int, seed: int = 0, numbers: Sequence[int] = (0, 1, 1, 2), listed: bool = False
) -> Path:
    """Rows `name.jsonl` with videos, whose colours are the answer; without a video, answers to a text. numbers: of
    videos, one of which is drawn for each row; listed: folders of pictures in place of files."""
    rng = random.Random(seed)
    (folder / name).mkdir(exist_ok=True)
    rows = []
    for i, row in enumerate(tiny.conversations(count, seed)):
        seen = [rng.choice(sorted(COLOURS)) for _ in range(rng.choice(numbers))]
        parts: list[dict[str, str]] = []
        for n, colour in enumerate(seen):
            film = square(colour, rng.randint(5, 12), 2 * rng.randint(28, 50), 2 * rng.randint(28, 50), rng)
            if listed:
                write_frames(folder / name / f"{i}-{n}", film)
            else:
                write_video(folder / name / f"{i}-{n}.mp4", film, rng.choice((5, 8, 10)))
            parts.append({"type": "video", "video": f"{name}/{i}-{n}" + ("" if listed else ".mp4")})
        question, answer = row["messages"]
        if seen:
            said = [*parts, {"type": "text", "text": question["content"]}]
            if rng.random() < 0.3:
                said = [said[-1], *parts]
            question = {"role": "user", "content": said}
            answer = {"role": "assistant", "content": " ".join(seen)}
        rows.append({"messages": [question, answer]})
    return tiny.write_rows(folder / f"{name}.jsonl", rows)


RATE = 7.5  # frames a second of the folders


def recipe_of(folder: Path, name: str, rows: list[dict[str, Any]], format: str = "messages", **data: Any) -> Any:
    """The recipe of a run of a model of `FILMING` on rows with videos, in `folder`."""
    from finetune.recipe import Recipe

    tiny.write_rows(folder / "chats.jsonl", rows)
    return Recipe.model_validate(
        {
            "run": {"name": "r"},
            "model": {"name": str(folder / f"{name}_films")},
            "data": {
                "train": [{"path": str(folder / "chats.jsonl"), "format": format}],
                "max_length": 100_000,
                "video": {"frame_rate": RATE},
                **data,
            },
            "mode": "full",
            "train": {"max_steps": 1, "precision": "fp32"},
            "batch": {"rows": 1},
            "optimizer": {"lr": 1e-3},
        }
    )
