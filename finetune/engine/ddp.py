"""Replicas of the full model: one process, or several with DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from finetune.engine.base import (
    BuildOptimizers,
    Engine,
    Forward,
    Loss,
    T,
    detached,
    named_trainables,
    wait_after_gradients,
)
from finetune.engine.state_shards import ShardPart, replica_parts
from finetune.models.weights import Placement
from finetune.models.wrapped import WrappedModel
from finetune.recipe.schema import Recipe


class Ddp(Engine):
    """DDP averages gradients at the last micro-batch of a step, which `loss_factor` undoes.

    DDP decides in a forward whether its backward communicates, so `no_sync` must wrap both. Until then gradients
    accumulate in the buckets that are sent. With several micro-batches per step they are zeroed in place, not dropped:
    otherwise each gradient would be stored twice.

    With CUDA graphs (`keeps_gradients`) the model is not in DDP, whose hooks do not run in a replay: gradients are
    reduced at once, after the last backward.
    """

    def placement(self, recipe: Recipe) -> Placement:
        return Placement("load", self.device, direct=recipe.mode == "full" and self.device.type != "cpu")

    def wrap(self, model: WrappedModel, build: BuildOptimizers, micro_batches: int) -> None:
        self.unwrapped = model.causal_lm
        self.find_overflows(model)
        self.model = self.accelerator.prepare_model(model, evaluation_mode=self.keeps_gradients)
        self.averaged_ranks = self.world_size
        self._communicates = isinstance(self.model, DistributedDataParallel)
        self._keeps_buckets = self._communicates and micro_batches > 1
        # Found once: a search through all modules of an 8B model with adapters takes 5 ms (docs/proofs/gpu.md).
        self._trained = named_trainables(self.unwrapped)
        self._reduces = self.keeps_gradients and self.world_size > 1
        if self._reduces:  # as DDP does
            for _, parameter in self._trained:
                dist.broadcast(parameter.detach(), 0)
        self.build_optimizers([(name, p, p) for name, p in self._trained], build)
        self.trial_is_collective = self.parallelism.tokens > 1  # attention waits for the ranks that share its rows
        # DDP rebuilds its buckets after the first backward, in the order in which gradients arrived (torch's
        # Reducer::rebuild_buckets), and an element's position decides the order in which three or more ranks are
        # summed. After one more backward, gradients are in these buckets from the first micro-batch on.
        if self._communicates:
            self.warm_ups = 2 if micro_batches > 1 else int(self.world_size > 2)

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self.last = last
        with self.model.no_sync() if self._communicates and not last else contextlib.nullcontext():
            yield

    def backward(self, loss: Tensor) -> None:
        scaled = loss * self.loss_factor
        if self.world_size > 1:
            wait_after_gradients(scaled, self.stopwatch)
        scaled.backward()
        if self._reduces and self.last:
            reduce_gradients(self.gradients(), self.world_size)
        self.stopwatch.end_wait()

    def step(self) -> float | None:
        return self.clip_and_step(self.gradients(), lambda local: local.item())

    def knows_waits(self, compiles: bool) -> bool:
        """True for the part of DDP's reduction that the backward does not hide, and for sums of the loss."""
        return True

    def trial(self, batches: Sequence[T], forward: Forward[T], loss: Loss[T]) -> None:
        """Runs without DDP's reduction, so that no rank waits for one that runs out of memory."""
        value = loss(forward(getattr(self.model, "module", self.model), batches[0]), batches[0])
        (value * self.loss_factor).backward()

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for _, parameter in self._trained if parameter.grad is not None]

    def drop_gradients(self) -> None:
        if (self._keeps_buckets or self.keeps_gradients) and (gradients := self.gradients()):
            torch._foreach_zero_(gradients)
            return
        for _, parameter in self._trained:
            parameter.grad = None

    def parts(self, reading: bool) -> list[ShardPart]:
        """Returns all of every parameter; each rank writes an equal range."""
        return replica_parts(self._trained, self.rank, self.world_size, reading)

    def full_on_main(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor | None:
        return detached(tensor, dtype).cpu() if self.is_main else None

    def close(self) -> None:
        self._trained = []
        super().close()


def reduce_gradients(gradients: list[Tensor], ranks: int) -> None:
    """Replace gradients by their means over the ranks, in place: divided before they are added up, as by DDP."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        same = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = torch.cat([gradient.reshape(-1) for gradient in same]).div_(ranks)
        dist.all_reduce(flat)
        parts = flat.split([gradient.numel() for gradient in same])
        torch._foreach_copy_(same, [part.view_as(gradient) for part, gradient in zip(parts, same, strict=True)])
