"""A run under a name that has been used: what goes on, what is refused, and what is never lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import metrics, train_here

from finetune.errors import UserError


@pytest.fixture
def path(recipe: dict[str, Any], write_recipe: Any) -> Path:
    recipe["checkpoint"] = {"every_steps": 2, "keep": 3}
    recipe["schedule"] = {"name": "constant"}
    return write_recipe(recipe)


@pytest.fixture
def run(recipe: dict[str, Any]) -> Path:
    return Path(recipe["run"]["dir"]) / "run"


def files(run: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of all that a run wrote."""
    found = (path for path in run.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(run)): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def test_a_finished_run_is_finished(path: Path, run: Path) -> None:
    train_here(path)
    before = files(run)
    with pytest.raises(UserError, match=r"is finished after 6 steps.*\n  optimizer\.lr: 0\.001 -> 0\.5\nnothing would"):
        train_here(path, "optimizer.lr=0.5")
    with pytest.raises(UserError, match=r"\n  train\.max_steps: 6 -> 4\n"):
        train_here(path, "train.max_steps=4")
    assert "is finished: step 6 of 6, nothing to do" in train_here(path, "checkpoint.keep=2")
    assert files(run) == before


def test_more_steps_go_on_and_a_result_that_is_missing_is_written(path: Path, run: Path) -> None:
    train_here(path)
    (run / "model").rename(run / "elsewhere")
    assert "saved" in train_here(path)
    assert (run / "model" / "model.safetensors").read_bytes() == (run / "elsewhere" / "model.safetensors").read_bytes()
    assert "step 6 of 8" in train_here(path, "train.max_steps=8", "optimizer.lr=0.5")
    assert [line["step"] for line in metrics(run) if "loss" in line] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert "lr: 0.5" in (run / "recipe.yaml").read_text()
