"""Models that hear, on several processes, some of which have no clip in most steps: as one process, and resumed.

`zero3_gathering` gathers every weight of these tiny models where it is used, so that ranks that call modules in another
order wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hearing
import parity
import pytest
import resume_matrix
from resume_matrix import SINGLE, Pair, Place

pytestmark = pytest.mark.skipif(parity.HEARS[0] not in parity.CASES, reason="needs soundfile")
STOP, STEPS, ROWS = 2, 4, 48
# Rows are single documents, of which most have no clip: ranks differ in most micro-batches.
CASES = {case.name: replace(case, overrides=(*case.overrides, "data.packing=false")) for case in parity.HEARS}
RESUMED = "full audio gemma4"
# Without those of rare clips, whose rows are the matrix's.
OF_RANKS = [name for name in CASES if "rare" not in name]
OF_TENSOR_RANKS = [name for name in OF_RANKS if name in parity.MEDIA_OF_TENSOR_RANKS]
LONG = pytest.mark.long
LAUNCHES = [
    pytest.param("zero3_gathering", [RESUMED], id="zero3, Gemma 4"),
    pytest.param("zero3_gathering", [name for name in OF_RANKS if name != RESUMED], id="zero3", marks=LONG),
    pytest.param("tp", OF_TENSOR_RANKS, id="tp", marks=LONG),
]
PLACES: list[Place] = [("ddp", 2), ("fsdp2", 2), ("zero3", 2), ("tp", 2)]
PAIRS = [
    *(pytest.param(SINGLE, place, id=f"on {place[0]}", marks=LONG) for place in PLACES),
    *(pytest.param(place, SINGLE, id=f"from {place[0]}", marks=LONG) for place in PLACES[1:]),
    pytest.param(("ddp", 2), SINGLE, id="from ddp"),
    pytest.param(("ddp", 2), ("zero3", 2), id="from ddp on zero3", marks=LONG),
    pytest.param(("zero3", 2), ("fsdp2", 2), id="from zero3 on fsdp2", marks=LONG),
]


@pytest.fixture(scope="module", autouse=True)
def few_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "STEPS", STEPS)
        patch.setattr(resume_matrix, "STEPS", STEPS)
        patch.setattr(resume_matrix, "STOP", STOP)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sound")
    parity.prepare_sound(made, hearing.available(), ROWS, silent=5)
    parity.write_base_recipe(made)
    return made


@pytest.fixture(autouse=True)
def own_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(folder / "cache"))


def save(folder: Path, place: Place, names: list[str]) -> None:
    """Runs cases through, with a checkpoint on the way."""
    jobs = [
        resume_matrix.job(folder, place, CASES[name], parity.run_name(*place, name))
        for name in names
        if not resume_matrix.finished(folder / "runs" / parity.run_name(*place, name))
    ]
    if jobs:
        parity.launch_jobs(folder, *place, jobs)


@pytest.mark.parametrize(("config", "names"), LAUNCHES)
def test_two_ranks_train_as_one_process(folder: Path, config: str, names: list[str]) -> None:
    for place in (SINGLE, (config, 2)):
        save(folder, place, names)
    differences = [parity.compare(folder, config, 2, CASES[name]) for name in names]
    assert [f"{one.case}: {problem}" for one in differences for problem in one.problems] == []
    assert len(differences) > 0


@pytest.mark.parametrize(("saved", "resumed"), PAIRS)
def test_resumes_elsewhere_as_if_never_stopped(folder: Path, saved: Place, resumed: Place) -> None:
    pair = Pair(saved, resumed, CASES[RESUMED])
    for place in (SINGLE, saved):
        save(folder, place, [RESUMED])
    resume_matrix.resume(folder, [pair])
    cell = resume_matrix.compare(folder, pair)
    assert cell["passed"], cell
    assert cell["same_rows"]
