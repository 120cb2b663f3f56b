"""The trial of an environment in `check`: with the reference and with garbage as a turn."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from turns import BROKEN, ECHO, recipe_with_turns

from finetune.data.dataset import Dataset, build_training
from finetune.desk.setup.check import check_recipe
from finetune.desk.setup.environment_rows import check_environment
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.models.base_model import Base

Write = Callable[..., Path]


@pytest.fixture
def online(made: Path, tmp_path: Path) -> dict[str, Any]:
    model = tmp_path / "echo" / "llama"
    shutil.copytree(made / "llama", model)
    (model.parent / "env.py").write_text(ECHO)
    return recipe_with_turns(made, model, tmp_path / "runs")


def test_check_tries_the_environment(online: dict[str, Any], write_recipe: Write, tmp_path: Path) -> None:
    """With the reference and with garbage as a turn; `calls` need a template that writes them."""
    assert tried(online, write_recipe) == [
        "the reference as a turn, of 4 rows: is answered 3, ends it 1; mean reward 3.750",
        "garbage as a turn, of 4 rows: ends it 4; mean reward 2.000",
        "the chat template writes no tool calls as JSON: `calls` is always empty, `text` has the turn",
    ]
    (tmp_path / "env.py").write_text(BROKEN)
    online["rollouts"]["environment"]["file"] = str(tmp_path / "env.py")
    with pytest.raises(UserError, match=r"rows.jsonl:1, sample 0, turn 1: "):
        tried(online, write_recipe)
    online["rollouts"]["environment"]["on_failure"] = "end"
    assert "fails 4 (ended its process" in tried(online, write_recipe)[1]
    (tmp_path / "env.py").write_text(BROKEN.replace("self.turns = 0", "raise OSError('no disk')"))
    with pytest.raises(UserError, match=r"sample 0, reset: raised OSError: no disk. Fix: correct the environment, or"):
        tried(online, write_recipe)


def test_check_reports_rewards_and_environment(online: dict[str, Any], write_recipe: Write) -> None:
    online["rewards"][1] = {"name": "exact_match"}
    facts = check_recipe(write_recipe(online), ()).facts
    assert facts["rewards"].startswith("\n                   exact_match  total\n    reference            1.000  1.000")
    assert facts["environment"].startswith("\n    the reference as a turn, of 4 rows: is answered 3, ends it 1; mean ")
    assert list(facts)[-2:] == ["rewards", "environment"]


def tried(online: dict[str, Any], write_recipe: Write) -> list[str]:
    recipe = load_recipe(write_recipe(online))
    base = Base.of(recipe)
    renderer = base.renderer(recipe.objective)
    data = build_training(recipe, renderer)
    assert isinstance(data, Dataset)
    return check_environment(recipe, data, base.tokenizer, renderer)
