"""`check` on data that are small, wrong or repeated: what a person is told before a run is wasted on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.planning.check import check_recipe


@pytest.fixture
def path(recipe: dict[str, Any], write_recipe: Any) -> Path:
    recipe["train"] = {"epochs": 2, "precision": "fp32"}
    recipe["data"]["max_length"] = 256
    recipe["batch"] = {"rows": 8}
    recipe["schedule"] = {"warmup_steps": 10}
    return write_recipe(recipe)


def test_a_warm_up_that_the_data_end_before(path: Path) -> None:
    error = check_recipe(path, []).error or ""
    assert error.startswith("schedule.warmup_steps: the data give 2 steps, fewer than the 10 of warm-up")
    assert "batch.rows: 1 (16 steps) or data.max_length: 32 (16 steps)" in error
    for said in ("batch.rows=1", "data.max_length=32"):
        assert check_recipe(path, [said, "schedule.warmup_steps=1"]).facts["steps"] == 16
    assert check_recipe(path, ["schedule.warmup_ratio=0.1"]).error is None


def test_a_smoke_test_may_end_within_the_warm_up(path: Path) -> None:
    report = check_recipe(path, ["train.max_steps=2"])
    assert report.error is None
    assert any("the warm-up (10 steps) does not end within train.max_steps: 2" in note for note in report.notes)


def test_few_steps_are_noted(path: Path) -> None:
    few, enough = (check_recipe(path, ["schedule.warmup_steps=0", f"train.epochs={n}"]).notes for n in (49, 50))
    assert any("only 49 steps" in note and "batch.rows: 4 (98 steps)" in note for note in few)
    assert enough == []


def test_all_problems_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", "/nowhere")
    wrong = ["tracking.wandb.project=x", "data.train.0.path=nix.jsonl", "data.eval=[{path: nox.csv}]"]
    error = check_recipe(path, [*wrong, "model.name=./nomodel"]).error or ""
    for part in ("4 problems", "no API key", "nix.jsonl: no such file", "nox.csv: no such file", "no tokenizer from"):
        assert part in error
