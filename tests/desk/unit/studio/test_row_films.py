"""Videos of the rows that the Data page shows: frames of each, and only of files that a run would read."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filming
import numpy as np
import pytest
from PIL import Image
from studio_server import TOKEN, Browser, served

from finetune.desk.studio.row_table import film_of, row_table
from finetune.errors import UserError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows with folders of pictures, one of which leads out, a file that is no video, and an address."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    grey = [np.full((60, 80, 3), 2 * i, np.uint8) for i in range(100)]
    filming.write_frames(tmp_path / "data" / "film", np.stack(grey))
    filming.write_frames(tmp_path / "secret", np.stack(grey[:3]))
    (tmp_path / "data" / "text.mp4").write_text("no video")

    def said(*paths: str) -> dict[str, Any]:
        parts: list[dict[str, str]] = [{"type": "video", "video": path} for path in paths]
        asked = {"role": "user", "content": [*parts, {"type": "text", "text": "which?"}]}
        return {"messages": [asked, {"role": "assistant", "content": "red"}]}

    rows = [said("film", "film"), said(), said("text.mp4"), said("../secret"), said("http://127.0.0.1/a.mp4")]
    (tmp_path / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def browser(folder: Path) -> Iterator[Browser]:
    with served(folder) as port:
        yield Browser(port, f"finetune-studio-{port}={TOKEN}")


def test_each_video_of_a_row_has_frames_of_its_first_minute(folder: Path, browser: Browser) -> None:
    table = row_table("data/rows.jsonl", folder)
    assert (table["films"], table["sounds"]) == ([2, 0, 1, 1, 1], [])
    text = browser.get("/data?path=data/rows.jsonl")
    assert text.count("<img loading") == 5
    assert 'src="/film?path=data/rows.jsonl&amp;row=0&amp;video=1"' in text
    shown = np.asarray(Image.open(io.BytesIO(film_of("data/rows.jsonl", 0, 1, folder))))
    assert shown.shape == (60, 8 * 88 - 8, 3)
    assert shown[30, 40::88, 0].tolist() == [0, 16, 34, 50, 68, 84, 102, 118]  # of 60 frames, one a second


@pytest.mark.parametrize(
    ("row", "video", "message"),
    [
        (2, 0, "the video cannot be used"),
        (3, 0, "leads out of"),
        (4, 0, "videos are not fetched"),
        (1, 0, "row 2 has no video 1"),
        (0, 2, "row 1 has no video 3"),
        (-1, 0, "has no video"),
    ],
)
def test_what_no_run_would_read_is_not_shown(
    row: int, video: int, message: str, folder: Path, browser: Browser
) -> None:
    with pytest.raises(UserError, match=message):
        film_of("data/rows.jsonl", row, video, folder)
    status, _, text = browser.ask("GET", f"/film?path=data/rows.jsonl&row={row}&video={video}")
    assert status == 400
    assert "PNG" not in text
    status, _, _ = Browser(browser.port).ask("GET", "/film?path=data/rows.jsonl&row=0&video=0")
    assert status == 403  # without the cookie
