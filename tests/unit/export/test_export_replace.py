"""The result is replaced as a whole, whatever an interrupted save left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.export.result import finish_replace, partial_path, start_replace


def make(folder: Path, content: str) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text(content)
    return folder


def fill(folder: Path, content: str) -> None:
    (partial_path(folder) / "inner").mkdir()
    (partial_path(folder) / "inner" / "file").write_text(content)


def held(folder: Path) -> str:
    return (folder / "inner" / "file").read_text()


@pytest.mark.parametrize("earlier", [False, True])
def test_the_new_one_takes_the_name(tmp_path: Path, earlier: bool) -> None:
    folder = tmp_path / "model"
    if earlier:
        make(folder, "old")
    start_replace(folder)
    assert held(folder) == "old" if earlier else not folder.exists()
    fill(folder, "new")
    finish_replace(folder)
    assert held(folder) == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("left", "stays"),
    [
        (("model", "model.partial"), "model"),  # stopped while writing
        (("model", "model.old"), "model"),  # stopped before the old one was gone
        (("model.old", "model.partial"), "model.old"),  # stopped between the two renames
    ],
)
def test_what_an_interrupted_save_left_is_swept_up(tmp_path: Path, left: tuple[str, ...], stays: str) -> None:
    for name in left:
        make(tmp_path / name, name)
    start_replace(tmp_path / "model")
    assert held(tmp_path / "model") == stays
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.partial"]
    assert not list((tmp_path / "model.partial").iterdir())
