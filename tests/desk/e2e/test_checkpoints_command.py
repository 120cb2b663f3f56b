"""`finetune checkpoints`: what can be resumed, and why the rest cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conftest import finetune, train_here


def test_a_damaged_checkpoint_is_listed_with_its_reason(recipe: dict[str, Any], write_recipe: Any) -> None:
    recipe["checkpoint"] = {"every_steps": 2, "keep": 3}
    path, run = write_recipe(recipe), Path(recipe["run"]["dir"]) / "run"
    train_here(path, "train.max_steps=4")
    assert finetune("checkpoints", run).returncode == 0
    (run / "checkpoints" / "step-00000004" / "rank-00000-of-00001.safetensors").unlink()
    listed = finetune("checkpoints", run)
    assert listed.returncode == 2
    assert "rank-00000-of-00001.safetensors is missing" in listed.stdout
