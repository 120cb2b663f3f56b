"""What a run costs on a launch, from the shapes of its weights: bytes that a rank keeps and moves, traffic, host work.

Each backend states its own. They are compared with the backends' real processes (scripts/plan_state.py, to the byte;
scripts/plan_errors.py and scripts/plan_times.py).
"""

from __future__ import annotations

from finetune.engine.costs.base import Costs, ModelSize, Moving, OptimizerBytes, Shapes, Shard, State, Weight
from finetune.engine.costs.fsdp2 import Sharded
from finetune.engine.costs.replicated import Replicated
from finetune.engine.costs.zero import Zero
from finetune.engine.launch import Launch
from finetune.recipe import Recipe

__all__ = ["Costs", "ModelSize", "Moving", "Shapes", "Shard", "State", "Weight", "costs_of"]


def costs_of(recipe: Recipe, launch: Launch, shapes: Shapes, device: str, optimizer_bytes: OptimizerBytes) -> Costs:
    """shapes: of one rank of a tensor parallel group. device: of the compute, cuda or cpu."""
    if launch.kind == "fsdp2" or launch.parallelism.tensor > 1:  # as `start_engine` chooses
        return Sharded(recipe, launch, shapes, device, optimizer_bytes)
    return {"zero": Zero, "replicated": Replicated}[launch.kind](recipe, launch, shapes, device, optimizer_bytes)
