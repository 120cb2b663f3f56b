"""How busy the experts of a model are in training: their balance as a part of the loss, and what is logged of it.

Letters: L layers with experts, E experts of a layer.
"""

from __future__ import annotations

import contextlib
import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.data.batch import Batch
from finetune.engine.base import Engine
from finetune.engine.parallelism import Parallelism
from finetune.errors import UserError
from finetune.models.routers import Routers, find_routers
from finetune.objectives.router_balance import router_balance
from finetune.recipe.schema import Objective


@dataclass(frozen=True)
class Routing:
    """A model's routers, and what their balance counts for in the loss; `routers` is None where there are none."""

    routers: Routers | None = None
    coefficient: float = 0.0

    @classmethod
    def of(cls, model: Any, objective: Objective, parallelism: Parallelism) -> Routing:
        """Raises UserError where a balance is wanted of routers that are not known, or of rows that no rank sees."""
        config, routers = model.config.get_text_config(), find_routers(model)
        asked = objective.router_aux_loss_coef
        if asked is None:  # as transformers' own forward adds it
            asked = config.router_aux_loss_coef if routers and getattr(config, "output_router_logits", False) else 0.0
        if asked and routers is None:
            raise UserError(
                f"objective.router_aux_loss_coef: {asked}: {type(config).__name__} has no router whose balance loss "
                "transformers knows: remove it"
            )
        if parallelism.tokens * parallelism.pipeline == 1:
            return cls(routers, asked)
        if asked:  # the recipe's own is refused before a model loads
            raise UserError(
                "`output_router_logits` in the model's config asks for a balance of experts, and no rank sees all "
                f"routers of a whole row under {parallelism.summary()}: set objective.router_aux_loss_coef: 0"
            )
        return cls()


class RoutingSums:
    """What the micro-batches of one step add up to on this rank. All zero where a model has no routers."""

    def __init__(self, routing: Routing, tokens: int, device: torch.device):
        """tokens: of the step, over all ranks."""
        self._routing, self._tokens = routing, tokens
        routers = routing.routers
        self.loss = torch.zeros((), dtype=torch.float64, device=device)  # of the rows, each times its tokens
        experts = (routers.layers, routers.experts) if routers else (0, 0)
        self._chosen = torch.zeros(experts, dtype=torch.int64, device=device)

    def listening(self) -> AbstractContextManager[list[Tensor]]:
        """Around a forward: what `share` is made of."""
        routers = self._routing.routers
        return routers.listening() if routers else contextlib.nullcontext([])

    def share(self, logits: list[Tensor], batch: Batch) -> Tensor | float:
        """Of the step's loss."""
        if self._routing.routers is None:
            return 0.0
        if not self._routing.coefficient:
            logits = [of_layer.detach() for of_layer in logits]
        found = router_balance(logits, batch.row_lengths, self._routing.routers.top_k)
        self.loss += found.loss.detach()
        self._chosen += found.chosen
        return found.loss * (self._routing.coefficient / self._tokens)

    def load(self, engine: Engine) -> Tensor | None:  # (L, E)
        """Tokens of the step that chose each expert, over all ranks. Collective."""
        return None if self._routing.routers is None else engine.sum_table(self._chosen)


def routing_line(balance: float, load: Tensor | None) -> dict[str, float]:
    """By key of metrics.jsonl. balance: the loss of the step, before its coefficient. load: (L, E)"""
    if load is None:
        return {}
    fullest = load.max(1).values / load.double().mean(1)  # (L,)
    return {
        "router_balance_loss": balance,
        "experts/load_max_over_mean": fullest.max().item(),  # of the layer where it is largest
        "experts/idle_share": (load == 0).double().mean().item(),  # of all experts of all layers
    }


class ExpertLoad:
    """Every expert's load since the last time it was written: experts.json of a run."""

    def __init__(self) -> None:
        self._steps: list[int] = []  # the first and the last
        self._load: Tensor | None = None

    def add(self, step: int, load: Tensor | None) -> None:
        if load is not None:
            self._steps = [*self._steps[:1], step]
            self._load = load if self._load is None else self._load + load

    def write(self, folder: Path) -> None:
        """{"steps": [first, last], "load": tokens that chose each expert, a list for each layer}; then from 0 again."""
        if self._load is not None:
            told = {"steps": [self._steps[0], self._steps[-1]], "load": self._load.tolist()}
            (folder / "experts.json").write_text(json.dumps(told) + "\n", encoding="utf-8")
        self._steps, self._load = [], None
