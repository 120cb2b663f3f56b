"""Recipe changes on resume: which are allowed, and which are refused with their difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.checkpoints.resume import recipe_changes
from finetune.errors import UserError
from finetune.recipe import Recipe, dump_recipe, load_recipe

ROWS = {"examples": 300, "rows": 78, "tokens": 4849, "lengths": "d90b8bc78dd52f13"}


@pytest.fixture
def load(recipe: dict[str, Any], write_recipe: Any) -> Any:
    recipe.update(mode="lora", lora={"rank": 4})
    path = write_recipe(recipe)
    return lambda *overrides: load_recipe(path, overrides)


@pytest.fixture
def checkpoint(tmp_path: Path, load: Any) -> Path:
    (tmp_path / "recipe.yaml").write_text(dump_recipe(load()), encoding="utf-8")
    return tmp_path


def refusal(recipe: Recipe, checkpoint: Path, rows: dict[str, Any] = ROWS) -> str:
    with pytest.raises(UserError, match="belongs to another run") as refused:
        recipe_changes(recipe, checkpoint, rows, ROWS)
    return str(refused.value)


def test_nothing_changed(load: Any, checkpoint: Path) -> None:
    assert recipe_changes(load(), checkpoint, ROWS, ROWS) == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.lr=0.5", "optimizer.lr: 0.001 -> 0.5"),
        ("train.max_steps=99", "train.max_steps: 6 -> 99"),
        ("schedule.name=linear", 'schedule.name: "cosine" -> "linear"'),
        ("evaluate.every_steps=3", "evaluate.every_steps: null -> 3"),
        ("tracking.tensorboard=true", "tracking.tensorboard: false -> true"),
        ("batch.rows_per_device=1", "batch.rows_per_device: 2 -> 1"),
        ("train.precision=bf16", 'train.precision: "fp32" -> "bf16"'),
        ("checkpoint.keep=7", "checkpoint.keep: 2 -> 7"),
    ],
)
def test_allowed_changes_are_reported(load: Any, checkpoint: Path, override: str, said: str) -> None:
    assert recipe_changes(load(override), checkpoint, ROWS, ROWS) == [said]


def test_shared_prompts_are_the_same_maths(load: Any, checkpoint: Path) -> None:
    rows = ("data.train=[{path: pairs.jsonl, format: preference}]", "data.eval=[]")
    (checkpoint / "recipe.yaml").write_text(dump_recipe(load(*rows, "objective.name=dpo")), encoding="utf-8")
    changed = load(*rows, "objective={name: dpo, share_prompts: false}")
    assert recipe_changes(changed, checkpoint, ROWS, ROWS) == ['objective.share_prompts: "auto" -> false']
    message = refusal(load(*rows, "objective={name: dpo, share_prompts: false, beta: 0.2}"), checkpoint)
    assert "objective.beta" in message
    assert "share_prompts" not in message


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("mode=full", 'mode: "lora" -> "full"'),
        ("lora.rank=8", "lora.rank: 4 -> 8"),
        ("optimizer.name=sgd", 'optimizer.name: "adamw" -> "sgd"'),
        ("batch.rows=8", "batch.rows: 4 -> 8"),
    ],
)
def test_keys_that_stored_tensors_depend_on_cannot_change(
    load: Any, checkpoint: Path, override: str, said: str
) -> None:
    overrides = [override, *(["lora=null"] if override == "mode=full" else [])]
    message = refusal(load(*overrides), checkpoint)
    assert said in message
    assert "accept_changes" not in message


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("run.seed=7", "run.seed"),
        ("model.revision=abc", "model"),
        ("data.max_length=48", "data.max_length"),
        ("data.packing=false", "data.packing"),
        ("objective.train_on=all", "objective"),
    ],
)
def test_keys_that_the_order_depends_on_change_only_if_accepted(
    load: Any, checkpoint: Path, override: str, key: str
) -> None:
    assert f"checkpoint.accept_changes=[{key}]" in refusal(load(override), checkpoint)
    accepted = recipe_changes(load(override, f"checkpoint.accept_changes=[{key}]"), checkpoint, ROWS, ROWS)
    assert any(line.startswith(override.split("=")[0]) for line in accepted)


def test_a_data_file_with_other_rows_is_another_run(load: Any, checkpoint: Path) -> None:
    now = {**ROWS, "examples": 301}
    message = refusal(load(), checkpoint, now)
    assert "data.train, the rows themselves: examples: 300 -> 301" in message
    assert "checkpoint.accept_changes=[data.train]" in message
    accepted = recipe_changes(load("checkpoint.accept_changes=[data.train]"), checkpoint, now, ROWS)
    assert "data.train, the rows themselves: examples: 300 -> 301" in accepted


def test_all_differences_are_reported_at_once(load: Any, checkpoint: Path) -> None:
    message = refusal(load("run.seed=7", "lora.rank=8", "optimizer.lr=0.5"), checkpoint)
    assert "run.seed: 42 -> 7" in message
    assert "lora.rank: 4 -> 8" in message
    assert "optimizer.lr" not in message


def test_only_what_can_be_accepted_may_be_listed(load: Any) -> None:
    with pytest.raises(UserError, match=r"checkpoint\.accept_changes"):
        load("checkpoint.accept_changes=[lora]")
