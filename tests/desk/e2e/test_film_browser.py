"""Videos in a real browser: frames on the studio's Data page and on the page of `inspect`, at both widths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import filming
import pytest
import yaml
from conftest import finetune
from studio_server import TOKEN, served
from web_driver import CHROMIUM, DRIVER, chromium

pytest.importorskip("av")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="no Chromium, or no chromedriver, here"),
]
# The shapes of all frames, when they are there.
SHAPES = (
    "const films = [...document.querySelectorAll('img')]; films.forEach((film) => film.scrollIntoView());"
    "return films.length && films.every((film) => film.complete && film.naturalWidth)"
    " && films.map((film) => [film.naturalWidth, film.naturalHeight])"
)
FITS = "return document.documentElement.scrollWidth <= window.innerWidth"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with videos, and the page of `inspect` for a recipe on them."""
    folder = tmp_path_factory.mktemp("film-browser")
    filming.save_filming(folder, "qwen3_vl")
    filming.write_films(folder, "films", 6, numbers=(1, 2))
    recipe = {
        "run": {"name": "run", "dir": str(folder / "runs")},
        "model": {"name": str(folder / "qwen3_vl_films")},
        "mode": "full",
        "data": {"train": [{"path": str(folder / "films.jsonl")}], "max_length": 512, "video": {}},
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


@pytest.mark.parametrize("width", [1280, 420])
def test_frames_are_seen_in_the_studio_and_on_the_page_of_inspect(
    width: int, folder: Path, site: str, tmp_path: Path
) -> None:
    with chromium(tmp_path / "profile", width) as page:
        page.open(site)
        page.open(f"{site.partition('/?')[0]}/data?path=films.jsonl")
        studio = page.until(SHAPES)
        assert page.run(FITS)
        assert page.log() == []
        page.open((folder / "look.html").as_uri())
        inspected = page.until(SHAPES)
        assert page.run(FITS)
        assert page.log() == []
    assert len(studio) == len(list((folder / "films").iterdir()))
    assert all(width > height for width, height in [*studio, *inspected])  # frames side by side
