"""scripts/parity.py, whole: every case on every config that offers it, under accelerate's own launcher."""

from __future__ import annotations

from pathlib import Path
from random import SystemRandom

import parity
import pytest
from conftest import run_script

pytestmark = pytest.mark.timeout(4 * 3600)
LAUNCHES = parity.selected([])


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of scripts/parity.py with every case run on one process."""
    folder = tmp_path_factory.mktemp("parity")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_CACHE", str(folder / "cache"))
        patch.setattr(parity, "start_ranks", parity.accelerate_launch)
        parity.prepare(folder)
        parity.launch(folder, "single", 1, [case.name for case in parity.CASES])
    return folder


@pytest.mark.parametrize(
    ("config", "processes", "cases"), LAUNCHES, ids=[f"{config} x{processes}" for config, processes, _ in LAUNCHES]
)
def test_same_as_one_process(
    references: Path, monkeypatch: pytest.MonkeyPatch, config: str, processes: int, cases: list[parity.Case]
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(references / "cache"))
    monkeypatch.setattr(parity, "start_ranks", parity.accelerate_launch)
    parity.launch(references, config, processes, [case.name for case in cases])
    differences = [parity.compare(references, config, processes, case) for case in cases]
    assert [f"{d.case}: {problem}" for d in differences for problem in d.problems] == []
    assert all(d.passed for d in differences)


def test_cases_at_random() -> None:
    """With another seed each time; it is in the command that pytest shows where this fails."""
    run_script("parity_random.py", "--cases", 40, "--seed", SystemRandom().randrange(2**31))
