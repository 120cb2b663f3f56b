"""benchmarks/balance.py runs, and says that processes wait less for each other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

COMMAND = [sys.executable, str(ROOT / "benchmarks" / "balance.py")]


@pytest.mark.long
def test_a_small_set(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "balance.json"), "--plot", str(tmp_path / "balance.png")]
    sizes = ["--documents", "20000", "--max-length", "2048", "8192", "--ranks", "8", "--rows-per-rank", "1", "2"]
    done = subprocess.run([*COMMAND, *files, *sizes], capture_output=True, text=True, timeout=300, check=True)
    assert "20,000 documents" in done.stdout
    assert (tmp_path / "balance.png").stat().st_size > 10_000
    result = json.loads((tmp_path / "balance.json").read_text())
    assert [(cell["max_length"], cell["rows_per_rank"]) for cell in result["cells"]] == [
        (2048, 1),
        (2048, 2),
        (8192, 1),
        (8192, 2),
    ]
    for cell in result["cells"]:
        assert cell["full"] > 0.99
        assert all(cell["balanced"][name] < cell["random"][name] / 10 for name in cell["random"])
        assert max(cell["balanced"].values()) < 0.02


@pytest.mark.long
def test_lengths_of_one_s_own(tmp_path: Path) -> None:
    """Longer documents than a row holds are left out, as `overlong: drop` does."""
    (tmp_path / "lengths.txt").write_text("\n".join(str(10 + 37 * i % 600) for i in range(2000)))
    files = ["--json", str(tmp_path / "balance.json"), "--plot", str(tmp_path / "balance.png")]
    own = ["--lengths", str(tmp_path / "lengths.txt"), "--max-length", "512", "--ranks", "4", "--rows-per-rank", "1"]
    subprocess.run([*COMMAND, *files, *own], capture_output=True, text=True, timeout=300, check=True)
    (cell,) = json.loads((tmp_path / "balance.json").read_text())["cells"]
    assert 0 < cell["documents"] < 2000
