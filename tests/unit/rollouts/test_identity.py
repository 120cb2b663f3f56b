"""What a record of rollouts belongs to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.recipe import load_recipe
from finetune.rollouts.step_rows import run_identity


@pytest.mark.parametrize(
    ("schedule", "is_same"),
    [
        ("{name: constant, warmup_steps: 2}", True),
        ("{name: constant, warmup_ratio: 0.1}", False),
        ("{name: cosine}", False),
        ("{name: wsd}", False),
    ],
)
def test_the_length_of_a_run_counts_if_rates_depend_on_it(
    schedule: str, is_same: bool, recipe: dict[str, Any], write_recipe: Callable[..., Path]
) -> None:
    recipe["data"] |= {"packing": False}
    file = write_recipe(
        recipe
        | {
            "objective": {"name": "grpo"},
            "rollouts": {"prompts": 2, "samples": 4, "max_new_tokens": 8},
            "rewards": [{"name": "exact_match"}],
            "batch": {"rows": 8, "rows_per_device": 2},
        }
    )
    short, long = (
        run_identity(load_recipe(file, [f"schedule={schedule}", f"train.max_steps={steps}"]), {}) for steps in (20, 40)
    )
    assert (short == long) is is_same
