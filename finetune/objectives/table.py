"""The objectives by name, and the terms that a run adds to its objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from finetune.models.moe import Routers
from finetune.objectives.by_source import by_source
from finetune.objectives.distill import distill
from finetune.objectives.kto import kto
from finetune.objectives.objective import ONE_RANK, Objective, TokenRanks, combined
from finetune.objectives.policy import grpo
from finetune.objectives.preference import dpo, orpo
from finetune.objectives.router_balance import balance_coefficient, balance_of_experts
from finetune.objectives.scores import classify, reward
from finetune.objectives.sft import focal, sft
from finetune.objectives.shared_prompts import shared_tokens
from finetune.recipe.schema import ObjectiveSettings as Settings
from finetune.recipe.schema import Rollouts


class ObjectiveRow(NamedTuple):
    """An objective; the rows that it takes are in `recipe.schema.ROW_KINDS`."""

    make: Callable[..., Objective]  # (settings, whether for held-out data, token ranks), then `rollouts` if it reads it
    averages_tokens: bool = False  # the loss is a mean over tokens
    reads_tokens_alone: bool = False  # and nothing else of a batch is read
    reads_rollouts: bool = False  # how samples are drawn is part of the loss


OBJECTIVES: dict[str, ObjectiveRow] = {
    "sft": ObjectiveRow(sft, averages_tokens=True, reads_tokens_alone=True),
    "focal": ObjectiveRow(focal, averages_tokens=True, reads_tokens_alone=True),
    "dpo": ObjectiveRow(dpo),
    "kto": ObjectiveRow(kto),
    "orpo": ObjectiveRow(orpo),
    "reward": ObjectiveRow(reward),
    "classify": ObjectiveRow(classify),
    "distill": ObjectiveRow(distill, averages_tokens=True),
    "grpo": ObjectiveRow(grpo, reads_rollouts=True),
}


def make_objective(
    settings: Settings,
    source_names: Sequence[str] = (),
    evaluating: bool = False,
    config: Any = None,
    routers: Routers | None = None,
    divided: str | None = None,
    token_ranks: TokenRanks = ONE_RANK,
    shares_prompts: bool = False,
    rollouts: Rollouts | None = None,
) -> Objective:
    """Returns the objective of training, or of evaluation.

    config: the model's; routers: its own, if it is a mixture of experts; divided: how ranks share sequences or
    layers, if they do; shares_prompts: a pair's common beginning is computed once; rollouts: of the recipe. Raises
    UserError if a router balance loss is set that cannot be computed.
    """
    row, others = OBJECTIVES[settings.name], []
    of_rollouts = {"rollouts": rollouts} if row.reads_rollouts else {}
    objective = row.make(settings, evaluating, token_ranks, **of_rollouts)
    if not evaluating:
        coefficient = balance_coefficient(settings, config, routers, divided)
        if routers is not None and divided is None:
            others.append(balance_of_experts(coefficient, routers.top_k))
    if shares_prompts:
        others.append(shared_tokens())
    if len(source_names) > 1:
        others.append(by_source(source_names, has_losses=row.averages_tokens))
    return combined(objective, others)
