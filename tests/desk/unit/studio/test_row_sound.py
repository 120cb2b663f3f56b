"""Clips of the rows that the Data page shows: a player for each, and only files that a run would read."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hearing
import pytest
from studio_server import TOKEN, Browser, served

from finetune.desk.studio.row_table import row_table, sound_of
from finetune.errors import UserError

pytest.importorskip("soundfile")
pytest.importorskip("soxr")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows in each form, one of whose files is no sound, and one leads out of the folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name, seconds in (("a", 0.5), ("b", 0.25)):
        hearing.write_wav(tmp_path / "data" / f"{name}.wav", hearing.tone(300, seconds, 8_000), 8_000)
    hearing.write_wav(tmp_path / "secret.wav", hearing.tone(300, 0.5))
    (tmp_path / "data" / "text.wav").write_text("no sound")

    def said(*paths: str) -> dict[str, Any]:
        parts: list[dict[str, str]] = [{"type": "audio", "audio": path} for path in paths]
        asked = {"role": "user", "content": [*parts, {"type": "text", "text": "which?"}]}
        return {"messages": [asked, {"role": "assistant", "content": "red"}]}

    rows = [said("a.wav", "b.wav"), said(), said("text.wav"), said("../secret.wav"), said("http://127.0.0.1/a.wav")]
    (tmp_path / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def browser(folder: Path) -> Iterator[Browser]:
    with served(folder) as port:
        yield Browser(port, f"finetune-studio-{port}={TOKEN}")


def test_each_clip_of_a_row_has_a_player(folder: Path, browser: Browser) -> None:
    assert row_table("data/rows.jsonl", folder)["sounds"] == [2, 0, 1, 1, 1]
    text = browser.get("/data?path=data/rows.jsonl")
    assert text.count("<audio controls") == 5
    assert 'src="/sound?path=data/rows.jsonl&amp;row=0&amp;clip=1"' in text
    for clip, samples in ((0, 8_000), (1, 4_000)):
        with wave.open(io.BytesIO(sound_of("data/rows.jsonl", 0, clip, folder))) as played:
            assert (played.getframerate(), played.getnframes()) == (16_000, samples)
    (folder / "data" / "plain.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    assert "<audio" not in browser.get("/data?path=data/plain.jsonl")


@pytest.mark.parametrize(
    ("row", "clip", "message"),
    [
        (2, 0, "the sound file cannot be used"),
        (3, 0, "leads out of"),
        (4, 0, "sound files are not fetched"),
        (1, 0, "row 2 has no clip 1"),
        (0, 2, "row 1 has no clip 3"),
        (9, 0, "row 10 has no clip 1"),
        (-1, 0, "has no clip"),
    ],
)
def test_what_no_run_would_read_is_not_played(
    row: int, clip: int, message: str, folder: Path, browser: Browser
) -> None:
    with pytest.raises(UserError, match=message):
        sound_of("data/rows.jsonl", row, clip, folder)
    status, _, text = browser.ask("GET", f"/sound?path=data/rows.jsonl&row={row}&clip={clip}")
    assert status == 400
    assert "RIFF" not in text
    status, _, _ = Browser(browser.port).ask("GET", "/sound?path=data/rows.jsonl&row=0&clip=0")
    assert status == 403  # without the cookie
