"""`batch.rows_per_device: auto` on a device: what its meter says, and a device that really runs out."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import metrics, train_here

from finetune.training.auto_batch import CudaMemory, largest_that_fits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MIB = 2**20


def test_the_meter_of_a_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    memory = CudaMemory(device)

    def take(mib: int) -> None:
        torch.empty(mib * MIB, dtype=torch.uint8, device=device)

    large, small, none = (memory.peak(partial(take, mib)) for mib in (512, 128, 0))
    assert 512 * MIB <= large - none < 540 * MIB
    assert 128 * MIB <= small - none < 160 * MIB
    assert memory.limit < torch.cuda.get_device_properties(device).total_memory


def test_a_device_that_runs_out_is_stepped_back_from() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    memory = CudaMemory(device)
    unit = memory.limit // 5

    def take(size: float) -> None:
        torch.empty(int(size), dtype=torch.uint8, device=device)

    def attempt(size: int) -> float:
        try:
            return memory.peak(lambda: take(size * unit))
        except torch.OutOfMemoryError:
            pass
        return math.inf

    size, required = largest_that_fits([1, 2, 4, 8], memory.limit, attempt, start=8)
    assert size in (2, 4)
    assert required <= memory.limit
    assert torch.ones(MIB, device=device).sum().item() == MIB  # the device goes on


def test_a_run_with_measured_rows(recipe: dict[str, Any], write_recipe: Any, made: Path, tmp_path: Path) -> None:
    recipe["batch"] = {"rows": 8, "rows_per_device": "auto"}
    recipe["model"] = {"config": tiny.MODELS["llama"], "tokenizer": str(made / "llama")}
    path = write_recipe(recipe)
    train_here(path, "run.name=auto")
    rows = json.loads((tmp_path / "runs" / "auto" / "plan.json").read_text())["rows_per_device"]
    train_here(path, "run.name=said", f"batch.rows_per_device={rows}")
    train_here(path, "run.name=other", "batch.rows_per_device=1")
    found, said, other = (
        [m["loss"] for m in metrics(tmp_path / "runs" / name) if "loss" in m] for name in ("auto", "said", "other")
    )
    assert found == pytest.approx(said, rel=1e-6)
    assert found == pytest.approx(other, rel=5e-6)
