"""FSDP2: each decoder layer's weights, gradients and optimizer state sharded over the ranks (torch's fully_shard)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Set
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from finetune.engine.base import BuildOptimizers, Engine, NamedTensors, detached, named_trainables, wait_after_gradients
from finetune.engine.expert_parallel import parallelize_experts
from finetune.engine.launch import Launch
from finetune.engine.muon import muon_of
from finetune.engine.overflow import HalfProduct, Sum
from finetune.engine.ranks import group_over, sum_gradients
from finetune.engine.sharding import (
    Sharding,
    device_meshes,
    fill_shards,
    full_tensor,
    local_tensor,
    part_of_shard,
    shard_model,
    sharding_units,
    shared_by_units,
    take_weights,
)
from finetune.engine.split_trial import token_split_problem
from finetune.engine.state_shards import ShardPart
from finetune.engine.tensor_group import ShardedParameters, TensorGroup, all_gathered
from finetune.engine.tensor_packed import shard_scales
from finetune.engine.tensor_parallel import parallelize
from finetune.engine.timing import Stopwatch
from finetune.errors import UserError
from finetune.models.base_config import dtypes
from finetune.models.packed_linear import is_stored_quantized, make_plain
from finetune.models.weights import Placement
from finetune.models.wrapped import WrappedModel
from finetune.recipe.schema import Recipe

log = logging.getLogger(__name__)


class Fsdp2(Engine):
    """torch's fully_shard, called as in `sharding.py`, with the options of the accelerate config.

    Not accelerate's own wrapping: it does not support our meshes, has one type for weights, reduction and output, pins
    offloaded memory even without a device to pin it for, and needs an optimizer before there are shards. Ours
    is built afterwards, over this rank's plain local shards: 8-bit and fused optimizers support these, and DTensor
    dispatch does not slow them down.
    """

    gathers_in_forward = True

    def __init__(self, accelerator: Accelerator, launch: Launch, recipe: Recipe, config: PretrainedConfig):
        super().__init__(accelerator, launch, recipe, config)
        self.averaged_ranks = self.parallelism.data * self.parallelism.tokens  # by reduce-scatter; HSDP's all-reduce
        # Not for a checkpoint that is already quantized: transformers creates packed layers while reading it.
        self._rank_0_reads = recipe.quantization is None or not is_stored_quantized(config)
        # Under fp16 weights are gathered in fp32, and autocast casts them as on one process. Gathered in fp16,
        # embedding, head and norms would have gradients in fp16 as well, which overflow in more steps.
        self._policy = MixedPrecisionPolicy()
        if recipe.train.precision in ("bf16", "fp8"):
            self._policy = MixedPrecisionPolicy(param_dtype=dtypes(recipe).compute, reduce_dtype=torch.float32)

    def placement(self, recipe: Recipe) -> Placement:
        """Returns host memory of rank 0: it reads all weights, and packs quantized ones one by one on its device."""
        from_meta = self.rank > 0 and self._rank_0_reads
        return Placement("meta" if from_meta else "load", self.device, packed_on=torch.device("cpu"))

    def wrap(self, model: WrappedModel, build: BuildOptimizers, micro_batches: int) -> None:
        self.model, self.unwrapped = model, model.causal_lm
        make_plain(self.unwrapped)
        weights = take_weights(self.unwrapped, self.is_main) if self._rank_0_reads else None
        sharding, units, expert_meshes = self.split(self.unwrapped, set(self.unwrapped.modules()))
        self._freed: list[Any] = shard_model(model, units, sharding, expert_meshes)
        self._roots: list[nn.Module] = [model]
        if weights is not None:
            fill_shards(self.unwrapped, weights, self._sharded.shards, self.device, sharding.device(self.device))
            self.unwrapped.tie_weights()
        shard_scales(self.unwrapped, self._sharded.shards)
        self._waits = ShardWaits(self.model, self.stopwatch)
        self.build_over_shards(build)
        self.find_overflows(model)

    def split(
        self, causal_lm: Any, here: Set[nn.Module]
    ) -> tuple[Sharding, list[nn.Module], dict[nn.Module, DeviceMesh]]:
        """Split matrices and experts between ranks. Returns how to shard the rest: options, units, meshes of experts.

        here: modules of this rank's pipeline stages, or of the model.
        """
        self._meshes = device_meshes(self.parallelism, self.device.type)
        self._sharded, self._tensor_group = ShardedParameters({}, frozenset()), None
        if (mesh := self._meshes.tensor) is not None:
            self._tensor_group = TensorGroup(mesh.get_group(), mesh.get_local_rank(), mesh.size())
            # All ranks do the same, whatever the machines of a trial are.
            reasons = [why for why in self.ranks.gather(token_split_problem(causal_lm.config)) if why is not None]
            if reasons and self.is_main:
                log.warning("tensor parallel: norms are computed for all tokens on each rank: %s", reasons[0])
            self._sharded = parallelize(causal_lm, self._tensor_group, here, splits_tokens=not reasons)
        expert_meshes = parallelize_experts(causal_lm, self.parallelism, self.device.type, self.stopwatch, here)
        plugin: Any
        if self.launch.kind == "fsdp2":
            plugin = self.accelerator.state.fsdp_plugin  # with the config's options
        else:  # replicas of tensor parallel models are shards of one
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=False
            )
        offloads = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        offload = CPUOffloadPolicy(pin_memory=self.device.type != "cpu") if offloads else OffloadPolicy()
        sharding = Sharding(self._meshes, self._policy, offload, plugin.reshard_after_forward)
        units = [unit for unit in sharding_units(causal_lm, plugin) if unit in here]
        if shared := shared_by_units(causal_lm, units):
            raise UserError(
                f"FSDP2 cannot shard {type(causal_lm).__name__}, whose {shared} are one weight. They are in modules "
                "that are sharded one by one. Fix: use ddp, or zero3"
            )
        return sharding, units, expert_meshes

    def build_over_shards(self, build: BuildOptimizers) -> None:
        """Build the optimizers over this rank's shards."""
        self._shards = [(name, p, local_tensor(p.detach())) for name, p in self.trained_here()]
        self.build_optimizers([shard for shard in self._shards if shard[2].numel()], build)  # these share memory
        if (muon := muon_of(self.optimizers)) is not None:
            replica = group_over(("shard", "context", "sequence", "tensor"), self.parallelism, self.rank)
            muon.share([(None, self.parts(reading=True))], replica, self.device, self.stopwatch)

    def watch_products(self, products: list[HalfProduct]) -> None:
        """Gathers each unit once: FSDP2 uses the parameters that it makes then in all forwards."""
        for module in (module for root in self._roots for module in root.modules()):
            if isinstance(module, FSDPModule):
                own = set(module.modules())
                module.unshard()
                super().watch_products([product for product in products if product.module in own])
                module.reshard()

    def sums_of(self, name: str) -> list[Sum]:
        sums = super().sums_of(name)
        if self._tensor_group is not None and name in self._sharded.partial:
            sums.append(self._tensor_group.sum)
        return sums

    def trained_here(self) -> NamedTensors:
        """Returns the parameters that train, of which this rank has shards."""
        return named_trainables(self.unwrapped)

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """Keeps layers gathered between tokens if all ranks have twice their memory free; a cache needs some of it."""
        needed = sum(p.numel() * p.element_size() for module in self._freed for p in module.parameters())
        kept = self._freed if self.all_have_room(2 * needed) else []
        for module in kept:
            module.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for module in kept:
                module.reshard()
                module.set_reshard_after_forward(True, recurse=False)

    def backward(self, loss: Tensor) -> None:
        """Reduces after every micro-batch: accumulated gradients would be unsharded on every rank."""
        scaled = loss * self.loss_factor
        with self._waits.backward(scaled):
            scaled.backward()

    def step(self) -> float | None:
        if self.steps_in_backward:
            return self.clip_and_step([], lambda local: self.ranks.sum(local / self.parallelism.replicate)[0])
        for _, parameter, local in self._shards:
            local.grad = local_tensor(parameter.grad) if parameter.grad is not None and local.numel() else None
        own = [(name, parameter, local.grad) for name, parameter, local in self._shards if local.grad is not None]
        if self._tensor_group is not None:  # ranks have gradients from their own heads and tokens
            with self.stopwatch.waiting():
                partial = [gradient for name, _, gradient in own if name in self._sharded.partial]
                sum_gradients(partial, self._tensor_group.process_group, self.device)
        counted = [gradient for name, _, gradient in own if self._counts(name)]
        return self.clip_and_step([gradient for *_, gradient in own], lambda local: self.ranks.sum(local)[0], counted)

    def _counts(self, name: str) -> bool:
        """Returns whether this rank's shard is the first of equal ones: it counts for the norm, and is saved."""
        coordinates = self.parallelism.coordinates(self.rank)
        unique = coordinates["tensor"] == 0 or name in self._sharded.shards
        return unique and coordinates["replicate"] == 0

    def drop_gradients(self) -> None:
        for _, parameter, local in self._shards:
            parameter.grad = local.grad = None

    def knows_waits(self, compiles: bool) -> bool:
        """False with compiled layers, which lack the hooks of `ShardWaits`, and with sums inside layers."""
        return not compiles and self.parallelism.tensor == 1

    def gradients(self) -> list[Tensor]:
        return [local_tensor(gradient) for gradient in super().gradients()]

    # --- checkpoints and the result

    def parts(self, reading: bool) -> list[ShardPart]:
        """Returns rows of each parameter, or of this rank's columns of it; all ranks read equal shards."""
        return [
            part_of_shard(name, parameter, local, self._sharded.shards.get(name))
            for name, parameter, local in self._shards
            if local.numel() and (reading or self._counts(name))
        ]

    def restored(self) -> None:
        self.free_gathered()  # they would be used again in place of the new shards

    def free_gathered(self) -> None:
        """Free gathered weights that forwards without a backward have left, as the last layers' are."""
        for module in (module for root in self._roots for module in root.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()

    def gathered(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        full, shard = full_tensor(detached(tensor.to(self.device), dtype)), self._sharded.shards.get(name)
        if shard is not None and self._tensor_group is not None:
            full = all_gathered(full, self._tensor_group, shard.dim, shard.total)
        return full

    def full_on_main(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor | None:
        full = self.gathered(name, tensor, dtype)
        if self.is_main:
            return full.cpu()
        # Otherwise all gathers of the model are queued while rank 0 writes, and the NCCL timeout of each runs.
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return None

    def saved_shapes(self, trainable_only: bool) -> dict[str, Tensor]:
        shapes, shards = super().saved_shapes(trainable_only), self._sharded.shards
        return {
            name: tensor.new_empty(shards[name].full_shape(tensor.shape)) if name in shards else tensor
            for name, tensor in shapes.items()
        }


class ShardWaits:
    """Measures when a rank waits for shards: hooks around FSDP2's own, through torch's public API.

        forward    | pre-hooks: begin, FSDP2 gathers the layer's weights, end |  layer  |
        backward   | hooks on the output's gradient: begin, FSDP2 gathers, end |  layer's backward  |
                   | hook on the gradient of the input that FSDP2 returned: begin, FSDP2 reduces, end: of the input |
        at the end | begin: all is computed, FSDP2 waits for the last reductions, end: the backward returns |

    On the CPU a collective is complete when it returns, so this is its full duration; on CUDA it is the time in which
    the compute stream waits, and the copy from the gathered buffer. With CPU offload this includes the transfer.
    No effect if the stopwatch does not count waits.
    """

    def __init__(self, model: nn.Module, stopwatch: Stopwatch):
        self._stopwatch = stopwatch
        self._in_backward = False
        self._inputs: list[Tensor] = []  # inputs of the module whose weights are being gathered
        for module in model.modules() if stopwatch.knows_waits else ():
            if isinstance(module, FSDPModule):  # prepended hooks run before FSDP2's own, the others after these
                module.register_forward_pre_hook(self._before_gather, prepend=True, with_kwargs=True)
                module.register_forward_pre_hook(self._after_gather, with_kwargs=True)
                module.register_forward_hook(partial(self._register, stopwatch.begin_wait), prepend=True)
                module.register_forward_hook(partial(self._register, stopwatch.end_wait))

    @contextlib.contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        if self._stopwatch.knows_waits:
            wait_after_gradients(loss, self._stopwatch)
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False
            self._stopwatch.end_wait()

    # Hooks of a forward that is recomputed in the backward register none on tensors, which get no gradient.

    def _before_gather(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs = _differentiable((args, kwargs))
        self._stopwatch.begin_wait()

    def _after_gather(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self._stopwatch.end_wait()
        if self._in_backward:
            return
        for own, returned in zip(self._inputs, _differentiable((args, kwargs)), strict=True):
            if returned is not own:  # else FSDP2 has no hook on its gradient
                returned.register_hook(self._stopwatch.begin_wait)
                own.register_hook(self._stopwatch.end_wait)
        self._inputs = []

    def _register(self, mark: Callable[..., None], _module: nn.Module, _args: Any, output: Any) -> None:
        for tensor in _differentiable(output) if not self._in_backward else ():
            tensor.register_hook(mark)


def _differentiable(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]
