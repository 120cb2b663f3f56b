"""The parity matrix, thinned so that it still covers (`parity.covering`):

- every case, and every config and size; but of the seven launches of eight processes four;
- every word of a case's name (its mode, model, objective, precision, head, ...) with every kind of config that has it:
  ddp, fsdp2, zero, pp, tp, cp and ep.

Two ranks of a shipped config are started by accelerate's own launcher. That is a quarter of all cells, drawn each time.
scripts/proofs/parity_matrix.py runs the whole matrix, some hours on two cores; with `--covering SEED` what a seed draws
here.
"""

from __future__ import annotations

from pathlib import Path
from random import SystemRandom

import forks
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
        patch.setattr(parity, "start_ranks", forks.launch_in_matrices)
        parity.prepare(folder)
        parity.launch(folder, "single", 1, [case.name for case in parity.CASES])
    return folder


@pytest.fixture(scope="module")
def drawn() -> dict[tuple[str, int], list[parity.Case]]:
    """The cases of each launch, by a seed that the output shows."""
    seed = SystemRandom().randrange(2**31)
    print(f"cells of seed {seed}")
    return {(config, processes): cases for config, processes, cases in parity.covering(seed)}


@pytest.mark.parametrize(
    ("config", "processes"),
    [(config, processes) for config, processes, _ in LAUNCHES],
    ids=[f"{config} x{processes}" for config, processes, _ in LAUNCHES],
)
def test_same_as_one_process(
    references: Path,
    drawn: dict[tuple[str, int], list[parity.Case]],
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    processes: int,
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(references / "cache"))
    monkeypatch.setattr(parity, "start_ranks", forks.launch_in_matrices)
    chosen = drawn.get((config, processes), [])
    if not chosen:
        pytest.skip("another launch of eight processes was drawn")
    parity.launch(references, config, processes, [case.name for case in chosen])
    differences = [parity.compare(references, config, processes, case) for case in chosen]
    assert [f"{d.case}: {problem}" for d in differences for problem in d.problems] == []
    assert all(d.passed for d in differences)


def test_cases_at_random() -> None:
    """With another seed each time; it is in the command that pytest shows where this fails."""
    run_script("proofs/parity_random.py", "--cases", 20, "--seed", SystemRandom().randrange(2**31))
