"""Memory of a run, from shapes alone: bytes of tensors at the peak of each phase, on the fullest rank.

    persistent     weights, gradients and optimizer state, as the engine of the config shards them (`engine/costs`)
    transient      what a forward keeps for its backward, the largest operation (`timeline.py`), gathered layers,
                   buckets (`engine/costs`, laid end to end by `phases.py`)

Tensors only: a device's context, communicators and what its allocator leaves unused come on top.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PretrainedConfig

from finetune.engine.costs.common import different_ranks
from finetune.engine.launch import Launch
from finetune.export.figures import WHOLE_BYTES
from finetune.export.weight_files import SHARD_BYTES
from finetune.models.base_config import dtypes
from finetune.plan.micro_batch import HeaviestBatch
from finetune.plan.phases import KEPT, phases_of
from finetune.plan.shapes import costs_at, shapes_of
from finetune.recipe import Recipe

__all__ = ["HeaviestBatch", "Memory", "Place", "estimate_memory"]


@dataclass(frozen=True)
class Place:
    """Where a run would be."""

    launch: Launch  # of an accelerate config, as `engine.launch.read_config_file` reads it
    per_host: int  # processes on each machine
    device: str = "cuda"  # or cpu: a rehearsal
    capability: tuple[int, int] = (9, 0)  # of the CUDA device: attention kernels depend on it

    @property
    def config(self) -> str:
        return self.launch.where

    @property
    def processes(self) -> int:
        return self.launch.processes


@dataclass(frozen=True)
class Memory:
    """Of the fullest rank."""

    rank: int
    phases: dict[str, int]  # bytes of tensors on the device at the peak of each
    persistent: dict[str, int]  # bytes on the device between steps, or in the case of gradients before one, by what
    host: int  # bytes in its machine's memory, of all processes there: what is offloaded
    disk: int = 0  # bytes on the disks of its machine: NVMe offload
    after: dict[str, int] = field(default_factory=dict)  # bytes in the host's memory of one process: save, merge
    at_least: bool = False  # whether a step takes more: what is kept is too much already, and nothing else was weighed

    @property
    def tensors(self) -> int:
        return max(self.phases.values())


def estimate_memory(
    recipe: Recipe,
    config: PretrainedConfig,
    place: Place,
    batch: HeaviestBatch,
    micro_batches: int = 1,
    most: int | None = None,
) -> Memory:
    """Returns the memory of a run of `recipe` at `place`. config: `models.config.training_config(recipe)`'s.

    micro_batches: of a step on each process. most: bytes of a device; where what a rank keeps is more, no step is
    weighed. No weights are read; raises UserError where no such model can be made.
    """
    found, after, costs = [], host_after(recipe, config), costs_at(recipe, config, place.launch, place.device)
    for rank in different_ranks(place.launch.parallelism):
        phases, state = phases_of(costs, config, rank, place.capability, batch, micro_batches, most)
        host, disk = state.host * place.per_host, state.disk * place.per_host
        found.append(Memory(rank, phases, state.persistent, host, disk, after, at_least=list(phases) == [KEPT]))
        if found[-1].at_least:
            return found[-1]
    return max(found, key=lambda memory: memory.tensors)


def host_after(recipe: Recipe, config: PretrainedConfig) -> dict[str, int]:
    """Returns the bytes of tensors in the host's memory when a run has ended: rank 0's while it writes the result
    (`export/result.py`), and those of `merge`, which adds up and compares tensor by tensor: three times the largest one
    in fp32 (the run's, what is added to it, the file's), or all of a model that is small enough to be loaded whole."""
    weights = shapes_of(recipe, config).weights
    if recipe.mode == "full":
        saved = sum(weight.numel for weight in weights) * dtypes(recipe).frozen.itemsize
        return {"save": min(SHARD_BYTES, saved)}
    save = sum(weight.bytes for weight in weights if weight.trains)
    sizes = [4 * (weight.packed or weight.numel) for weight in weights]
    return {"save": save, "merge": max(3 * max(sizes), sum(sizes) if sum(sizes) <= WHOLE_BYTES else 0)}
