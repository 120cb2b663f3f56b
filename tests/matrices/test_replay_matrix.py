"""Recorded rollouts on every config and size: scripts/proofs/replay_matrix.py, thinned.

Each launch of two processes replays every case, in one micro-batch on each or in many; one of four, a third of them.
Which, is drawn each time."""

from __future__ import annotations

from pathlib import Path
from random import Random, SystemRandom

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
        assert all(cell.passed for cell in replay_matrix.replay(folder, "single", 1, replay_matrix.replays(1)))
    return folder


def draw(processes: int, random: Random) -> list[tuple[str, str]]:
    """Of one process and of two each case once, of four every third."""
    offered = replay_matrix.replays(processes)
    if processes == 4:
        return random.sample(offered, len(offered) // 3)
    return [random.choice([cell for cell in offered if cell[0] == case]) for case in replay_matrix.cases()]


@pytest.mark.parametrize(
    ("config", "processes"), [place for place in replay_matrix.PLACES if place[0] != "single"], ids=str
)
def test_recorded_rollouts_have_the_losses_of_one_process(
    folder: Path, config: str, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(folder / "cache"))
    monkeypatch.setattr(parity, "start_ranks", forks.launch_in_matrices)
    seed = SystemRandom().randrange(2**31)
    cells = replay_matrix.replay(folder, config, processes, draw(processes, Random(seed)))
    assert [cell for cell in cells if not cell.passed] == [], f"drawn by {seed}"
