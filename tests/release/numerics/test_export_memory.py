"""`merge` and `export` need the memory of the largest tensor, not that of the model, the comparison with the run
included."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import forks
import pytest

WORKER = Path(__file__).with_name("export_memory_worker.py")


def measured(folder: Path, layers: int, hidden: int, files: int, *commands: str) -> dict[str, Any]:
    """files: of the base; commands: as a person types them."""
    if sys.platform != "linux" or not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the peak of a process is reset in /proc")
    done = forks.python(WORKER, folder, layers, hidden, files, *commands)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(folder)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_a_small_model(tmp_path: Path) -> None:
    """Below its own bytes, of which the comparison used to take four times as many."""
    found = measured(tmp_path / "model", 8, 1024, 4, "merge {run}")
    assert found["bytes"] > 280e6
    assert found["peaks"]["merge {run}"] < 2 * found["largest"] + 180e6


@pytest.mark.long
def test_two_gigabytes_in_ten_files(tmp_path: Path) -> None:
    commands = ("merge {run}", "export {run} --quantize int8", "export {run} --to gguf --dtype q8_0")
    found = measured(tmp_path / "model", 16, 2048, 10, *commands)
    assert found["bytes"] > 2e9
    assert {*found["peaks"]} == {*commands}
    assert found["peaks"]["merge {run}"] < 0.5e9, found["peaks"]
    assert max(found["peaks"].values()) < 2**29, found["peaks"]
