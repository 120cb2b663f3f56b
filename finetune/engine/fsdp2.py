"""FSDP2: each decoder layer's weights, gradients and optimizer state sharded over the ranks (torch's fully_shard)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from finetune.engine.base import (
    BuildOptimizers,
    Engine,
    NamedTensors,
    named_trainables,
    norm_of_steps,
    saved_tensors,
    update_shards,
)
from finetune.engine.in_backward import StepInBackward
from finetune.engine.parts import Part
from finetune.engine.shard_waits import ShardWaits
from finetune.models.weights import Placement, dtypes
from finetune.recipe.schema import Recipe


class Fsdp2(Engine):
    """Wrapped by accelerate, with three of its choices set straight.

    - Its YAML knows one type for weights, reduction and output; ours reduces gradients in fp32.
    - It pins offloaded memory even where there is no device to pin it for.
    - It maps the optimizer's parameters to shards by address, which is 0 for every rank that loaded no weights, so the
      optimizer would train nothing after step 1. Ours is built afterwards, over this rank's plain local shards, which
      8-bit and fused optimizers understand and DTensor dispatch does not slow down.
    """

    def placement(self, recipe: Recipe) -> Placement:
        """Only rank 0 reads the weights; quantised ones cannot be sent through `meta` and are a quarter of the size."""
        from_meta = recipe.mode != "qlora" and self.rank > 0
        return Placement("meta" if from_meta else "load", self.device)

    def wrap(self, model: Any, build: BuildOptimizers, micro_batches: int) -> None:
        plugin: Any = self.accelerator.state.fsdp_plugin
        plugin.cpu_ram_efficient_loading = not getattr(model, "is_quantized", False)
        plugin.mixed_precision_policy = self.policy
        plugin.activation_checkpointing = False  # the model's own layers do; twice would be four forwards
        if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
            plugin.cpu_offload = CPUOffloadPolicy(pin_memory=self.device.type != "cpu")
        # prepare() insists on an optimizer next to the model; this one only satisfies it.
        unused = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        self.model, _ = self.accelerator.prepare(model, unused)
        self.unwrapped = self.model
        self._waits = ShardWaits(self.model, self.stopwatch)
        trained = self._local_shards()
        if self.steps_in_backward:
            filled = ((name, p, local) for name, p, local in self._shards if local.numel())
            self.stepper = StepInBackward(filled, build, self.device)
            self.optimizers = self.stepper.optimizers
        else:
            self.optimizers = build(trained)

    def _local_shards(self) -> NamedTensors:
        """This rank's part of each trained parameter, sharing its memory; nothing where the part is empty."""
        self._shards = [(name, p, _local(p.detach())) for name, p in named_trainables(self.unwrapped)]
        return [(name, local) for name, _, local in self._shards if local.numel()]

    def backward(self, loss: Tensor) -> None:
        """Every micro-batch is reduced at once: gradients that wait would be whole ones, on every rank."""
        scaled = loss * (self.world_size * self.loss_scale.value)  # reduce-scatter averages
        with self._waits.backward(scaled):
            scaled.backward()

    def step(self) -> float | None:
        if self.steps_in_backward:
            return norm_of_steps(self.stepper, lambda local: self.sum(local)[0])
        for _, parameter, local in self._shards:
            local.grad = _local(parameter.grad) if parameter.grad is not None and local.numel() else None
        gradients = [local.grad for _, _, local in self._shards if local.grad is not None]
        norm = update_shards(self, gradients, lambda local: self.sum(local)[0])
        self.drop_gradients()
        return norm

    def drop_gradients(self) -> None:
        for _, parameter, local in self._shards:
            parameter.grad = local.grad = None

    def knows_waits(self, recipe: Recipe) -> bool:
        """Not where layers are compiled: they have no room for the hooks that tell."""
        return not recipe.train.compile

    def gradients(self) -> list[Tensor]:
        return [_local(gradient) for gradient in super().gradients()]

    def parts(self, reading: bool) -> list[Part]:
        """Rows of each parameter: a contiguous range of it."""
        found = []
        for name, parameter, local in self._shards:
            if local.numel():
                start = _first_row(parameter) * (math.prod(parameter.shape[1:]) if parameter.ndim else 1)
                found.append(Part(name, tuple(parameter.shape), start, local.numel(), local, 0))
        return found

    def full_tensors(self, trainable_only: bool) -> Iterator[tuple[str, Tensor | None]]:
        for name, tensor in saved_tensors(self.unwrapped, trainable_only).items():
            yield name, self._whole(tensor.detach())

    def _whole(self, tensor: Tensor) -> Tensor | None:
        """Collective. The ranks that do not want it let go of it at once."""
        whole = tensor.to(self.device)
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        return whole.cpu() if self.is_main else None

    def configure(self, recipe: Recipe) -> None:
        """Remember the precision policy; the plugin takes it at wrap."""
        compute = dtypes(recipe).compute
        mixed = recipe.train.precision in ("bf16", "fp16")
        self.policy = (
            MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32) if mixed else MixedPrecisionPolicy()
        )


def _first_row(parameter: Tensor) -> int:
    """Of this rank's shard, in the whole parameter."""
    if not isinstance(parameter, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
