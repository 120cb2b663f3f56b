"""Pairs whose common beginning is computed once (`objective.share_prompts`): where, and how much that saves.

A layout of micro-batches (`data.batch.collate`) that attention has to know; no loss depends on it beyond rounding, and
neither do packing and order, which count every sequence with all of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.errors import UserError
from finetune.models.attention import AttentionChoice
from finetune.objectives.objective import Objective, Sums
from finetune.recipe.schema import OBJECTIVE_KEYS
from finetune.recipe.schema import Objective as Settings


@dataclass(frozen=True)
class PromptSharing:
    shares: bool
    reason: str  # in words

    def summary(self, share: float | None) -> str:
        """Returns a line for the plan. share: of an epoch's tokens that pairs have in common; None: not known."""
        known = "" if share is None else f", {share:.1%} of all tokens"
        return f"{'computed once' if self.shares else 'computed for each answer'}{known} ({self.reason})"


def choose_prompt_sharing(settings: Settings, attention: AttentionChoice) -> PromptSharing | None:
    """Returns whether the common beginning of a pair is computed once; None for an objective without pairs.

    Raises UserError where the recipe asks for it and it cannot be.
    """
    if "share_prompts" not in OBJECTIVE_KEYS[settings.name]:
        return None
    if settings.share_prompts is False:
        return PromptSharing(False, "asked for in the recipe")
    why_not = attention.not_shared
    if settings.dropout:
        why_not = "objective.dropout draws for every answer"
    if why_not is None:
        return PromptSharing(True, "the second answer's attention sees the first one's beginning")
    if settings.share_prompts is True:
        raise UserError(
            f"objective.share_prompts: true does not fit `{attention.implementation}` here: {why_not}; use `auto`, "
            "which computes the prompt for each answer, with the same numbers"
        )
    return PromptSharing(False, why_not)


def shared_tokens() -> Objective:
    """Returns the share of a step's tokens that were not computed again, as a metric."""

    def metrics(sums: Sums) -> dict[str, float]:
        return {"shared_token_share": sums.counts["shared_tokens"] / sums.counts["tokens"]}

    return Objective(lambda outputs, batch: {}, metrics)
