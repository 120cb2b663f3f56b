"""The composition root: the trainer with every wing, as the command line and `finetune.train` hand it in.

The trainer imports no wing (pyproject.toml, held by import-linter). A wing that is removed takes its rows here with it.
Imports of torch are in the function, for a run reads its recipe before it imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finetune.training.prepare import Features


def all_features() -> Features:
    """Returns what a run may use: the trainer's own, and samples of the model."""
    from finetune.objectives.policy import grpo
    from finetune.objectives.table import ObjectiveRow
    from finetune.rollouts.run_rows import make_rows, prompt_notes
    from finetune.training.prepare import TRAINER, Features

    return Features(
        objectives={**TRAINER.objectives, "grpo": ObjectiveRow(grpo, reads_rollouts=True)},
        prompt_notes=prompt_notes,
        make_rows=make_rows,
    )
