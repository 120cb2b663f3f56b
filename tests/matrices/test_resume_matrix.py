"""Every config and size saves and resumes (`resume_matrix`): with its own, one process's and one that is drawn.

One process reads what each of them wrote, and each of them what one process wrote, so what a pair of others adds is
what neither of its halves shows: one case of each place is drawn for it. The script runs all pairs (2,513 cells).
"""

from __future__ import annotations

from pathlib import Path
from random import Random, SystemRandom

import parity
import pytest
import resume_matrix
from resume_matrix import PLACES, Pair, Place

SINGLE: Place = ("single", 1)

pytestmark = pytest.mark.timeout(8 * 3600)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of scripts/proofs/resume_matrix.py with a checkpoint of every case under every place."""
    folder = tmp_path_factory.mktemp("resume")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_CACHE", str(folder / "cache"))
        patch.setattr(parity, "start_ranks", parity.accelerate_launch)
        resume_matrix.prepare(folder, PLACES)
    return folder


@pytest.fixture(scope="module")
def random() -> Random:
    """Draws others each time, by a seed that the output shows."""
    seed = SystemRandom().randrange(2**31)
    print(f"pairs of seed {seed}")
    return Random(seed)


@pytest.mark.parametrize("place", PLACES, ids=[f"on {config} x{size}" for config, size in PLACES])
def test_resumes_as_if_never_stopped(
    saved: Path, random: Random, monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(saved / "cache"))
    monkeypatch.setattr(parity, "start_ranks", parity.accelerate_launch)
    sources = PLACES if place == SINGLE else (place, SINGLE)
    pairs = [Pair(source, place, case) for source in sources for case in resume_matrix.cases(source, place)]
    if place != SINGLE:
        others = [Pair(source, place, case) for source in PLACES for case in resume_matrix.cases(source, place)]
        pairs.append(random.choice([pair for pair in others if pair.saved not in sources]))
    resume_matrix.resume(saved, pairs)
    assert [cell for cell in (resume_matrix.compare(saved, pair) for pair in pairs) if not cell["passed"]] == []
