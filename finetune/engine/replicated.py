"""One process, or several with a whole model each (DDP)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from finetune.engine.base import (
    BuildOptimizers,
    Engine,
    in_type,
    named_trainables,
    norm_of_steps,
    saved_tensors,
    update_shards,
    wait_after_gradients,
)
from finetune.engine.in_backward import StepInBackward
from finetune.engine.parts import Part
from finetune.models.weights import Placement
from finetune.recipe.schema import Recipe


class Replicated(Engine):
    """Gradients are averaged by DDP at the last micro-batch of a step; the average is undone by the loss's factor.

    DDP decides in a forward whether its backward communicates, so the forward has to know as well. Until then
    gradients add up in the buckets that are sent: they are zeroed in place, not dropped, where there are several
    micro-batches, or every gradient would be held twice.
    """

    def placement(self, recipe: Recipe) -> Placement:
        return Placement("load", self.device, direct=recipe.mode == "full" and self.device.type != "cpu")

    def wrap(self, model: Any, build: BuildOptimizers, micro_batches: int) -> None:
        self.unwrapped = model
        self.model = self.accelerator.prepare_model(model)
        self.accumulates = micro_batches > 1
        if self.steps_in_backward:
            self.stepper = StepInBackward(((name, p, p) for name, p in named_trainables(model)), build, self.device)
            self.optimizers = self.stepper.optimizers
        else:
            self.optimizers = build(named_trainables(model))

    @property
    def _communicates(self) -> bool:
        return isinstance(self.model, DistributedDataParallel)

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with self.model.no_sync() if self._communicates and not last else contextlib.nullcontext():
            yield

    def backward(self, loss: Tensor) -> None:
        scaled = loss * (self.world_size * self.loss_scale.value)
        if self.world_size > 1:
            wait_after_gradients(scaled, self.stopwatch)
        scaled.backward()
        self.stopwatch.end_wait()

    def step(self) -> float | None:
        if self.steps_in_backward:
            return norm_of_steps(self.stepper, lambda local: local.item())
        gradients = [p.grad for _, p in named_trainables(self.unwrapped) if p.grad is not None]
        norm = update_shards(self, gradients, lambda local: local.item())
        self.drop_gradients()
        return norm

    @property
    def warm_ups(self) -> int:
        """DDP lays its buckets anew after the first backward, by the order in which gradients came (torch's
        Reducer::rebuild_buckets); where an element lies decides in which order three or more ranks are added up. One
        more, and gradients lie in these buckets from the first micro-batch on."""
        if not self._communicates:
            return 0
        return 2 if self.accumulates else int(self.world_size > 2)

    def knows_waits(self, recipe: Recipe) -> bool:
        """Of DDP's reduction, what the backward's computation did not hide, and of the loss's."""
        return True

    @property
    def trial_is_collective(self) -> bool:
        return self.parallelism.tokens > 1  # attention waits for the ranks that share its rows

    def trial(self, loss: Callable[[Any], Tensor]) -> None:
        """Past DDP, which would reduce: a rank that runs out of memory leaves no other waiting."""
        (loss(self.unwrapped) * (self.world_size * self.loss_scale.value)).backward()

    def drop_gradients(self) -> None:
        gradients = [p.grad for _, p in named_trainables(self.unwrapped) if p.grad is not None]
        if self._communicates and self.accumulates and gradients:
            torch._foreach_zero_(gradients)
            return
        for _, parameter in named_trainables(self.unwrapped):
            parameter.grad = None

    def parts(self, reading: bool) -> list[Part]:
        """Every rank has everything: each writes its share of every parameter, and reads all of it."""
        found = []
        for name, p in named_trainables(self.unwrapped):
            share = -(-p.numel() // self.world_size)
            start = 0 if reading else min(self.rank * share, p.numel())
            numel = p.numel() if reading else min(share, p.numel() - start)
            if numel:
                found.append(Part(name, tuple(p.shape), start, numel, p, start))
        return found

    def full_tensors(
        self, trainable_only: bool, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor | None]]:
        for name, tensor in saved_tensors(self.unwrapped, trainable_only).items():
            yield name, in_type(tensor, dtype).cpu() if self.is_main else None
