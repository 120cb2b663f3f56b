"""One trial: the memory that a forward and backward of so many rows need in the middle of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from finetune.data.batch import Batch, collate
from finetune.data.samples import Example, Sequence
from finetune.data.token_shard import UNSHARDED, TokenShare, token_shard
from finetune.engine.base import Engine
from finetune.errors import RunFailure, UserError
from finetune.models.attention import AttentionChoice
from finetune.models.head import LossHead
from finetune.objectives import supervised_losses
from finetune.training.fit.memory import Memory

Build = Callable[[list[tuple[str, Tensor]]], list[Optimizer]]
_TWIN = 8192  # elements at most; bitsandbytes keeps state in 8 bits from 4096 on


@dataclass(frozen=True)
class HeaviestRow:
    """Longest, and most trained on, of all rows of the data; not always the same row."""

    example: Example  # whose tokens fill it
    tokens: int
    supervised: int

    def batch(self, rows: float, of: TokenShare = UNSHARDED) -> Batch:
        """Rows of one example each: attention within it costs no less than within several. HALF: of half a row."""
        share = min(rows, 1)
        several = len(self.example.sequences)
        length = max(1, int(self.tokens * share) // several)  # of each sequence
        targets = min(int(self.supervised * share) // several, length - 1)
        loss_mask = np.arange(length) >= length - targets
        sequences = [Sequence(np.resize(one.input_ids, length), loss_mask) for one in self.example.sequences]
        examples = [replace(self.example, sequences=tuple(sequences))] * max(1, int(rows))
        return token_shard(collate(examples, padded_to=of.padded(length * several * len(examples))), of)


@dataclass(frozen=True)
class Trials:
    """Trials on one engine; gradients stay, as for a step's later micro-batches, until `Engine.drop_gradients`.

    Every rank must make the same ones in the same order.
    """

    engine: Engine
    memory: Memory
    attention: AttentionChoice
    head: LossHead
    row: HeaviestRow
    optimizer_bytes: int  # of state that is not there yet

    def begin(self) -> None:
        """Before any other: makes the gradients, and what is made once."""
        try:
            self._run(1)
        except torch.OutOfMemoryError:
            raise UserError(
                f"batch.rows_per_device: auto: not even one row of {self.row.tokens:,} tokens fits into "
                f"{self.memory.name}: train.activation_checkpointing: true, fsdp2, a smaller data.max_length, "
                "mode: lora or qlora, or an offload config"
            ) from None

    def attempt(self, rows: float) -> float:
        """Bytes that the rank that needs most would need; infinite where a rank ran out."""
        return max(self.engine.gather(self._attempt(rows) + self.optimizer_bytes))

    def _attempt(self, rows: float) -> float:
        try:
            return self.memory.peak(lambda: self._run(rows))
        except torch.OutOfMemoryError:
            if self.engine.trial_is_collective:
                # The others wait in the middle of this forward, and end with this process.
                raise RunFailure(
                    f"batch.rows_per_device: auto: {rows:g} rows looked as if they would fit and did not: "
                    f"give a number below {rows:g}"
                ) from None
        return math.inf  # here the error, which holds the forward's tensors, is gone

    def _run(self, rows: float) -> None:
        engine, batch = self.engine, self.row.batch(rows, self.engine.token_share)
        arguments = self.attention.forward_arguments(batch.sequence_lengths)
        engine.trial(lambda model: supervised_losses(model, batch, arguments, engine.device, self.head).total)


def optimizer_bytes(engine: Engine, build: Build) -> int:
    """What the optimizer's state will take of this device after the first step.

    Each stepped tensor has a small twin that is really stepped, and takes as much for each element.
    """
    if not engine.copies_state:  # it is on NVMe
        return 0
    stepped = {id(part.stepped): part for part in engine.parts(reading=True)}
    twins = []
    for part in stepped.values():
        twin = part.stepped.new_zeros(min(part.stepped.numel(), _TWIN))
        twin = twin.view(-1, 1) if len(part.shape) > 1 else twin
        twin.grad = torch.zeros_like(twin)
        twins.append((part, twin))
    optimizers = build([(part.name, twin) for part, twin in twins])
    for optimizer in optimizers:
        optimizer.step()
    taken = 0.0
    for part, twin in twins:
        optimizer = next(optimizer for optimizer in optimizers if twin in optimizer.state)
        if engine.device.type == "cuda" and getattr(optimizer, "is_paged", False):
            continue  # in memory that CUDA moves out as others need the device
        values = [
            value
            for field, value in optimizer.state[twin].items()
            if isinstance(value, Tensor) and value.ndim and not field.startswith("qmap")  # one table for all
        ]
        found = sum(value.nbytes for value in values if value.device.type == engine.device.type)
        taken += found / twin.numel() * part.stepped.numel()
    return int(taken)
