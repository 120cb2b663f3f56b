"""benchmarks/checkpoint_cost.py runs and says what it promises; never how long anything took."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

FIGURES = ("step_s", "stall_s", "first_stall_s", "cost_s", "wait_s", "written_bytes", "memory_bytes", "device_bytes")


@pytest.mark.long
def test_a_small_measurement(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "checkpoint_cost.py"), "--json", str(tmp_path / "cost.json")]
    command += ["--config", "single", "--processes", "1", "--scale", "0.01", "--tokens", "16"]
    command += ["--window", "2", "--saves", "2", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "cost.json").read_text())
    assert result["command"].startswith("python benchmarks/checkpoint_cost.py --json")
    cells = {cell["contender"]: cell for cell in result["cells"]}
    assert list(cells) == ["ours, asynchronous", "ours, synchronous", "accelerate"]
    for cell in cells.values():
        assert (cell["config"], cell["processes"], len(cell["stalls_s"])) == ("single", 1, 2)
        assert all(isinstance(cell[name], int | float) for name in FIGURES)
    # Weights and both moments in fp32, the same on all sides but for headers, within a hundredth.
    sizes = [cell["written_bytes"] for cell in cells.values()]
    assert max(sizes) < 1.01 * min(sizes)
    assert "an asynchronous save stops the steps" in done.stdout
