"""The functions for notebooks and scripts, and the notebook that shows them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import finetune
from finetune.errors import UserError


def test_a_recipe_is_trained_and_tried(recipe: dict[str, Any], write_recipe: Any) -> None:
    loaded = finetune.load_recipe(write_recipe(recipe), "train.max_steps=2")
    run_dir = finetune.train(loaded)
    assert run_dir == Path(recipe["run"]["dir"]) / "run"
    answers = finetune.generate(run_dir, ["river stone", "green"], max_new_tokens=4)
    assert len(answers) == 2
    assert answers == finetune.generate(run_dir / "model", ["river stone", "green"], max_new_tokens=4)
    with pytest.raises(UserError, match="no result here"):
        finetune.generate(run_dir.parent, ["green"])
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        getattr(finetune, "trian")  # noqa: B009


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import finetune; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "pydantic", "yaml", "typer", "finetune.api"} & set(done.stdout.split())
