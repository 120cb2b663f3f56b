"""scripts/resume_matrix.py, whole: saved under any config and size, resumed under any other."""

from __future__ import annotations

from pathlib import Path

import parity
import pytest
import resume_matrix
from resume_matrix import PLACES, Pair, Place

pytestmark = pytest.mark.timeout(8 * 3600)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of scripts/resume_matrix.py with a checkpoint of every case under every place."""
    folder = tmp_path_factory.mktemp("resume")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_CACHE", str(folder / "cache"))
        patch.setattr(parity, "start_ranks", parity.accelerate_launch)
        resume_matrix.prepare(folder, PLACES)
    return folder


@pytest.mark.parametrize("place", PLACES, ids=[f"on {config} x{size}" for config, size in PLACES])
def test_resumes_as_if_never_stopped(saved: Path, monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(saved / "cache"))
    monkeypatch.setattr(parity, "start_ranks", parity.accelerate_launch)
    pairs = [Pair(source, place, case) for source in PLACES for case in resume_matrix.cases(source, place)]
    resume_matrix.resume(saved, pairs)
    assert [cell for cell in (resume_matrix.compare(saved, pair) for pair in pairs) if not cell["passed"]] == []
