"""An objective that is the user's function, on configs that divide model and rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import own_losses
import parity
import pytest
from conftest import launch

SFT = f"objective={{file: {own_losses.__file__}, function: mean_of_tokens}}"


@pytest.mark.long  # tests/trainer/unit/objectives/test_own.py has it of one batch
@pytest.mark.parametrize(("config", "processes"), [("single", 1), ("fsdp2", 2), ("pp", 2)])
def test_sft_as_a_function_has_the_losses_of_sft_to_the_last_bit(
    config: str, processes: int, recipe: dict[str, Any], write_recipe: Any, tmp_path: Path
) -> None:
    path = write_recipe(recipe)
    for name, objective in (("theirs", "objective={name: sft}"), ("own", SFT)):
        done = launch(config, processes, "train", path, f"run.name={name}", objective)
        assert done.returncode == 0, done.stderr
    theirs, own = (
        [(line["step"], line["loss"], line["grad_norm"]) for line in parity.train_lines(tmp_path / "runs" / name)]
        for name in ("theirs", "own")
    )
    assert len(theirs) >= 5
    assert own == theirs
