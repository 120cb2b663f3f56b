"""Saved under one backend, resumed under another and at another size: a few cells of scripts/resume_matrix.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import resume_matrix

SAVED = [("single", 1), ("fsdp2", 2), ("zero3", 2)]
RESUMED = [("zero2", 2), ("ddp", 4)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_CACHE", str(folder / "cache"))
        resume_matrix.parity.prepare(folder)
        for config, processes in SAVED:
            resume_matrix.save(folder, config, processes)
    return folder


@pytest.mark.parametrize(("config", "processes"), RESUMED)
def test_goes_on_as_if_never_stopped(saved: Path, monkeypatch: pytest.MonkeyPatch, config: str, processes: int) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(saved / "cache"))
    resume_matrix.resume(saved, SAVED, config, processes)
    cells = [
        resume_matrix.compare(saved, source, (config, processes), case)
        for source in SAVED
        for case in resume_matrix.CASES
    ]
    assert len(cells) == len(SAVED) * 2
    assert [cell for cell in cells if not cell["passed"]] == []
