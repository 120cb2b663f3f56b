"""Pairs whose common beginning is computed once, and samples of one prompt (`objective.share_prompts`): the decision,
and the saving.

A layout of micro-batches (`data.batch.collate`) that attention has to know; no loss depends on it beyond rounding, and
neither do packing and order, which count every sequence with all of its tokens.
"""

from __future__ import annotations

from dataclasses import replace

from finetune.errors import UserError
from finetune.models.attention import AttentionChoice
from finetune.objectives.objective import Objective, Sums
from finetune.recipe.objective_settings import Distill, ObjectiveSettings, SharesPrompts, WithoutDropout


def with_shared_prompts(objective: ObjectiveSettings, samples: bool, attention: AttentionChoice) -> AttentionChoice:
    """Returns the attention with the decision whether the run's pairs or samples share their beginning.

    samples: whether the run trains on samples of its model. Raises UserError if the recipe requests it and it is not
    possible.
    """
    reason = _unsupported_reason(objective, samples, attention)
    if isinstance(objective, SharesPrompts) and objective.share_prompts is True and reason is not None:
        raise UserError(
            f"objective.share_prompts: true does not fit `{attention.implementation}` here: {reason}. Fix: use `auto`, "
            "which computes the prompt for each answer, with the same numbers"
        )
    return replace(attention, shares_prompts=reason is None)


def sharing_summary(
    objective: ObjectiveSettings, samples: bool, attention: AttentionChoice, share: float | None
) -> str | None:
    """Returns a line for the plan; None for an objective without pairs or samples.

    share: of an epoch's tokens that pairs have in common; None: unknown.
    """
    if not _may_share(objective, samples):
        return None
    if not attention.shares_prompts:
        return f"computed for each answer: {_unsupported_reason(objective, samples, attention)}"
    if samples:
        return "computed once for the samples of a prompt in one micro-batch"
    saved = "what a pair has in common" if share is None else f"{share:.1%} of the tokens"
    return f"computed once for both answers: {saved} need not be computed again"


def _may_share(objective: ObjectiveSettings, samples: bool) -> bool:
    return samples if isinstance(objective, Distill) else isinstance(objective, SharesPrompts)


def _unsupported_reason(objective: ObjectiveSettings, samples: bool, attention: AttentionChoice) -> str | None:
    if not isinstance(objective, SharesPrompts) or not _may_share(objective, samples):
        return f"{objective.name} has no pairs"
    if objective.share_prompts is False:
        return "asked for in the recipe"
    if isinstance(objective, WithoutDropout) and objective.dropout:
        return "objective.dropout draws for each answer"
    return attention.not_shared


def shared_tokens() -> Objective:
    """Returns the share of a step's tokens that were not computed again, as a metric."""

    def metrics(sums: Sums) -> dict[str, float]:
        return {"shared_token_share": sums.counts["shared_tokens"] / sums.counts["tokens"]}

    return Objective(lambda outputs, batch: {}, metrics)
