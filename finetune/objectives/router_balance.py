"""The load-balancing loss of experts (Fedus et al. 2021, https://arxiv.org/abs/2101.03961, 4-6).

    of a row and a layer   E * sum over experts of (choices of the expert per token) * (its mean probability)
    of a step              the mean over layers, and over the step's rows, weighted by their tokens

It is `top_k` under perfect balance, as in transformers, which however pools all layers first.

A product of means is not additive, so the loss depends on the tokens over which the means are taken: here those of a
row (a packed sequence). Micro-batches would not do, because they differ from launch to launch. The global batch would,
and constrains less (Qiu et al. 2025, https://arxiv.org/abs/2501.11873), but its means are only available after the last
forward of a step, and the first backward comes earlier.

Letters: L layers, T tokens of a forward, N rows in it, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from finetune.data.batch import Batch, row_places
from finetune.errors import UserError
from finetune.models.moe import Routers
from finetune.models.wrapped import Outputs
from finetune.objectives.objective import KEPT, Objective, Sums, Term, Terms
from finetune.recipe.objective_settings import ObjectiveSettings as Settings
from finetune.utils import copied_to


def balance_coefficient(settings: Settings, config: Any, routers: Routers | None, divided: str | None) -> float:
    """Returns the weight of the balance loss; by default that of transformers' own forward.

    divided: how ranks share rows or layers, if they do. Raises UserError if the routers are unknown, or if no rank sees
    a full row of all routers; a coefficient in the recipe is refused for `divided` before the model loads.
    """
    coefficient = settings.router_aux_loss_coef
    if coefficient is None:
        adds = routers is not None and getattr(config, "output_router_logits", False)
        coefficient = config.router_aux_loss_coef if adds else 0.0
    if coefficient and routers is None:
        raise UserError(
            f"objective.router_aux_loss_coef: {coefficient}: {type(config).__name__} has no router whose balance loss "
            "transformers supports. Fix: remove it"
        )
    if coefficient and divided is not None:
        raise UserError(
            "`output_router_logits` in the model's config asks for a balance of experts. No rank sees all routers of "
            f"a full row under {divided}. Fix: set objective.router_aux_loss_coef: 0"
        )
    return coefficient


def balance_of_experts(coefficient: float, top_k: int, masks: bool = False) -> Objective:
    """Returns the balance loss as a term, and the load of the experts as metrics.

    masks: some rows count for neither (`objective.KEPT`); a row is one sample then.
    """

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        logits = [layer if coefficient else layer.detach() for layer in outputs.router_logits]
        if any(batch.prefix_lengths):  # of every token of every sequence: tokens that a pair shares count twice
            places = torch.from_numpy(row_places(batch.sequence_lengths, batch.prefix_lengths))
            logits = [layer[copied_to(places, layer.device)] for layer in logits]
        lengths = batch.row_lengths
        kept = batch.columns[KEPT][: len(lengths)] if masks else None
        loss, chosen = router_balance(logits, lengths, top_k, kept)
        own = {"router_balance_loss": Term(loss, "tokens", coefficient or None), "expert_load": Term(chosen)}
        if kept is not None:
            own["balanced_tokens"] = Term((kept * copied_to(torch.tensor(lengths), kept.device)).sum())
        return own

    return Objective(terms, _expert_metrics)


def _expert_metrics(sums: Sums) -> dict[str, float]:
    load = sums.totals["expert_load"]  # (L, E)
    tokens = sums.totals["balanced_tokens"].item() if "balanced_tokens" in sums.totals else sums.counts["tokens"]
    if not tokens:
        return {}
    fullest = load.max(1).values / load.mean(1)  # (L,)
    return {
        "router_balance_loss": sums.totals["router_balance_loss"].item() / tokens,  # before its coefficient
        "experts/load_max_over_mean": fullest.max().item(),  # of the layer with the largest
        "experts/idle_share": (load == 0).double().mean().item(),  # of all experts of all layers
    }


def router_balance(
    logits: Sequence[Tensor], row_lengths: Sequence[int], top_k: int, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the balance loss () of all rows, each times its tokens, and (L, E) tokens that chose each expert.

    logits: (T, E) of each layer. row_lengths: tokens of each row; padding after them is left out. kept: (N,) 1, or 0 of
    a row that is left out as well.
    """
    lengths, losses, chosen = list(row_lengths), list[Tensor](), list[Tensor]()
    for layer in logits:
        probabilities = layer[: sum(lengths)].float().softmax(-1)  # (tokens, E)
        choices = probabilities.detach().topk(top_k, dim=-1).indices  # (tokens, K)
        of_rows = layer.new_zeros(len(lengths), layer.shape[-1], dtype=torch.int64)
        for row, row_choices in enumerate(choices.split(lengths)):
            of_rows[row].scatter_add_(0, row_choices.flatten(), torch.ones_like(row_choices).flatten())
        if kept is not None:
            of_rows = of_rows * kept.long()[:, None]
        chosen.append(of_rows.sum(0))
        if not lengths:
            losses.append(probabilities.sum())
            continue
        summed = torch.stack([row.sum(0) for row in probabilities.split(lengths)])  # (N, E)
        tokens = copied_to(torch.tensor(lengths, dtype=summed.dtype), layer.device)  # (N,)
        losses.append(layer.shape[-1] * ((of_rows * summed).sum(1) / tokens).sum())
    return torch.stack(losses).mean(), torch.stack(chosen)
