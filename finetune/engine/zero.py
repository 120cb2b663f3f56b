"""DeepSpeed ZeRO 1, 2 and 3, with offload of optimizer state and weights to CPU memory or NVMe."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from finetune.engine.base import BuildOptimizers, Engine, detached, named_trainables, saved_tensors
from finetune.engine.optimizer_step import NonFinite
from finetune.engine.state_shards import ShardPart, Types
from finetune.errors import UserError
from finetune.models.attention.mixers import is_mixer, with_positional_input
from finetune.models.base_config import dtypes
from finetune.models.packed_linear import linear_weights, move_states
from finetune.models.weights import Placement
from finetune.models.wrapped import WrappedModel, trained_head
from finetune.recipe.schema import Recipe
from finetune.utils import full_shape


class Zero(Engine):
    """Wrapped by accelerate, then driven by DeepSpeed's own backward and step.

    DeepSpeed always runs its fp32 path: trained weights, gradients and state are fp32 there, and the compute type is
    autocast's inside the forward, as on every backend. The optimizer is torch's also under offload
    (`zero_force_ds_cpu_optimizer: false`): the same arithmetic, and nothing to compile.
    """

    @property
    def plugin(self) -> Any:
        return self.accelerator.state.deepspeed_plugin

    def placement(self, recipe: Recipe) -> Placement:
        if self.plugin.zero_stage == 3:
            packs = recipe.quantization is not None
            return Placement("load", self.device if packs else None, packed_on=torch.device("cpu"))
        return Placement("load", self.device, direct=recipe.mode == "full" and self.device.type != "cpu")

    @contextlib.contextmanager
    def loading(self, recipe: Recipe) -> Iterator[None]:
        """Context manager for loading: under stage 3 transformers shards every model as it is created, so that no rank
        holds all of it.

        transformers does so in the config's compute type, which would be fp32: twice the memory for frozen weights.
        Random weights drawn in shards would depend on the number of ranks, and rows of shards cannot be packed: these
        models are created in full on every rank, and sharded at wrap.
        """
        from transformers.integrations import unset_hf_deepspeed_config

        stage_3, dora = self.plugin.zero_stage == 3, recipe.lora is not None and recipe.lora.dora
        if stage_3 and dora and recipe.mode == "qlora" and self.device.type == "cpu":
            raise UserError(
                "`lora.dora` with `mode: qlora` cannot be rehearsed under ZeRO-3: on CPUs peft creates new 4-bit "
                "weights in every forward, which DeepSpeed does not know: use fsdp2, or set `lora.dora: false`"
            )
        half = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtypes(recipe).frozen)
        if recipe.mode == "lora" and half:
            self.plugin.deepspeed_config[half] = {"enabled": True}  # until `wrap`
            self.plugin.set_deepspeed_weakref()
        if recipe.model.config is not None or recipe.quantization is not None:
            unset_hf_deepspeed_config()
        try:
            yield
        finally:
            for kind in ("bf16", "fp16"):
                self.plugin.deepspeed_config[kind] = {"enabled": False}
            self.plugin.set_deepspeed_weakref()

    def wrap(self, model: WrappedModel, build: BuildOptimizers, micro_batches: int) -> None:
        self.unwrapped = model.causal_lm
        self._make_leaves(self.unwrapped)
        config = self.plugin.deepspeed_config
        config.update(
            train_micro_batch_size_per_gpu=1,  # the recipe sets rows; DeepSpeed only checks that the product fits
            gradient_accumulation_steps=micro_batches,  # no effect: `backward` marks the end of a step
            train_batch_size=micro_batches * self.world_size,
            gradient_clipping=self.max_grad_norm or 0.0,
            zero_force_ds_cpu_optimizer=False,
            zero_allow_untested_optimizer=True,
            steps_per_print=2**62,
        )
        self._limit_buckets(config, self.unwrapped)
        (optimizer,) = build(named_trainables(self.unwrapped))
        if self.plugin.zero_stage == 3 and next(linear_weights(self.unwrapped), None) is not None:
            self._shard_packed(self.unwrapped, config)
        self.accelerator.gradient_accumulation_steps = micro_batches
        self.model, wrapped = self.accelerator.prepare(model, optimizer)
        self.optimizers = [optimizer]
        self.zero = wrapped.optimizer

    def _shard_packed(self, model: Any, config: dict[str, Any]) -> None:
        """Shard a model with packed weights from host memory, one parameter after another: DeepSpeed would first move
        all of it to the device."""
        from deepspeed.runtime.zero import Init

        Init(module=model, dtype=torch.float32, config_dict_or_path=config)
        move_states(model, self.device)

    @staticmethod
    def _make_leaves(model: Any) -> None:
        """Mark modules whose weights stage 3 gathers once for all calls: a head with adapters is called once per chunk
        of positions, modules of a mixer once per document, and ranks have different numbers of both."""
        from deepspeed.utils import set_z3_leaf_module

        mixers = [module for module in model.modules() if is_mixer(module)]
        for module in (trained_head(model), *mixers):
            if next(module.children(), None) is not None:
                set_z3_leaf_module(module, True)
        for module in mixers:
            module.register_forward_pre_hook(with_positional_input, with_kwargs=True)

    @staticmethod
    def _limit_buckets(config: dict[str, Any], model: Any) -> None:
        """Limit buckets to the number of trained parameters: DeepSpeed allocates buffers for 5e8 gradients, 2 GB each
        in fp32 (two if it overlaps), also for adapters of a few million parameters."""
        trained = sum(full_shape(p).numel() for _, p in named_trainables(model))
        section = config.setdefault("zero_optimization", {})
        if isinstance(size := section.get("reduce_bucket_size", 500_000_000), int | float):
            section["reduce_bucket_size"] = min(int(size), trained)

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """Like FSDP2's under stage 3: weights are gathered once if all ranks have twice their memory, and DeepSpeed's
        hooks, which free each module's after its forward, are off meanwhile. Not for weights on NVMe.
        """
        parameters = [p for p in self.unwrapped.parameters() if hasattr(p, "ds_id")]
        swapped = any(p.ds_tensor.final_location == "nvme" for p in parameters)
        needed = sum(p.ds_numel * p.element_size() for p in parameters)
        if not parameters or swapped or not self.all_have_room(2 * needed):
            yield
            return
        from deepspeed.runtime.zero import unwrap_model_for_generation

        self.zero.parameter_offload.get_param_coordinator().reset_step()  # frees what the last forward prefetched
        with unwrap_model_for_generation(self.model):
            yield

    @property
    def gathers_in_forward(self) -> bool:
        return self.plugin.zero_stage == 3

    def backward(self, loss: Tensor) -> None:
        if self.loss_scale.enabled:
            self.zero.override_loss_scale(self.loss_scale.value)
        self.model.set_gradient_accumulation_boundary(self.last)
        self.model.backward(loss * self.world_size, scale_wrt_gas=False)  # DeepSpeed averages over ranks
        if not self.last:
            self.model.step()  # between boundaries: counts the micro-batch, updates nothing

    def step(self) -> float | None:
        self.model.step()
        norm = float("inf") if self.zero.overflow else float(self.model.get_global_grad_norm())
        if not self.loss_scale.enabled and not math.isfinite(norm):
            raise NonFinite("the gradient is not finite")
        return norm if self.loss_scale.update(norm) else None

    def gradients(self) -> list[Tensor]:
        """Returns gradients: flat pieces under stages 1 and 2, with offload those of the host's master weights; stage 3
        one buffer for all of them."""
        gradients = super().gradients()
        parts = getattr(self.zero, "single_partition_of_fp32_groups", ())
        gradients += [part.grad for part in parts if part.grad is not None]
        for group in self.zero.averaged_gradients.values():
            gradients += [group] if isinstance(group, Tensor) else [piece for piece in group or () if piece is not None]
        buffer = getattr(self.zero, "grad_partitions_flat_buffer", None)
        return gradients if buffer is None else [*gradients, buffer]

    def drop_gradients(self) -> None:
        """Drops gradients as DeepSpeed's step does after an overflow, and goes back to the first micro-batch of a
        step."""
        zero = self.zero
        zero.zero_grad(set_to_none=True)
        zero.reset_cpu_buffers()
        if self.plugin.zero_stage == 3:
            zero.averaged_gradients = {}
            return
        zero.averaged_gradients, zero.all_grad_tensors = {}, {}
        zero.micro_step_id = -1  # INITIAL_MICRO_STEP_ID; the next forward increments it

    # --- checkpoints and the result

    def parts(self, reading: bool) -> list[ShardPart]:
        """Returns ranges of parameters in DeepSpeed's flat fp32 groups, on NVMe in its swap files."""
        if not self.copies_state:
            _map_swapped_groups(self.zero)
        part_of = self._stage_3_part if self.plugin.zero_stage == 3 else self._flat_part
        parts = [part_of(name, parameter) for name, parameter in named_trainables(self.unwrapped)]
        return [part for part in parts if part is not None]

    def _flat_part(self, name: str, parameter: Any) -> ShardPart | None:
        """Returns the part of a parameter in this rank's flat range of a group, if any (stages 1 and 2)."""
        fragment = parameter._hp_mapping
        if fragment is None:
            return None
        stepped = self.zero.single_partition_of_fp32_groups[fragment.param_group_index]
        place, within = fragment.lp_fragment_address, fragment.hp_fragment_address
        return ShardPart(name, tuple(parameter.shape), place.start, place.numel, stepped, within.start)

    def _stage_3_part(self, name: str, parameter: Any) -> ShardPart | None:
        """Returns this rank's range of a parameter: equal on all ranks, padded at the end."""
        group, offset, _ = self.zero.grad_position[self.zero.get_param_id(parameter)]
        start = self.rank * parameter.ds_tensor.ds_numel
        numel = min(parameter.ds_tensor.ds_numel, parameter.ds_numel - start)
        stepped = self.zero.fp32_partitioned_groups_flat[group]
        return ShardPart(name, tuple(parameter.ds_shape), start, numel, stepped, offset) if numel > 0 else None

    @property
    def copies_state(self) -> bool:
        """Returns False for state on NVMe, which memory may not hold."""
        return not (self.plugin.zero_stage == 3 and self.zero.swap_optimizer)

    def make_room(self, owner: Optimizer, stepped: Tensor, types: Types) -> None:
        # Groups of less than a megabyte stay in memory.
        if not self.copies_state and self.zero.optimizer_swapper._get_param_swap_info(stepped) is not None:
            _create_swap_files(self.zero, owner, stepped, types)
        else:
            super().make_room(owner, stepped, types)

    def restored(self) -> None:
        """Updates the weights of the forward, copies of the fp32 groups."""
        if self.plugin.zero_stage != 3:
            self.zero.update_lp_params()
            return
        self.zero.empty_partition_cache()
        for group in range(len(self.zero.fp16_groups)):
            self.zero._reassign_or_swap_out_partitioned_parameters(group)
        if self.zero.persistent_parameters:
            self.zero.persistent_parameters[0].partition(self.zero.persistent_parameters)
            self.zero.persistent_parameters[0].all_gather(self.zero.persistent_parameters)

    def full_tensors(
        self, trainable_only: bool, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor | None]]:
        from deepspeed.runtime.zero import GatheredParameters

        if self.plugin.zero_stage == 3:
            # Gathered or in flight since the last forward, which prefetched them for a backward that did not run.
            self.zero.empty_partition_cache()
        for name, tensor in saved_tensors(self.unwrapped, trainable_only).items():
            sharded = [tensor] if hasattr(tensor, "ds_id") else []
            with GatheredParameters(sharded):
                full = detached(tensor, dtype).to("cpu", copy=True) if self.is_main else None
            yield name, full  # each device holds its shards again
            del full


def require_deepspeed() -> None:
    """Raises UserError with the install line if DeepSpeed is missing."""
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError("this accelerate config needs DeepSpeed: pip install 'deepspeed>=0.19'")


# --- optimizer state on NVMe
#
# Between steps DeepSpeed leaves a swapped group and its state without memory, each in a plain file. Mapped into memory,
# the file is the tensor: reading one pages it in, writing one writes the file, and neither takes memory that the kernel
# cannot reclaim. DeepSpeed's next swap-in replaces the mappings by its own buffers.


def _map_swapped_groups(zero: Any) -> None:
    """Give the swapped groups of a ZeRO-3 optimizer, and their state, their values."""
    for group in zero.fp32_partitioned_groups_flat:
        info = zero.optimizer_swapper._get_param_swap_info(group)
        for swapped in info.tensors if info else ():
            swapped.compute_tensor.data = _mapped(swapped.swap_path, info)


def _create_swap_files(zero: Any, owner: Optimizer, stepped: Tensor, fields: Iterable[str]) -> None:
    """Creates state before the first step: files that DeepSpeed would create at its end (its `_get_state_tensors`)."""
    swapper = zero.optimizer_swapper
    info = swapper._get_param_swap_info(stepped)
    for field in fields:
        path = Path(swapper.swap_folder) / f"{field}-{swapper.parameter_id(stepped)}.tensor.swp"
        path.touch()
        os.truncate(path, swapper._io_aligned_numel(info.numel()) * info.dtype().itemsize)
        owner.state[stepped][field] = _mapped(path, info)


def _mapped(path: str | Path, info: Any) -> Tensor:  # (numel,)
    return torch.from_file(str(path), shared=True, size=info.numel(), dtype=info.dtype())
