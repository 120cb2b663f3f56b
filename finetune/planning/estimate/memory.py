"""Memory of a run, from shapes alone: bytes of tensors at the peak of each phase, on the fullest rank.

    persistent     weights, gradients and optimizer state, as the engine of the config shards them (`state.py`)
    transient      what a forward keeps for its backward, the largest operation, gathered layers, buckets

Tensors only: a device's context, communicators and what its allocator leaves unused come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from finetune.engine.launch import Launch
from finetune.planning.estimate.state import State, state_of
from finetune.recipe import Recipe


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
class HeaviestBatch:
    """The largest micro-batch of a run."""

    documents: tuple[int, ...]  # tokens of each
    targets: int  # supervised tokens

    @classmethod
    def of_rows(cls, rows: int, length: int, share: float = 1.0) -> HeaviestBatch:
        """`rows` rows of one document of `length` tokens, a `share` of them supervised."""
        return cls((length,) * rows, max(1, int(rows * (length - 1) * share)))


@dataclass(frozen=True)
class Memory:
    """Of the fullest rank."""

    rank: int
    phases: dict[str, int]  # bytes of tensors on the device at the peak of each
    persistent: dict[str, int]  # bytes on the device between steps, or in the case of gradients before one, by what
    host: (
        int  # bytes in its machine's memory, of all processes there: offload, optimizer state, copies for a checkpoint
    )
    disk: int = 0  # bytes on the disks of its machine: NVMe offload
    notes: tuple[str, ...] = field(default=())  # what is not known

    @property
    def tensors(self) -> int:
        return max(self.phases.values())


def estimate_memory(
    recipe: Recipe, config: PretrainedConfig, place: Place, batch: HeaviestBatch, micro_batches: int = 1
) -> Memory:
    """Returns the memory of a run of `recipe` at `place`. config: `models.config.training_config(recipe)`'s.

    micro_batches: of a step on each process. No weights are read; raises UserError where no such model can be made.
    """
    states = [state_of(recipe, config, place.launch, rank, place.device) for rank in _ranks(place.launch)]
    fullest = max(range(len(states)), key=lambda i: states[i].device_bytes)
    state = states[fullest]
    hidden = config.get_text_config().hidden_size
    transient = _roughly(state, hidden, batch)
    weights, optimizer = state.persistent["weights"], state.persistent["optimizer state"]
    at_rest = weights + optimizer
    phases = {
        "load": weights,
        "forward": at_rest + transient,
        "backward": at_rest + state.persistent["gradients"] + transient,
        "optimizer": at_rest + state.persistent["gradients"],
    }
    return Memory(
        _ranks(place.launch)[fullest], phases, state.persistent, state.host * place.per_host, state.disk, (_ROUGH,)
    )


_ROUGH = "a first version: shards by numbers of elements, activations by the residual stream alone"


def _ranks(launch: Launch) -> Sequence[int]:
    """Returns the ranks that may differ in memory: of a pipeline one of each stage, else the first."""
    sizes = launch.parallelism
    return range(0, sizes.processes, sizes.processes // sizes.pipeline)


def _roughly(state: State, hidden: int, batch: HeaviestBatch) -> int:
    tokens: Any = sum(batch.documents)
    return tokens * hidden * 2 * state.layers
