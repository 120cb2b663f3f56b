"""DeepSpeed ZeRO 1, 2 and 3, with offload of optimizer state and weights to CPU memory or NVMe."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.optim import Optimizer
from transformers import PretrainedConfig

from finetune.engine.base import BuildOptimizers, Engine, detached, named_trainables
from finetune.engine.launch import Launch
from finetune.engine.muon import muon_of
from finetune.engine.optimizer_step import NonFinite
from finetune.engine.state_shards import ShardPart, Types
from finetune.engine.zero_leaves import reduce_towers, set_leaves
from finetune.errors import UserError
from finetune.models.base_config import dtypes
from finetune.models.packed_linear import linear_weights, move_states
from finetune.models.stored_config import stored_format
from finetune.models.weights import Placement
from finetune.models.wrapped import WrappedModel
from finetune.recipe.schema import Recipe
from finetune.utils import full_shape


class Zero(Engine):
    """Wrapped by accelerate, then driven by DeepSpeed's own backward and step.

    DeepSpeed always runs its fp32 path: trained weights, gradients and state are fp32 there, and the compute type is
    autocast's inside the forward, as on every backend. The optimizer is torch's also under offload
    (`zero_force_ds_cpu_optimizer: false`): the same arithmetic, and nothing to compile.
    """

    def __init__(self, accelerator: Accelerator, launch: Launch, recipe: Recipe, config: PretrainedConfig):
        super().__init__(accelerator, launch, recipe, config)
        self.averaged_ranks = self.world_size
        self.plugin: Any = accelerator.state.deepspeed_plugin
        self.gathers_in_forward = self.is_stage_3 = self.plugin.zero_stage == 3
        kept = recipe.model.stored == "keep" and stored_format(config) is not None
        self._is_packed = recipe.quantization is not None or kept

    def placement(self, recipe: Recipe) -> Placement:
        if self.is_stage_3:
            return Placement("load", self.device if self._is_packed else None, packed_on=torch.device("cpu"))
        return Placement("load", self.device, direct=recipe.mode == "full" and self.device.type != "cpu")

    @contextlib.contextmanager
    def loading(self, recipe: Recipe) -> Iterator[None]:
        """Context manager for loading: under stage 3 transformers shards every model as it is created, so that no rank
        holds all of it.

        transformers does so in the config's compute type, which would be fp32: twice the memory for frozen weights.
        Random weights drawn in shards would depend on the number of ranks, rows of shards cannot be packed, and bytes
        of files are not read by transformers: these models are created in full on every rank, and sharded at wrap.
        """
        from transformers.integrations import unset_hf_deepspeed_config

        dora = recipe.lora is not None and recipe.lora.dora
        if self.is_stage_3 and dora and recipe.mode == "qlora" and self.device.type == "cpu":
            raise UserError(
                "`lora.dora` with `mode: qlora` cannot be rehearsed under ZeRO-3. On CPUs peft creates new 4-bit "
                "weights in every forward, which DeepSpeed does not know. Fix: use fsdp2, or set `lora.dora: false`"
            )
        half = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtypes(recipe).frozen)
        if recipe.mode == "lora" and half:
            self.plugin.deepspeed_config[half] = {"enabled": True}  # until `wrap`
            self.plugin.set_deepspeed_weakref()
        if recipe.model.config is not None or self._is_packed:
            unset_hf_deepspeed_config()
        try:
            yield
        finally:
            for kind in ("bf16", "fp16"):
                self.plugin.deepspeed_config[kind] = {"enabled": False}
            self.plugin.set_deepspeed_weakref()

    @contextlib.contextmanager
    def loading_whole(self) -> Iterator[None]:
        from transformers.integrations import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()  # or transformers shards it
        try:
            yield
        finally:
            self.plugin.set_deepspeed_weakref()

    def wrap(self, model: WrappedModel, build: BuildOptimizers, micro_batches: int) -> None:
        self.unwrapped = model.causal_lm
        self.find_overflows(model)
        set_leaves(self.unwrapped)
        self._trained = trained = named_trainables(self.unwrapped)
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
        # DeepSpeed allocates buffers for 5e8 gradients, 2 GB each in fp32 (two if it overlaps), also for adapters of a
        # few million parameters: limited to the number of trained parameters.
        section = config.setdefault("zero_optimization", {})
        if isinstance(size := section.get("reduce_bucket_size", 500_000_000), int | float):
            section["reduce_bucket_size"] = min(int(size), sum(full_shape(p).numel() for _, p in trained))
        optimizers = build(trained)
        optimizer = optimizers[0] if len(optimizers) == 1 else JoinedOptimizer(optimizers)
        if self.is_stage_3 and next(linear_weights(self.unwrapped), None) is not None:
            # Packed weights are sharded from host memory, one by one: DeepSpeed would first move all of them to the
            # device.
            from deepspeed.runtime.zero import Init

            Init(module=self.unwrapped, dtype=torch.float32, config_dict_or_path=config)
            move_states(self.unwrapped, self.device)
        self.accelerator.gradient_accumulation_steps = micro_batches
        self.model, wrapped = self.accelerator.prepare(model, optimizer)
        reduce_towers(self.unwrapped)
        self.optimizers = [optimizer]
        self.zero = wrapped.optimizer
        self.copies_state = not (self.is_stage_3 and self.zero.swap_optimizer)  # memory may not hold NVMe's
        if (muon := muon_of(optimizers)) is not None:
            zero, parts = self.zero, self.parts(reading=True)
            flats = zero.fp32_partitioned_groups_flat if self.is_stage_3 else zero.single_partition_of_fp32_groups
            batches = [(flat, [part for part in parts if part.stepped is flat]) for flat in flats]
            group = torch.distributed.group.WORLD if self.world_size > 1 else None
            muon.share(batches, group, self.device, self.stopwatch)

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

    def backward(self, loss: Tensor) -> None:
        if self.loss_scale.enabled:  # multiplies the loss, and `step` divides the averages over ranks by it
            self.zero.override_loss_scale(self.gradient_scale)
        self.model.set_gradient_accumulation_boundary(self.last)
        self.model.backward(loss * self.averaged_ranks, scale_wrt_gas=False)
        if not self.last:
            self.model.step()  # between boundaries: counts the micro-batch, updates nothing

    def step(self) -> float | None:
        if self.is_stage_3:
            self._check_reduced()
        self.model.step()
        norm = float("inf") if self.zero.overflow else float(self.model.get_global_grad_norm())
        if not self.loss_scale.enabled and not math.isfinite(norm):
            raise NonFinite("the gradient is not finite")
        return norm if self.loss_scale.update(norm) else None

    def _check_reduced(self) -> None:
        """Raises UserError if DeepSpeed left a gradient where autograd put it, and would step without it. Its hooks
        pass by a leaf module that returns a list, such as the attention of OpenAI-GPT."""
        if left := next((name for name, parameter in self._trained if parameter.grad is not None), None):
            raise UserError(
                f"{left}: ZeRO-3 cannot train this module. DeepSpeed's hooks do not reduce its gradient, and the step "
                "would be made without it. Fix: use another accelerate config, such as fsdp2 or ddp"
            )

    def gradients(self) -> list[Tensor]:
        """Returns gradients, also flat pieces (stages 1 and 2, with offload on the host) and stage 3's buffer."""
        gradients = super().gradients()
        parts = getattr(self.zero, "single_partition_of_fp32_groups", ())
        gradients += [part.grad for part in parts if part.grad is not None]
        for group in self.zero.averaged_gradients.values():
            gradients += [group] if isinstance(group, Tensor) else [piece for piece in group or () if piece is not None]
        buffer = getattr(self.zero, "grad_partitions_flat_buffer", None)
        return gradients if buffer is None else [*gradients, buffer]

    def drop_gradients(self) -> None:
        """Drops gradients as DeepSpeed's step does after an overflow, and goes back to the first micro-batch."""
        zero = self.zero
        zero.zero_grad(set_to_none=True)
        zero.reset_cpu_buffers()
        zero.averaged_gradients = {}
        if not self.is_stage_3:
            zero.all_grad_tensors = {}
            zero.micro_step_id = -1  # INITIAL_MICRO_STEP_ID; the next forward increments it

    # --- checkpoints and the result

    def parts(self, reading: bool) -> list[ShardPart]:
        """Returns ranges of parameters in DeepSpeed's flat fp32 groups, on NVMe in its swap files."""
        zero, parts = self.zero, list[ShardPart]()
        if not self.copies_state:
            for group in zero.fp32_partitioned_groups_flat:
                info = zero.optimizer_swapper._get_param_swap_info(group)
                for swapped in info.tensors if info else ():
                    swapped.compute_tensor.data = _mapped(swapped.swap_path, info)
        trained: Any = named_trainables(self.unwrapped)
        for name, parameter in trained:
            if self.is_stage_3:  # equal ranges on all ranks, padded at the end
                index, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
                start = self.rank * parameter.ds_tensor.ds_numel
                numel = min(parameter.ds_tensor.ds_numel, parameter.ds_numel - start)
                stepped, shape = zero.fp32_partitioned_groups_flat[index], parameter.ds_shape
            elif (fragment := parameter._hp_mapping) is not None:  # part of this rank's flat range of a group
                start, numel = fragment.lp_fragment_address.start, fragment.lp_fragment_address.numel
                offset, shape = fragment.hp_fragment_address.start, parameter.shape
                stepped = zero.single_partition_of_fp32_groups[fragment.param_group_index]
            else:
                continue
            if numel > 0:
                parts.append(ShardPart(name, tuple(shape), start, numel, stepped, offset))
        return parts

    def make_room(self, owner: Optimizer, stepped: Tensor, types: Types) -> None:
        swapper = self.zero.optimizer_swapper if not self.copies_state else None
        info: Any = swapper._get_param_swap_info(stepped) if swapper is not None else None
        if swapper is None or info is None:  # also on NVMe: groups of less than a megabyte stay in memory
            super().make_room(owner, stepped, types)
            return
        for field in types:  # the files that DeepSpeed would create at the end of the first step (`_get_state_tensors`)
            path = Path(swapper.swap_folder) / f"{field}-{swapper.parameter_id(stepped)}.tensor.swp"
            path.touch()
            os.truncate(path, swapper._io_aligned_numel(info.numel()) * info.dtype().itemsize)
            owner.state[stepped][field] = _mapped(path, info)

    def restored(self) -> None:
        """Updates the weights of the forward, copies of the fp32 groups."""
        if not self.is_stage_3:
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
        if self.is_stage_3:
            # Gathered or in flight since the last forward, which prefetched them for a backward that did not run.
            self.zero.empty_partition_cache()
        yield from super().full_tensors(trainable_only, dtype)

    def full_on_main(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor | None:
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([tensor] if hasattr(tensor, "ds_id") else []):
            return detached(tensor, dtype).to("cpu", copy=True) if self.is_main else None

    def close(self) -> None:
        """Release this run, and transformers' note of ZeRO-3, which lives as long as the plugin: the next recipe of
        this process builds a model of shapes before it starts its engine."""
        from transformers.integrations import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
        super().close()


class JoinedOptimizer(Optimizer):
    """Several optimizers as one, with the groups and the state of all: DeepSpeed takes one, and steps one group of it
    at a time."""

    def __init__(self, optimizers: list[Optimizer]):
        defaults = {name: value for optimizer in optimizers for name, value in optimizer.defaults.items()}
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], defaults)
        self._groups = [(optimizer, optimizer.param_groups) for optimizer in optimizers]
        for optimizer in optimizers:
            optimizer.state = self.state

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for optimizer, own in self._groups:
            optimizer.param_groups = [group for group in self.param_groups if any(group is one for one in own)]
            optimizer.step()


# --- optimizer state on NVMe
#
# Between steps DeepSpeed leaves a swapped group and its state without memory, each in a plain file. Mapped into memory,
# the file is the tensor: reading one pages it in, writing one writes the file, and neither takes memory that the kernel
# cannot reclaim. DeepSpeed's next swap-in replaces the mappings by its own buffers.


def _mapped(path: str | Path, info: Any) -> Tensor:  # (numel,)
    return torch.from_file(str(path), shared=True, size=info.numel(), dtype=info.dtype())
