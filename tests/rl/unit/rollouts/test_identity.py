"""What a record of rollouts belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.features import load_recipe
from finetune.rl.rollouts.step_rows import run_identity


@pytest.mark.parametrize(
    ("schedule", "is_same"),
    [
        ("{name: constant, warmup_steps: 2}", True),
        ("{name: constant, warmup_ratio: 0.1}", False),
        ("{name: cosine}", False),
        ("{name: wsd}", False),
    ],
)
def test_the_length_of_a_run_counts_if_rates_depend_on_it(schedule: str, is_same: bool, online: Path) -> None:
    lengths = [[f"schedule={schedule}", f"train.max_steps={steps}"] for steps in (20, 40)]
    short, long = (run_identity(load_recipe(online, overrides), {}) for overrides in lengths)
    assert (short == long) is is_same
