"""Clips in a real browser: they play on the studio's Data page and on the page of `inspect`, at both widths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hearing
import pytest
import yaml
from conftest import finetune
from studio_server import TOKEN, served
from web_driver import CHROMIUM, DRIVER, Chromium, chromium

pytest.importorskip("soundfile")
pytest.importorskip("soxr")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="no Chromium, or no chromedriver, here"),
]
# Seconds of each clip, when all have been read; a clip that cannot be played has an error.
DURATIONS = (
    "const clips = [...document.querySelectorAll('audio')];"
    "if (clips.some((clip) => clip.error)) return clips.map((clip) => clip.error && clip.error.message);"
    "for (const clip of clips) if (clip.preload == 'none') { clip.preload = 'auto'; clip.load(); }"
    "return clips.length && clips.every((clip) => clip.readyState >= 1) && clips.map((clip) => clip.duration)"
)
FITS = "return document.documentElement.scrollWidth <= window.innerWidth"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with clips, and the page of `inspect` for a recipe on them."""
    folder = tmp_path_factory.mktemp("sound-browser")
    hearing.save_hearing(folder, "qwen2_audio")
    hearing.write_clips(folder, "clips", 6, numbers=(1, 2))
    recipe = {
        "run": {"name": "run", "dir": str(folder / "runs")},
        "model": {"name": str(folder / "qwen2_audio_hears")},
        "mode": "full",
        "data": {"train": [{"path": str(folder / "clips.jsonl")}], "max_length": 128, "audio": {}},
        "batch": {"rows": 2},
        "optimizer": {"lr": 1e-3},
        "train": {"max_steps": 1, "precision": "fp32"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    done = finetune("inspect", folder / "recipe.yaml", "--html", folder / "look.html")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def site(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(folder)
    with served(folder) as port:
        yield f"http://127.0.0.1:{port}/?token={TOKEN}"


def played(page: Chromium) -> list[float]:
    return page.until(DURATIONS)


@pytest.mark.parametrize("width", [1280, 420])
def test_clips_play_in_the_studio_and_on_the_page_of_inspect(
    width: int, folder: Path, site: str, tmp_path: Path
) -> None:
    with chromium(tmp_path / "profile", width) as page:
        page.open(site)
        page.open(f"{site.partition('/?')[0]}/data?path=clips.jsonl")
        studio = played(page)
        assert page.run(FITS)
        assert page.log() == []
        page.open((folder / "look.html").as_uri())
        inspected = played(page)
        assert page.run(FITS)
        assert page.log() == []
    assert len(studio) == len(list((folder / "clips").iterdir()))
    assert all(0.1 < seconds < 1 for seconds in studio)
    # There also in the packed sequences.
    assert {round(seconds, 3) for seconds in inspected} == {round(seconds, 3) for seconds in studio}
