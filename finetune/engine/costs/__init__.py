"""Costs of a run on a launch, from the shapes of its weights: bytes kept and moved by a rank, traffic, host work.

Each backend states its own. scripts/planner/ compares them with the backends' real processes: plan_state.py (to the
byte), plan_errors.py and plan_times.py.
"""

from __future__ import annotations

from finetune.engine.costs.common import (
    Costs,
    ModelSize,
    Moving,
    OptimizerBytes,
    ReplicatedCosts,
    Shapes,
    Shard,
    State,
    Weight,
)
from finetune.engine.costs.deepspeed import ZeroCosts
from finetune.engine.costs.sharded import ShardedCosts
from finetune.engine.launch import Kind, Launch
from finetune.recipe import Recipe

__all__ = ["COSTS", "Costs", "ModelSize", "Moving", "Shapes", "Shard", "State", "Weight", "costs_of"]

COSTS: dict[Kind, type[Costs]] = {"replicated": ReplicatedCosts, "fsdp2": ShardedCosts, "zero": ZeroCosts}


def costs_of(recipe: Recipe, launch: Launch, shapes: Shapes, device: str, optimizer_bytes: OptimizerBytes) -> Costs:
    """shapes: weights of one rank of a tensor parallel group. device: type of the compute device, cuda or cpu."""
    backend = COSTS["fsdp2" if launch.parallelism.tensor > 1 else launch.kind]  # as in `start_engine`
    return backend(recipe, launch, shapes, device, optimizer_bytes)
