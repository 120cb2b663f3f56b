"""Runs by CUDA graphs on two ranks, as far as CPUs go: the numbers of DDP, whose hooks no replay runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from conftest import ROOT


@pytest.mark.parametrize("rows_per_device", [1, 2])
def test_gradients_are_reduced_as_by_ddp(
    recipe: dict[str, Any], write_recipe: Callable[..., Path], tmp_path: Path, rows_per_device: int
) -> None:
    """Two micro-batches a step and one; two ranks have one order of summation."""
    recipe["train"] = {"max_steps": 3, "precision": "bf16", "graphs": "auto"}
    recipe |= {
        "mode": "lora",
        "lora": {"rank": 4, "alpha": 8},
        "batch": {"rows": 4, "rows_per_device": rows_per_device},
    }
    worker = ROOT / "tests" / "trainer" / "distributed" / "graphs_worker.py"
    config = ROOT / "accelerate_configs" / "ddp.yaml"
    done = forks.accelerate_launch(config, 2, worker, write_recipe(recipe), tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    mine, without = (torch.load(tmp_path / f"{name}.pt") for name in ("graphs", "without"))
    assert mine["shares"] == [1.0] * 3
    assert (mine["losses"], mine["norms"]) == (without["losses"], without["norms"])
    assert all(torch.equal(values, without["weights"][name]) for name, values in mine["weights"].items())
