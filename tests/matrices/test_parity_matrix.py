"""The parity matrix under accelerate's own launcher: every config and size, every case, a third of all cells.

Which third is drawn each time. scripts/proofs/parity_matrix.py runs the whole matrix, some hours on two cores.
"""

from __future__ import annotations

from pathlib import Path
from random import Random, SystemRandom

import parity
import pytest
from conftest import run_script

pytestmark = pytest.mark.timeout(4 * 3600)
LAUNCHES = parity.selected([])


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of scripts/proofs/parity_matrix.py with every case run on one process."""
    folder = tmp_path_factory.mktemp("parity")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_CACHE", str(folder / "cache"))
        patch.setattr(parity, "start_ranks", parity.accelerate_launch)
        parity.prepare(folder)
        parity.launch(folder, "single", 1, [case.name for case in parity.CASES])
    return folder


@pytest.fixture(scope="module")
def drawn() -> dict[tuple[str, int], set[str]]:
    """Of each launch the names of its cases: of each case's launches a third, at least one, and of each launch at least
    one case; by a seed that the output shows."""
    seed = SystemRandom().randrange(2**31)
    print(f"cells of seed {seed}")
    random, names = Random(seed), dict[tuple[str, int], set[str]]()
    for case in parity.CASES:
        offered = [(config, processes) for config, processes, cases in LAUNCHES if case in cases]
        for place in random.sample(offered, -(-len(offered) // 3)):
            names.setdefault(place, set()).add(case.name)
    for config, processes, cases in LAUNCHES:
        names.setdefault((config, processes), {random.choice(cases).name})
    return names


@pytest.mark.parametrize(
    ("config", "processes", "cases"), LAUNCHES, ids=[f"{config} x{processes}" for config, processes, _ in LAUNCHES]
)
def test_same_as_one_process(
    references: Path,
    drawn: dict[tuple[str, int], set[str]],
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    processes: int,
    cases: list[parity.Case],
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(references / "cache"))
    monkeypatch.setattr(parity, "start_ranks", parity.accelerate_launch)
    chosen = [case for case in cases if case.name in drawn[config, processes]]
    parity.launch(references, config, processes, [case.name for case in chosen])
    differences = [parity.compare(references, config, processes, case) for case in chosen]
    assert [f"{d.case}: {problem}" for d in differences for problem in d.problems] == []
    assert all(d.passed for d in differences)


def test_cases_at_random() -> None:
    """With another seed each time; it is in the command that pytest shows where this fails."""
    run_script("proofs/parity_random.py", "--cases", 20, "--seed", SystemRandom().randrange(2**31))
