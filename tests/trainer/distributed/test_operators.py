"""Operators that torch starts for one decoder layer, beside plain transformers and peft: a GPU waits for them."""

from __future__ import annotations

from pathlib import Path

import forks
import pytest
import torch
import transformers
from conftest import ROOT, script

# Of a Llama's layer with one document, forward and backward, with torch 2.13 and transformers 5.23, by
# `python benchmarks/operators.py`. One that rises is host time in every layer: `--list` says which operators.
NUMBERS = {
    "single": {"full": 789, "lora": 842, "qlora": 996},
    "ddp": {"full": 792, "lora": 880, "qlora": 1034},
    "fsdp2": {"full": 896, "lora": 1181, "qlora": 1335},
}


@pytest.mark.parametrize(
    "engine", ["single", *(pytest.param(name, marks=pytest.mark.long) for name in ("ddp", "fsdp2"))]
)
def test_a_layer_starts_no_more_operators_than_plain_peft(engine: str, tmp_path: Path) -> None:
    operators = script("benchmarks/operators.py")
    operators.make_work(tmp_path, operators.MODES)
    program = [ROOT / "benchmarks" / "operators.py", "--measure", tmp_path]
    if engine == "single":
        done = forks.python(*program)
    else:
        done = forks.accelerate_launch(ROOT / "accelerate_configs" / f"{engine}.yaml", 2, *program)
    assert done.returncode == 0, done.stdout[-3000:]
    sums = {
        mode: {who: sum(sum(of_phase.values()) for of_phase in phases.values()) for who, phases in counts.items()}
        for mode, counts in operators.read_counts(tmp_path, operators.MODES).items()
    }
    assert all(one["ours"] <= one["plain"] for one in sums.values()), sums
    if (torch.__version__[:4], transformers.__version__[:4]) == ("2.13", "5.23"):
        assert {mode: one["ours"] for mode, one in sums.items()} == NUMBERS[engine]
