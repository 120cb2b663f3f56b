"""One process, or several with a whole model each (DDP)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from finetune.engine.base import (
    BuildOptimizers,
    Engine,
    named_trainables,
    saved_tensors,
    update_shards,
    wait_after_gradients,
)
from finetune.engine.parts import Part
from finetune.models.weights import Placement
from finetune.recipe.schema import Recipe


class Replicated(Engine):
    """Gradients are averaged by DDP at the last micro-batch of a step; the average is undone by the loss's factor."""

    def placement(self, recipe: Recipe) -> Placement:
        return Placement("load", self.device)

    def wrap(self, model: Any, build: BuildOptimizers, micro_batches: int) -> None:
        self.unwrapped = model
        self.model = self.accelerator.prepare_model(model)
        self.optimizers = build(named_trainables(model))

    def backward(self, loss: Tensor, last: bool) -> None:
        wait = isinstance(self.model, DistributedDataParallel) and not last
        scaled = loss * (self.world_size * self.loss_scale.value)
        if self.world_size > 1:
            wait_after_gradients(scaled, self.stopwatch)
        with self.model.no_sync() if wait else contextlib.nullcontext():
            scaled.backward()
        self.stopwatch.end_wait()

    def step(self, lr_factor: float) -> float | None:
        self.set_lr(lr_factor)
        gradients = [p.grad for _, p in named_trainables(self.unwrapped) if p.grad is not None]
        norm = update_shards(self, gradients, lambda local: local.item())
        self.drop_gradients()
        return norm

    @property
    def needs_warm_up(self) -> bool:
        """DDP lays its buckets anew after the first backward, by the order in which gradients came (torch's
        Reducer::rebuild_buckets); where an element lies decides in which order three or more ranks are added up."""
        return isinstance(self.model, DistributedDataParallel) and self.world_size > 2

    def knows_waits(self, recipe: Recipe) -> bool:
        """Of DDP's reduction, what the backward's computation did not hide, and of the loss's."""
        return True

    def drop_gradients(self) -> None:
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

    def full_tensors(self, trainable_only: bool) -> Iterator[tuple[str, Tensor | None]]:
        for name, tensor in saved_tensors(self.unwrapped, trainable_only).items():
            yield name, tensor.detach().cpu() if self.is_main else None
