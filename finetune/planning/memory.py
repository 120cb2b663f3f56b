"""Bytes of a run's state on each process, from the parameters and how they are divided.

Weights, gradients and AdamW's two moments, all in fp32. Activations come on top and depend on the rows; what libraries
hold is theirs. Measured beside it: benchmarks/communication.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from finetune.engine.parallelism import Parallelism

FP32 = 4
MOMENTS = 2  # https://arxiv.org/abs/1711.05101


class Held(NamedTuple):
    weights: float
    gradients: float
    optimizer_state: float  # with the master weights that a backend keeps besides

    @property
    def total(self) -> float:
        return sum(self)


@dataclass(frozen=True)
class Parameters:
    """Numbers of them."""

    layers: int  # in decoder layers, experts among them
    others: int  # embedding, final norm, head
    trained: float  # of all, a share


def held(backend: str, parallelism: Parallelism, parameters: Parameters) -> Held:
    """backend: ddp, fsdp2, zero2 or zero3. Of the average process, by ZeRO's counting
    (https://arxiv.org/abs/1910.02054, figure 1); a pipeline's first and last stage hold more, the others less."""
    whole = _on_each(parallelism, parameters)
    group = parallelism.shard * parallelism.tokens if backend != "ddp" else 1
    trained = parameters.trained
    weights = whole if backend in ("ddp", "zero2") else whole / group
    gradients = whole * trained / group
    masters = whole * trained / group if backend.startswith("zero") else 0.0  # DeepSpeed's flat fp32 groups
    return Held(FP32 * weights, FP32 * gradients, FP32 * (MOMENTS * whole * trained / group + masters))


def _on_each(parallelism: Parallelism, parameters: Parameters) -> float:
    """Parameters before any sharding over data-parallel ranks. Tensor ranks cut layers and share the rest as shards;
    experts that are divided are shards, too."""
    return (parameters.layers + parameters.others) / parallelism.tensor / parallelism.pipeline
