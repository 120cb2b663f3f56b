"""Few frames of a long video are decoded from the key frames before them, and are the same to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import filming
import numpy as np
import pytest
from usual import usual

from finetune.data.media import video_files
from finetune.data.samples import Video

pytest.importorskip("av")
FRAMES = 120
WANTED = [0, 61, 119]
# codec, container, settings of the stream, whether a key resets the decoder
FILES: dict[str, tuple[str, str, dict[str, Any], bool]] = {
    "h264": ("libx264", "mp4", {"gop_size": 12}, True),
    "h264 open": (
        "libx264",
        "mp4",
        {"options": {"x264-params": "open-gop=1:keyint=12:min-keyint=12:bframes=3"}},
        False,
    ),
    "h264 one group": ("libx264", "mp4", {"gop_size": 1000}, False),
    "h264 mkv": ("libx264", "mkv", {"gop_size": 12}, True),
    "vp9": ("libvpx-vp9", "webm", {"gop_size": 12, "options": {"deadline": "realtime", "cpu-used": "8"}}, True),
    "mpeg4": ("mpeg4", "mp4", {"gop_size": 12}, False),
}


@pytest.fixture(scope="module")
def film() -> np.ndarray:
    """A bright square on noise that changes: each frame differs from the others."""
    frames = np.repeat(filming.noise(1, 48, 64, 0) // 3, FRAMES, axis=0)
    for i, frame in enumerate(frames):
        frame[i % 40 : i % 40 + 8, i % 56 : i % 56 + 8] = 255 - i
    return frames


def written(folder: Path, name: str, film: np.ndarray) -> Video:
    codec, container, settings, _ = FILES[name]
    path = filming.write_video(folder / f"film.{container}", film, 24, codec, **settings)
    return Video(str(path), FRAMES, Fraction(24), 48, 64, len(WANTED), 0, 1)


@pytest.mark.parametrize("name", usual(FILES, "h264", "vp9"))
def test_frames_are_those_without_seeking(
    name: str, film: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    video, decoded, own = written(tmp_path, name, film), list[int](), video_files.sought
    everyone = list(video_files.frames_at(video, range(FRAMES)))

    def counted(*args: Any, **kwargs: Any) -> Iterator[tuple[int, Any]]:
        for i, frame in own(*args, **kwargs):
            decoded.append(i)
            yield i, frame

    monkeypatch.setattr(video_files, "sought", counted)
    found = list(video_files.frames_at(video, WANTED))
    assert len(found) == len(WANTED)
    for place, frame in zip(WANTED, found, strict=True):
        assert np.array_equal(frame, everyone[place])
        assert not np.array_equal(frame, everyone[(place + 1) % FRAMES])
    if FILES[name][3]:
        assert {*WANTED} <= {*decoded}
        assert len(decoded) < FRAMES / 2


def test_a_file_that_is_not_as_its_index_says_is_decoded_whole(
    film: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    video, own = written(tmp_path, "h264", film), video_files.index_of

    def otherwise(*args: Any) -> Any:
        found = own(*args)
        assert found is not None
        return type(found)(tuple(time + 1 for time in found.times), found.keys)

    everyone = list(video_files.frames_at(video, range(FRAMES)))
    monkeypatch.setattr(video_files, "index_of", otherwise)
    for place, frame in zip(WANTED, video_files.frames_at(video, WANTED), strict=True):
        assert np.array_equal(frame, everyone[place])


def test_frames_next_to_each_other_need_no_index(
    film: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(video_files, "index_of", never)
    assert len(list(video_files.frames_at(written(tmp_path, "h264", film), range(0, FRAMES, 20)))) == 6
