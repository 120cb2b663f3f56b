"""The trainer's objectives by name, and the terms that a run adds to its objective.

An objective that trains on a wing's rows is that wing's: `finetune/features.py` adds its row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from finetune.models.head.token_loss import GuessLoss
from finetune.models.moe import Routers
from finetune.objectives.ahead import ahead
from finetune.objectives.by_source import by_source
from finetune.objectives.distill import distill
from finetune.objectives.kto import kto
from finetune.objectives.objective import KEPT, ONE_RANK, Objective, TokenRanks, combined
from finetune.objectives.own import load_own, own
from finetune.objectives.preference import dpo, orpo
from finetune.objectives.router_balance import balance_coefficient, balance_of_experts
from finetune.objectives.scores import classify, reward
from finetune.objectives.sft import focal, sft
from finetune.objectives.shared_prompts import shared_tokens
from finetune.recipe.objective_settings import ObjectiveSettings as Settings
from finetune.recipe.schema import Rollouts


class ObjectiveRow(NamedTuple):
    """The maths of an objective; its keys and rows are in `recipe/objective_settings.py`."""

    make: Callable[..., Objective]  # (settings, whether for held-out data, token ranks), then what the flags below say
    averages_tokens: bool = False  # the loss is a mean over tokens
    reads_tokens_alone: bool = False  # and nothing else of a batch is read
    reads_rollouts: bool = False  # how samples are drawn is part of the loss
    compares: bool = False  # a metric compares scores, whose rounding is that of the compute type
    check: Callable[..., object] | None = None  # (settings) before a run: raises UserError


OBJECTIVES: dict[str, ObjectiveRow] = {
    "sft": ObjectiveRow(sft, averages_tokens=True, reads_tokens_alone=True),
    "focal": ObjectiveRow(focal, averages_tokens=True, reads_tokens_alone=True),
    "dpo": ObjectiveRow(dpo, compares=True),
    "kto": ObjectiveRow(kto),
    "orpo": ObjectiveRow(orpo, compares=True),
    "reward": ObjectiveRow(reward, compares=True),
    "classify": ObjectiveRow(classify, compares=True),
    "distill": ObjectiveRow(distill, averages_tokens=True),
    "own": ObjectiveRow(own, averages_tokens=True, check=load_own),
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
    compute: torch.dtype = torch.float32,
    objectives: Mapping[str, ObjectiveRow] = OBJECTIVES,
    mtp_weight: float | None = None,
) -> Objective:
    """Returns the objective of training, or of evaluation.

    config: the model's; routers: its own, if it is a mixture of experts; divided: how ranks share sequences or
    layers, if they do; shares_prompts: a pair's common beginning is computed once; rollouts: of the recipe; compute:
    type of the matrix products; objectives: to choose from; mtp_weight: of the loss of a head that predicts ahead, if
    it trains. Raises UserError if a router balance loss is set that cannot be computed.
    """
    row, others = objectives[settings.name], []
    read: dict[str, Any] = {"rollouts": rollouts} if row.reads_rollouts else {}
    read |= {"compute": compute} if row.compares else {}
    objective = row.make(settings, evaluating, token_ranks, **read)
    if not evaluating:
        coefficient = balance_coefficient(settings, config, routers, divided)
        if routers is not None and divided is None:
            others.append(balance_of_experts(coefficient, routers.top_k, masks=KEPT in objective.columns))
    if mtp_weight is not None:
        others.append(ahead(mtp_weight, evaluating, token_ranks))
        if evaluating:
            objective = replace(objective, token_loss=GuessLoss(), num_details=1)
    if shares_prompts:
        others.append(shared_tokens())
    if len(source_names) > 1:
        others.append(by_source(source_names, has_losses=row.averages_tokens))
    return combined(objective, others)
