"""Costs of a run on a launch, from the shapes of its weights: bytes kept and moved by a rank, traffic, host work.

Each backend states its own. scripts/planner/ compares them with the backends' real processes: plan_state.py (to the
byte), plan_errors.py and plan_times.py.
"""

from __future__ import annotations

from finetune.engine.costs.common import Costs, ModelSize, Moving, OptimizerBytes, Shapes, Shard, State, Weight
from finetune.engine.costs.deepspeed import ZeroCosts
from finetune.engine.costs.replicated import ReplicatedCosts
from finetune.engine.costs.sharded import ShardedCosts
from finetune.engine.launch import Launch
from finetune.recipe import Recipe

__all__ = ["Costs", "ModelSize", "Moving", "Shapes", "Shard", "State", "Weight", "costs_of"]


def costs_of(recipe: Recipe, launch: Launch, shapes: Shapes, device: str, optimizer_bytes: OptimizerBytes) -> Costs:
    """shapes: weights of one rank of a tensor parallel group. device: type of the compute device, cuda or cpu."""
    backend = {"replicated": ReplicatedCosts, "fsdp2": ShardedCosts, "zero": ZeroCosts}[launch.kind]
    if launch.parallelism.tensor > 1:  # as in `start_engine`
        backend = ShardedCosts
    return backend(recipe, launch, shapes, device, optimizer_bytes)
