"""scripts/planner/plan_state.py: the bytes that `plan` predicts of each rank are those that real processes keep."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import plan_state
import pytest

LAUNCHES = [(place, list(group)) for place, group in groupby(plan_state.cells(), key=lambda cell: cell[:2])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.mark.long  # of rank 0 on simulated devices a default test has it: test_fake_cuda.py
@pytest.mark.parametrize(
    "cells",
    [pytest.param(cells, id=f"{place[0]} x{place[1]}") for place, cells in LAUNCHES],
)
def test_a_rank_keeps_what_is_predicted(folder: Path, cells: list[plan_state.Cell]) -> None:
    for cell, found in plan_state.compare(folder, cells):
        assert found.get("equal", True), f"{cell.name}: {plan_state.words(found)}"
