"""A run under a name that has been used: what goes on, what is refused, and what is never lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import metrics, train_alone

from finetune.errors import UserError
from finetune.recipe import load_recipe


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
    found = (path for path in run.rglob("*") if path.is_file() and path.name not in (".lock", ".launch.json"))
    return {str(path.relative_to(run)): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def test_a_finished_run_is_finished(path: Path, run: Path) -> None:
    train_alone(path)
    before = files(run)
    with pytest.raises(UserError, match=r"is finished after 6 steps.*\n  optimizer\.lr: 0\.001 -> 0\.5\nNothing would"):
        train_alone(path, "optimizer.lr=0.5")
    with pytest.raises(UserError, match=r"\n  train\.max_steps: 6 -> 4\n"):
        train_alone(path, "train.max_steps=4")
    assert "is finished: step 6 of 6, nothing to do" in train_alone(path, "checkpoint.keep=2")
    assert files(run) == before


def test_more_steps_go_on_and_a_result_that_is_missing_is_written(path: Path, run: Path) -> None:
    train_alone(path)
    (run / "model").rename(run / "elsewhere")
    assert "saved" in train_alone(path)
    assert (run / "model" / "model.safetensors").read_bytes() == (run / "elsewhere" / "model.safetensors").read_bytes()
    said = train_alone(path, "train.max_steps=8", "optimizer.lr=0.5")
    assert "step 6 of 8" in said
    assert "learning rate" not in said  # of a constant schedule
    assert [line["step"] for line in metrics(run) if "loss" in line] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert "lr: 0.5" in (run / "recipe.yaml").read_text()


def test_starting_over_keeps_every_checkpoint_of_every_run(path: Path, run: Path) -> None:
    train_alone(path, "train.max_steps=2")
    first = (run / "checkpoints" / "step-00000002" / "state.json").read_bytes()
    for again in (2, 3):
        train_alone(path, "train.max_steps=2", "checkpoint.resume=never")
        kept = sorted(folder.name for folder in (run / "checkpoints").iterdir())
        assert len(kept) == again
    assert kept == ["aside-step-00000002", "aside-step-00000002-2", "step-00000002"]
    assert (run / "checkpoints" / "aside-step-00000002" / "state.json").read_bytes() == first


def test_a_chosen_checkpoint(path: Path, run: Path) -> None:
    train_alone(path)
    losses = [line["loss"] for line in metrics(run) if "loss" in line]
    seen = train_alone(path, "checkpoint.resume=step-00000002")
    assert "step 2 of 6" in seen
    assert [line["loss"] for line in metrics(run) if "loss" in line] == losses
    kept = sorted(folder.name for folder in (run / "checkpoints").iterdir())
    assert kept == ["aside-step-00000004", "aside-step-00000006", *(f"step-0000000{step}" for step in (2, 4, 6))]
    assert "step 4 of 6" in train_alone(path, "checkpoint.resume=aside-step-00000004")
    with pytest.raises(UserError, match=r"has no step-00000009; there are: step-00000006, step-00000004, .*aside-"):
        train_alone(path, "checkpoint.resume=step-00000009")


def test_values_in_the_name_of_a_run(path: Path) -> None:
    recipe = load_recipe(path, ["run.name=lr-{optimizer.lr}-{model.name}", "optimizer.lr=2e-5"])
    assert recipe.run.name.startswith("lr-2e-05-")
    drawn = load_recipe(path, ["run.name=lr-{optimizer.lr}-{optimizer.weight_decay}", "optimizer.lr=0.00023749081234"])
    assert drawn.run.name == f"lr-0.0002375-{drawn.optimizer.weight_decay}"
    assert recipe.run.name.endswith("llama")
    with pytest.raises(UserError, match=r"run\.name: `\{optimizer\.l\}` is no key of the recipe"):
        load_recipe(path, ["run.name={optimizer.l}"])
