"""FSDP2: each decoder layer's weights, gradients and optimizer state sharded over the ranks (torch's fully_shard)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from finetune.engine.base import (
    BuildOptimizers,
    Engine,
    NamedTensors,
    in_type,
    named_trainables,
    norm_of_steps,
    saved_tensors,
    update_shards,
)
from finetune.engine.cut_linear import Group
from finetune.engine.expert_parallel import divide_experts
from finetune.engine.in_backward import StepInBackward
from finetune.engine.parts import Part
from finetune.engine.shard_waits import ShardWaits
from finetune.engine.sharding import Sharding, device_meshes, fill, first_row, gathered, shard, take_weights, units_of
from finetune.engine.tensor_parallel import Cut, Divided, divide
from finetune.models.weights import Placement, dtypes
from finetune.recipe.schema import Recipe


class Fsdp2(Engine):
    """torch's fully_shard, called as `sharding.py` says, with the options of the accelerate config.

    Not accelerate's own wrapping: it knows no mesh of ours, one type for weights, reduction and output, pins offloaded
    memory even where there is no device to pin it for, and wants an optimizer before there are shards. Ours is built
    afterwards, over this rank's plain local shards, which 8-bit and fused optimizers understand and DTensor dispatch
    does not slow down.
    """

    def placement(self, recipe: Recipe) -> Placement:
        """Only rank 0 reads the weights; quantised ones cannot be sent through `meta` and are a quarter of the size."""
        from_meta = recipe.mode != "qlora" and self.rank > 0
        return Placement("meta" if from_meta else "load", self.device)

    def wrap(self, model: Any, build: BuildOptimizers, micro_batches: int) -> None:
        self._meshes = device_meshes(self.parallelism, self.device.type)
        self._divided = Divided({}, frozenset())
        from_rank_0 = not getattr(model, "is_quantized", False)
        weights = take_weights(model, self.is_main) if from_rank_0 else {}
        if self._meshes.tensor is not None:
            self._divided = divide(model, _group(self._meshes.tensor))
        experts = divide_experts(model, self.parallelism, self.device.type, self.stopwatch)
        sharding = self._sharding()
        shard(model, units_of(model, self._plugin()), sharding, experts)
        if from_rank_0:
            offloads = isinstance(sharding.offload, CPUOffloadPolicy)
            fill(model, weights, self._divided.cuts, self.device, torch.device("cpu") if offloads else self.device)
        self.model = self.unwrapped = model
        self._waits = ShardWaits(self.model, self.stopwatch)
        trained = self._local_shards()
        if self.steps_in_backward:
            filled = ((name, p, local) for name, p, local in self._shards if local.numel())
            self.stepper = StepInBackward(filled, build, self.device)
            self.optimizers = self.stepper.optimizers
        else:
            self.optimizers = build(trained)

    def _plugin(self) -> Any:
        """accelerate's, with what the config says of FSDP; where it says nothing, replicas are its shards of one."""
        if self.launch.kind == "fsdp2":
            return self.accelerator.state.fsdp_plugin
        return FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=False
        )

    def _sharding(self) -> Sharding:
        plugin = self._plugin()
        offloads = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        offload = CPUOffloadPolicy(pin_memory=self.device.type != "cpu") if offloads else OffloadPolicy()
        return Sharding(self._meshes, self.policy, offload, plugin.reshard_after_forward)

    def _local_shards(self) -> NamedTensors:
        """This rank's part of each trained parameter, sharing its memory; nothing where the part is empty."""
        self._shards = [(name, p, _local(p.detach())) for name, p in named_trainables(self.unwrapped)]
        return [(name, local) for name, _, local in self._shards if local.numel()]

    def backward(self, loss: Tensor) -> None:
        """Every micro-batch is reduced at once: gradients that wait would be whole ones, on every rank."""
        sharing = self.parallelism.data * self.parallelism.tokens
        scaled = loss * (sharing * self.loss_scale.value)  # reduce-scatter averages, as does HSDP's all-reduce
        with self._waits.backward(scaled):
            scaled.backward()

    def step(self) -> float | None:
        if self.steps_in_backward:
            return norm_of_steps(self.stepper, lambda local: self.sum(local / self.parallelism.replicate)[0])
        for _, parameter, local in self._shards:
            local.grad = _local(parameter.grad) if parameter.grad is not None and local.numel() else None
        self._complete_partial()
        gradients = [local.grad for _, _, local in self._shards if local.grad is not None]
        counted = [local.grad for name, p, local in self._shards if local.grad is not None and self._counts(name, p)]
        norm = update_shards(self, gradients, lambda local: self.sum(local)[0], counted)
        self.drop_gradients()
        return norm

    def _complete_partial(self) -> None:
        """What each tensor rank has of a gradient from its own heads, added up: once a step, all in one."""
        found = [local.grad for name, _, local in self._shards if name in self._divided.partial]
        shares = [gradient for gradient in found if gradient is not None]
        if not shares or self._meshes.tensor is None:
            return
        flat = torch.cat([share.flatten() for share in shares]).to(self.device)
        with self.stopwatch.waiting():
            torch.distributed.all_reduce(flat, group=self._meshes.tensor.get_group())
        for share, total in zip(shares, flat.split([share.numel() for share in shares]), strict=True):
            share.copy_(total.view_as(share))

    def _counts(self, name: str, parameter: Tensor) -> bool:
        """Whether this rank's shard is the one that counts, of those that several ranks hold alike."""
        place = self.parallelism.place(self.rank)
        is_everybodys = isinstance(parameter, DTensor) and parameter.device_mesh == self._meshes.ends
        alone = place["tensor"] == 0 or name in self._divided.cuts or is_everybodys
        return alone and place["replicate"] == 0

    def drop_gradients(self) -> None:
        for _, parameter, local in self._shards:
            parameter.grad = local.grad = None

    def knows_waits(self, recipe: Recipe) -> bool:
        """Not where layers are compiled: they have no room for the hooks that tell. Nor of sums in a layer."""
        return not recipe.train.compile and self.parallelism.tensor == 1

    def gradients(self) -> list[Tensor]:
        return [_local(gradient) for gradient in super().gradients()]

    def parts(self, reading: bool) -> list[Part]:
        """Rows of each parameter, or of the columns of it that this rank holds; all that are held alike are read."""
        return [
            part_of_shard(name, parameter, local, self._divided.cuts.get(name))
            for name, parameter, local in self._shards
            if local.numel() and (reading or self._counts(name, parameter))
        ]

    def full_tensors(
        self, trainable_only: bool, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor | None]]:
        for name, tensor in saved_tensors(self.unwrapped, trainable_only).items():
            yield name, self._whole(in_type(tensor.to(self.device), dtype), self._divided.cuts.get(name))

    def _whole(self, tensor: Tensor, cut: Cut | None) -> Tensor | None:
        """Collective. The ranks that do not want it let go of it at once."""
        whole = gathered(tensor)
        if cut is not None and self._meshes.tensor is not None:
            parts = [torch.empty_like(whole) for _ in range(cut.count)]
            torch.distributed.all_gather(parts, whole, group=self._meshes.tensor.get_group())
            whole = torch.cat(parts, cut.dim)
        if self.is_main:
            return whole.cpu()
        # Else all gathers of the model are queued while rank 0 writes, and the time that NCCL gives each one runs.
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return None

    def saved_shapes(self, trainable_only: bool) -> dict[str, Tensor]:
        cuts, found = self._divided.cuts, super().saved_shapes(trainable_only)
        return {name: _whole_shape(tensor, cuts.get(name)) for name, tensor in found.items()}

    def configure(self, recipe: Recipe) -> None:
        """Remember the precision policy for the wrap."""
        compute = dtypes(recipe).compute
        mixed = recipe.train.precision in ("bf16", "fp16")
        self.policy = (
            MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32) if mixed else MixedPrecisionPolicy()
        )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of_shard(name: str, parameter: Tensor, local: Tensor, cut: Cut | None) -> Part:
    """local: rows of a parameter, which is a DTensor where they are not all; itself cut where `cut`."""
    first, width = first_row(parameter), math.prod(parameter.shape[1:])
    if cut is None or cut.dim == 0:
        whole = parameter.shape if cut is None else cut.whole(parameter.shape)
        above = 0 if cut is None else cut.index * parameter.shape[0]
        return Part(name, tuple(whole), (above + first) * width, local.numel(), local, 0)
    pitch = width * cut.count
    start = first * pitch + cut.index * width
    return Part(name, tuple(cut.whole(parameter.shape)), start, local.numel(), local, 0, width, pitch)


def _whole_shape(tensor: Tensor, cut: Cut | None) -> Tensor:
    return tensor if cut is None else tensor.new_empty(cut.whole(tensor.shape))


def _group(mesh: DeviceMesh) -> Group:
    return Group(mesh.get_group(), mesh.get_local_rank(), mesh.size())
