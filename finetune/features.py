"""The composition root: the trainer with every wing, as the command line and `finetune.train` hand it in.

The trainer imports no wing (pyproject.toml, held by import-linter). A wing that is removed takes its rows here with it.
Imports of torch are in the function, for a run reads its recipe before it imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.desk.setup.foreign_keys import unknown_key_hint
from finetune.recipe import Recipe, load
from finetune.recipe.rules import RULES
from finetune.rl.reward_rules import rewards
from finetune.rl.rollout_rules import rollouts

if TYPE_CHECKING:
    from finetune.training.prepare import Features


def load_recipe(path: Path | str, overrides: Sequence[str] = (), text: str | None = None) -> Recipe:
    """Returns the recipe, checked by the rules of all features; see `finetune.recipe.load_recipe`."""
    return load.load_recipe(path, overrides, text, (*RULES, rollouts, rewards), unknown_key_hint)


def all_features() -> Features:
    """Returns what a run may use: the trainer's own, samples of the model, and copies on the hub."""
    from finetune.objectives.table import ObjectiveRow
    from finetune.release.export.push import Pusher, check_push
    from finetune.rl.policy import grpo
    from finetune.rl.rollouts.run_rows import make_rows, prompt_notes
    from finetune.training.prepare import TRAINER, Features

    return Features(
        objectives={**TRAINER.objectives, "grpo": ObjectiveRow(grpo, reads_rollouts=True)},
        prompt_notes=prompt_notes,
        make_rows=make_rows,
        check_push=check_push,
        make_push=Pusher,
    )
