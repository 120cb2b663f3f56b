"""On a CUDA device: events instead of the host's clock, the allocator's peak, a trace of kernels, a memory snapshot."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import train_here

from finetune.engine.hardware import shipped_hardware
from finetune.engine.timing import Stopwatch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_phase_is_as_long_as_the_device_took() -> None:
    device = torch.device("cuda")
    stopwatch, matrix = Stopwatch(device, knows_waits=True), torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    with stopwatch.phase("forward"):
        for _ in range(20):
            matrix = (matrix @ matrix).clamp(-1, 1)
    ended.record()
    measured = stopwatch.lap().phases["forward"]
    assert measured == pytest.approx(began.elapsed_time(ended) / 1000, rel=0.05)


def test_a_run_and_its_profile(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    recipe["profile"] = {"steps": [3, 4]}
    train_here(write_recipe(recipe))
    run = tmp_path / "runs" / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    line = [line for line in lines if "loss" in line][-1]
    phases = ("data", "forward", "backward", "communication", "optimizer", "other")
    assert sum(line[f"time/{name}"] for name in phases) == pytest.approx(line["step_s"], rel=0.05)
    assert 0 < line["memory/weights_gib"] < line["memory_peak_gib"]
    assert ("mfu" in line) == (shipped_hardware().key_of(torch.cuda.get_device_name()) is not None)
    assert {path.name for path in (run / "profile").iterdir()} == {
        "rank-00000.json.gz",
        "memory-00000.pickle",
        "summary.json",
        "summary.md",
    }
    assert json.loads((run / "profile" / "summary.json").read_text())["products"] > 0
    assert re.search(r"^ +aten::mm +\S+%", (run / "profile" / "summary.md").read_text(), re.MULTILINE)
