"""Recorded rollouts on every config and size: scripts/proofs/replay_matrix.py, each launch with all its replays."""

from __future__ import annotations

from pathlib import Path

import forks
import parity
import pytest
import replay_matrix

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two recorded runs, and all replays on one process."""
    folder = tmp_path_factory.mktemp("replay")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_CACHE", str(folder / "cache"))
        patch.setattr(parity, "start_ranks", forks.launch_in_matrices)
        replay_matrix.prepare(folder)
        assert all(cell.passed for cell in replay_matrix.replay(folder, "single", 1))
    return folder


@pytest.mark.parametrize(
    ("config", "processes"), [place for place in replay_matrix.PLACES if place[0] != "single"], ids=str
)
def test_recorded_rollouts_have_the_losses_of_one_process(
    folder: Path, config: str, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(folder / "cache"))
    monkeypatch.setattr(parity, "start_ranks", forks.launch_in_matrices)
    cells = replay_matrix.replay(folder, config, processes, replay_matrix.micro_batches_at(processes))
    assert [cell for cell in cells if not cell.passed] == []
