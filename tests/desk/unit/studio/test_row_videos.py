"""Videos of the rows that the Data page shows: each plays, and only files that a run would read."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filming
import numpy as np
import pytest
from PIL import Image, ImageSequence
from studio_server import TOKEN, Browser, served

from finetune.desk.studio.row_table import film_of, row_table
from finetune.errors import UserError

pytest.importorskip("av")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows in each form, one of whose files is no video, and one leads out of the folder."""
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data"
    data.mkdir()
    filming.write_video(data / "a.mp4", filming.noise(70, 64, 300, 0), 10, "mpeg4")
    filming.write_frames(data / "pictures", np.stack([np.full((40, 60, 3), 80 * i, np.uint8) for i in range(3)]))
    filming.write_video(tmp_path / "secret.mp4", filming.noise(4, 64, 64, 0), 10, "mpeg4")
    (data / "text.mp4").write_text("no video")

    def said(*paths: str) -> dict[str, Any]:
        parts: list[dict[str, str]] = [{"type": "video", "video": path} for path in paths]
        asked = {"role": "user", "content": [*parts, {"type": "text", "text": "which?"}]}
        return {"messages": [asked, {"role": "assistant", "content": "red"}]}

    rows = [said("a.mp4", "pictures"), said(), said("text.mp4"), said("../secret.mp4"), said("http://127.0.0.1/a.mp4")]
    (data / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def browser(folder: Path) -> Iterator[Browser]:
    with served(folder) as port:
        yield Browser(port, f"finetune-studio-{port}={TOKEN}")


def test_each_video_of_a_row_plays(folder: Path, browser: Browser) -> None:
    table = row_table("data/rows.jsonl", folder)
    assert (table["films"], table["sounds"]) == ([2, 0, 1, 1, 1], [])
    text = browser.get("/data?path=data/rows.jsonl")
    assert text.count("<details><summary>play video") == 5
    assert 'src="/film?path=data/rows.jsonl&amp;row=0&amp;clip=1"' in text
    with Image.open(io.BytesIO(film_of("data/rows.jsonl", 0, 0, folder))) as film:  # 7 s of 70 frames in 32
        assert (film.format, film.size, getattr(film, "n_frames", 1)) == ("GIF", (240, 51), 32)
        assert film.info["duration"] == 210
    with Image.open(io.BytesIO(film_of("data/rows.jsonl", 0, 1, folder))) as film:
        seen = [int(np.asarray(frame.convert("L")).mean()) for frame in ImageSequence.Iterator(film)]
        assert (seen, film.info["duration"]) == ([0, 80, 160], 500)
    (folder / "data" / "plain.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    assert "<details><summary>play" not in browser.get("/data?path=data/plain.jsonl")


@pytest.mark.parametrize(
    ("row", "clip", "message"),
    [
        (2, 0, "the video cannot be used"),
        (3, 0, "leads out of"),
        (4, 0, "videos are not fetched"),
        (1, 0, "row 2 has no video 1"),
        (0, 2, "row 1 has no video 3"),
        (9, 0, "row 10 has no video 1"),
        (-1, 0, "has no video"),
    ],
)
def test_what_no_run_would_read_is_not_played(
    row: int, clip: int, message: str, folder: Path, browser: Browser
) -> None:
    with pytest.raises(UserError, match=message):
        film_of("data/rows.jsonl", row, clip, folder)
    status, _, text = browser.ask("GET", f"/film?path=data/rows.jsonl&row={row}&clip={clip}")
    assert status == 400
    assert "GIF8" not in text
    status, _, _ = Browser(browser.port).ask("GET", "/film?path=data/rows.jsonl&row=0&clip=0")
    assert status == 403  # without the cookie
