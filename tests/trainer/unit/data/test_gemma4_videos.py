"""Ids, masks and pixels of rows with videos for Gemma 4 are those that transformers' own processor makes."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import filming
import numpy as np
import pytest
import several

from .test_video_ids import SIZES, by_processor, calls, chats, ours

# What transformers' processor made of `chats`, by `video_processor.py` with torchvision 0.29 and transformers 5.23.
RECORDED = Path(__file__).parent / "gemma4_videos.json"
RATES = {f"videos/{i}": filming.RATE for i in range(len(SIZES))}
# Of the recipe, and of the processor: of the shortest video all frames are seen, for which the processor has an error.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "frames": ({"max_frames": 2}, {"num_frames": 2}),
    "rate": ({"fps": 5.0}, {"num_frames": None, "fps": 5.0}),
    "pixels": ({"max_frames": 2, "max_pixels": 150 * 48 * 48}, {"num_frames": 2, "max_soft_tokens": 140}),
}


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma4-films")
    several.save_gemma4(folder, "gemma4_films")
    for i, (frames, height, width) in enumerate(SIZES):
        film = filming.noise(frames, height, width, i)
        filming.write_frames(folder / "videos" / str(i), film)
        np.save(folder / "videos" / f"{i}.npy", film)
    return folder


def mine(films: Path, rows: list[dict[str, Any]], name: str) -> list[dict[str, np.ndarray]]:
    found = ours(films, "gemma4", rows, video={"frame_rate": filming.RATE, **SETTINGS[name][0]})
    return [inputs for inputs in found if "pixel_values_videos" in inputs]


def summary(inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """What is recorded of a row: ids, frames, and digests of pixels and their places."""
    digests = ("pixel_values_videos", "video_position_ids")
    shown = {key: inputs[key].tolist() for key in ("input_ids", "num_frames_per_video")}
    return {**shown, **{key: hashlib.sha256(inputs[key].tobytes()).hexdigest()[:16] for key in digests}}


def test_rows_are_as_the_processor_was_recorded(films: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    found = [summary(inputs) for inputs in mine(films, chats(10, 1, [str(i) for i in range(len(SIZES))]), "frames")]
    assert len(found) >= 5
    assert found == json.loads(RECORDED.read_text(encoding="utf-8"))


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_rows_are_the_processor_s(name: str, films: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    rows = chats(30, 1, [str(i) for i in range(len(SIZES))])
    found = mine(films, rows, name)
    theirs = by_processor(films, calls(films, "gemma4", rows, RATES, **SETTINGS[name][1]))
    assert len(found) == len(theirs) > 15
    for inputs, expected in zip(found, theirs, strict=True):
        for key in inputs.keys() - {"position_ids"}:
            assert np.array_equal(inputs[key], expected[key]), key
    if name == "frames" and os.environ.get("RECORD"):
        first = chats(10, 1, [str(i) for i in range(len(SIZES))])
        recorded = [
            summary(inputs) for inputs in by_processor(films, calls(films, "gemma4", first, RATES, num_frames=2))
        ]
        RECORDED.write_text(json.dumps(recorded) + "\n", encoding="utf-8")
