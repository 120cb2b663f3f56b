"""Completions for rewards, and their settings, as a recipe would have them."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from finetune.recipe.reward_settings import RewardSettings
from finetune.rl.rewards.completion import Completion
from finetune.rl.rewards.scoring import Rewards


def completion(text: str, reference: str | None = "42", **columns: Any) -> Completion:
    messages = ({"role": "user", "content": "How many?"},)
    return Completion("How many?", messages, text, reference, columns, len(text), is_truncated=False)


def reward(**keys: Any) -> RewardSettings:
    return TypeAdapter(RewardSettings).validate_python(keys)


def values(completions: list[Completion], **keys: Any) -> list[float | None]:
    """Returns the values of one reward."""
    settings = reward(**keys)
    with Rewards((settings,), None) as rewards:
        return [one.by_name[settings.label] for one in rewards.score(completions)]
