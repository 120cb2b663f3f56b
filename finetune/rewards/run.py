"""The rewards of a recipe: every reward of every completion, in canonical order."""

from __future__ import annotations

import re
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
        values = [_value(settings, completion) for settings in self._settings]
        pairs = list(zip(self._settings, values, strict=True))
        by_name: dict[str, float | None] = {settings.label: value for settings, value in pairs}
        return Reward(sum(settings.weight * value for settings, value in pairs), by_name, ())


def _value(settings: RewardSettings, completion: Completion) -> float:
    if settings.name == "regex":
        return float(re.search(settings.pattern or "", completion.text) is not None)
    return float(completion.reference is not None and completion.text.strip() == completion.reference.strip())
