"""The rewards of a recipe: every reward of every completion, in canonical order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from finetune.recipe.schema import RewardSettings
from finetune.rewards.completion import Completion, Reward


class Rewards:
    """Scores completions. A context manager."""

    def __init__(self, settings: tuple[RewardSettings, ...], folder: Path | None):
        self._settings = settings

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def score(self, completions: Sequence[Completion]) -> list[Reward]:
        """Returns the rewards, in order."""
        return [self._reward(completion) for completion in completions]

    def _reward(self, completion: Completion) -> Reward:
        reference = completion.reference
        value = float(reference is not None and completion.text.strip() == reference.strip())
        by_name: dict[str, float | None] = {settings.label: value for settings in self._settings}
        return Reward(sum(settings.weight * value for settings in self._settings), by_name, ())
