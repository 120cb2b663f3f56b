"""The objectives by name, and the terms that a run adds to its objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from finetune.models.moe import Routers
from finetune.objectives.by_source import by_source
from finetune.objectives.distill import distill
from finetune.objectives.kto import kto
from finetune.objectives.objective import ONE_RANK, Objective, TokenRanks, combined
from finetune.objectives.preference import dpo, orpo
from finetune.objectives.router_balance import balance_coefficient, balance_of_experts
from finetune.objectives.scores import classify, reward
from finetune.objectives.sft import focal, sft
from finetune.objectives.shared_prompts import shared_tokens
from finetune.recipe.schema import ObjectiveSettings as Settings

# name -> (settings, evaluating, token ranks) -> objective; evaluating: for held-out data
OBJECTIVES: dict[str, Callable[[Settings, bool, TokenRanks], Objective]] = {
    "sft": sft,
    "focal": focal,
    "dpo": dpo,
    "kto": kto,
    "orpo": orpo,
    "reward": reward,
    "classify": classify,
    "distill": distill,
}

OF_TOKENS = {"sft", "focal", "distill"}  # their losses are means over tokens
OF_TOKENS_ALONE = {"sft", "focal"}  # and they read no other part of a batch


def make_objective(
    settings: Settings,
    source_names: Sequence[str] = (),
    evaluating: bool = False,
    config: Any = None,
    routers: Routers | None = None,
    divided: str | None = None,
    token_ranks: TokenRanks = ONE_RANK,
    shares_prompts: bool = False,
) -> Objective:
    """Returns the objective of training, or of evaluation.

    config: the model's; routers: its own, if it is a mixture of experts; divided: how ranks share sequences or
    layers, if they do; shares_prompts: a pair's common beginning is computed once. Raises UserError if a router balance
    loss is set that cannot be computed.
    """
    objective, others = OBJECTIVES[settings.name](settings, evaluating, token_ranks), []
    if not evaluating:
        coefficient = balance_coefficient(settings, config, routers, divided)
        if routers is not None and divided is None:
            others.append(balance_of_experts(coefficient, routers.top_k))
    if shares_prompts:
        others.append(shared_tokens())
    if len(source_names) > 1:
        others.append(by_source(source_names, has_losses=settings.name in OF_TOKENS))
    return combined(objective, others)
