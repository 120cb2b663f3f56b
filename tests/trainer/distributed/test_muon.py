"""Muon steps parts of matrices to the last bit as torch.optim.Muon steps whole ones, and shares the work out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forks
import pytest
from muon_worker import LAYOUTS, SHAPES

WORKER = Path(__file__).with_name("muon_worker.py")
RANKS, ITERATIONS = 3, 5


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("muon")
    done = forks.torchrun(RANKS, WORKER, out)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads((out / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_stepped_as_whole_matrices(found: list[dict[str, Any]], layout: str) -> None:
    ranks = [rank[layout] for rank in found]
    assert [rank["worst"] for rank in ranks] == [0.0] * RANKS
    assert all(rank["moved"] for rank in ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_matrix_is_orthogonalized_by_one_rank(found: list[dict[str, Any]], layout: str) -> None:
    products = [rank[layout]["products"] for rank in found]  # x @ x.T, once in each iteration
    assert sum(products) == ITERATIONS * len(SHAPES)
    assert min(products) == ITERATIONS
