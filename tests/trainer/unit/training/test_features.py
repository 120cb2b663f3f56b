"""The trainer without the wings: it refuses recipes that need one, and needs no file of theirs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from finetune.engine.launch import read_config_file
from finetune.errors import UserError
from finetune.recipe import load_recipe
from finetune.training.prepare import prepare

ROLLOUTS = {"prompts": 2, "samples": 2, "max_new_tokens": 8}
DISTILL = {"name": "distill", "teacher": "none", "divergence": "reverse_kl", "top_k": 8}


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"objective": {"name": "grpo"}, "rollouts": ROLLOUTS}, "objective.name: `grpo`"),
        ({"objective": DISTILL, "rollouts": ROLLOUTS}, "rollouts: sampling"),
        ({"rewards": [{"name": "exact_match"}]}, "rewards: sampling"),
    ],
)
def test_what_was_not_handed_in_is_refused_before_the_data_are_read(
    sections: dict[str, Any], named: str, recipe: dict[str, Any], write_recipe: Any
) -> None:
    path: Path = write_recipe({**recipe, **sections})
    loaded, launch = load_recipe(path), read_config_file(None)
    with pytest.raises(UserError, match=f"^{re.escape(named)} is not a feature of the trainer alone"):
        prepare(loaded, str(path), launch)
