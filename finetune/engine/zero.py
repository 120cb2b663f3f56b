"""DeepSpeed ZeRO 1, 2 and 3, with offload of optimizer state and weights to CPU memory or NVMe."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from finetune.engine.base import BuildOptimizers, Engine, in_type, named_trainables, saved_tensors
from finetune.engine.nvme import is_swapped, make_files, map_groups
from finetune.engine.parts import Part, Types
from finetune.engine.precision import NonFinite
from finetune.errors import UserError
from finetune.models.head import loss_module
from finetune.models.weights import Placement, dtypes
from finetune.recipe.schema import Recipe


class Zero(Engine):
    """Driven through accelerate's wrapping, then by DeepSpeed's own backward and step.

    DeepSpeed is always in its fp32 path: what is trained, its gradients and its state are fp32 there, and the compute
    type is autocast's inside the forward, as on every backend. The optimizer is torch's also under offload
    (`zero_force_ds_cpu_optimizer: false`): the same arithmetic, and nothing to compile.
    """

    @property
    def plugin(self) -> Any:
        return self.accelerator.state.deepspeed_plugin

    def placement(self, recipe: Recipe) -> Placement:
        if self.plugin.zero_stage == 3:
            return Placement("load", None)
        return Placement("load", self.device, direct=recipe.mode == "full" and self.device.type != "cpu")

    @contextlib.contextmanager
    def loading(self, recipe: Recipe) -> Iterator[None]:
        """Under stage 3 transformers shards every model while it is made, so that no rank holds the whole.

        It makes them in the type that the config computes in, which would be fp32: frozen weights would take twice
        their memory. Random weights drawn in shards would depend on the number of ranks: these are made whole on every
        rank, and sharded at wrap.
        """
        from transformers.integrations import unset_hf_deepspeed_config

        stage_3, dora = self.plugin.zero_stage == 3, recipe.lora is not None and recipe.lora.dora
        if stage_3 and dora and recipe.mode == "qlora" and self.device.type == "cpu":
            raise UserError(
                "`lora.dora` with `mode: qlora` cannot be rehearsed under ZeRO-3: on CPUs peft puts new 4-bit weights "
                "in place in every forward, which DeepSpeed does not know: use fsdp2, or set `lora.dora: false`"
            )
        half = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtypes(recipe).frozen)
        if recipe.mode == "lora" and half:
            self.plugin.deepspeed_config[half] = {"enabled": True}  # until `wrap`
            self.plugin.set_deepspeed_weakref()
        if recipe.model.config is not None:
            unset_hf_deepspeed_config()
        try:
            yield
        finally:
            for kind in ("bf16", "fp16"):
                self.plugin.deepspeed_config[kind] = {"enabled": False}
            self.plugin.set_deepspeed_weakref()

    def wrap(self, model: Any, build: BuildOptimizers, micro_batches: int) -> None:
        self.unwrapped = model
        self._gather_head_whole(model)
        config = self.plugin.deepspeed_config
        config.update(
            train_micro_batch_size_per_gpu=1,  # rows are ours; DeepSpeed only checks that the product fits
            gradient_accumulation_steps=micro_batches,  # of no effect: `backward` says where a step ends
            train_batch_size=micro_batches * self.world_size,
            gradient_clipping=self.max_grad_norm or 0.0,
            zero_force_ds_cpu_optimizer=False,
            zero_allow_untested_optimizer=True,
            steps_per_print=2**62,
        )
        self._fit_buckets(config, model)
        (optimizer,) = build(named_trainables(model))
        self.accelerator.gradient_accumulation_steps = micro_batches
        self.model, wrapped = self.accelerator.prepare(model, optimizer)
        self.optimizers = [optimizer]
        self.zero = wrapped.optimizer

    def _gather_head_whole(self, model: Any) -> None:
        """A head with adapters is called once for each chunk of positions: stage 3 shall gather the weights below it
        once for all of them."""
        from deepspeed.utils import set_z3_leaf_module

        head = loss_module(model)
        if next(head.children(), None) is not None:
            set_z3_leaf_module(head, True)

    @staticmethod
    def _fit_buckets(config: dict[str, Any], model: Any) -> None:
        """DeepSpeed makes buffers for 5e8 gradients, 2 GB each in fp32 and two of them where it overlaps, also for
        adapters of a few million: no larger than all there are. The buckets themselves stay what they were."""
        trained = sum(getattr(p, "ds_numel", p.numel()) for _, p in named_trainables(model))
        section = config.setdefault("zero_optimization", {})
        if isinstance(size := section.get("reduce_bucket_size", 500_000_000), int | float):
            section["reduce_bucket_size"] = min(int(size), trained)

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
        """Stages 1 and 2 build flat pieces of them, stage 3 has one buffer for all."""
        found = super().gradients()
        for group in self.zero.averaged_gradients.values():
            found += [group] if isinstance(group, Tensor) else [piece for piece in group or () if piece is not None]
        buffer = getattr(self.zero, "grad_partitions_flat_buffer", None)
        return found if buffer is None else [*found, buffer]

    def drop_gradients(self) -> None:
        """As DeepSpeed's own step does where a gradient overflowed, and back to the first micro-batch of a step."""
        zero = self.zero
        zero.zero_grad(set_to_none=True)
        zero.reset_cpu_buffers()
        if self.plugin.zero_stage == 3:
            zero.averaged_gradients = {}
            return
        zero.averaged_gradients, zero.all_grad_tensors = {}, {}
        zero.micro_step_id = -1  # INITIAL_MICRO_STEP_ID; the next forward counts it up

    def parts(self, reading: bool) -> list[Part]:
        """Ranges of parameters in DeepSpeed's flat fp32 groups, on NVMe in its swap files."""
        if not self.copies_state:
            map_groups(self.zero)
        find = self._sharded_part if self.plugin.zero_stage == 3 else self._flat_part
        found = [find(name, parameter) for name, parameter in named_trainables(self.unwrapped)]
        return [part for part in found if part is not None]

    def _flat_part(self, name: str, parameter: Any) -> Part | None:
        """Stages 1 and 2: the group's flat range on this rank may hold a piece of the parameter."""
        fragment = parameter._hp_mapping
        if fragment is None:
            return None
        stepped = self.zero.single_partition_of_fp32_groups[fragment.param_group_index]
        place, within = fragment.lp_fragment_address, fragment.hp_fragment_address
        return Part(name, tuple(parameter.shape), place.start, place.numel, stepped, within.start)

    def _sharded_part(self, name: str, parameter: Any) -> Part | None:
        """Stage 3: every rank has an equal range, padded at the end."""
        group, offset, _ = self.zero.grad_position[self.zero.get_param_id(parameter)]
        start = self.rank * parameter.ds_tensor.ds_numel
        numel = min(parameter.ds_tensor.ds_numel, parameter.ds_numel - start)
        stepped = self.zero.fp32_partitioned_groups_flat[group]
        return Part(name, tuple(parameter.ds_shape), start, numel, stepped, offset) if numel > 0 else None

    @property
    def copies_state(self) -> bool:
        """Not what is on NVMe because memory does not hold it."""
        return not (self.plugin.zero_stage == 3 and self.zero.swap_optimizer)

    def make_room(self, owner: Optimizer, stepped: Tensor, types: Types) -> None:
        if not self.copies_state and is_swapped(self.zero, stepped):
            make_files(self.zero, owner, stepped, types)
        else:
            super().make_room(owner, stepped, types)

    def restored(self) -> None:
        """The weights of the forward are copies of the fp32 groups."""
        if self.plugin.zero_stage != 3:
            self.zero.update_lp_params()
            return
        for group in range(len(self.zero.fp16_groups)):
            self.zero._reassign_or_swap_out_partitioned_parameters(group)
        if self.zero.persistent_parameters:
            self.zero.persistent_parameters[0].partition(self.zero.persistent_parameters)
            self.zero.persistent_parameters[0].all_gather(self.zero.persistent_parameters)

    def full_tensors(
        self, trainable_only: bool, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor | None]]:
        from deepspeed.runtime.zero import GatheredParameters

        for name, tensor in saved_tensors(self.unwrapped, trainable_only).items():
            sharded = [tensor] if hasattr(tensor, "ds_id") else []
            with GatheredParameters(sharded):
                whole = in_type(tensor, dtype).to("cpu", copy=True) if self.is_main else None
            yield name, whole  # the devices hold their parts again
            del whole


def require_deepspeed() -> None:
    """Raises UserError with the install line where DeepSpeed is missing."""
    import importlib.util

    if importlib.util.find_spec("deepspeed") is None:
        raise UserError("this accelerate config needs DeepSpeed: pip install 'deepspeed>=0.19'")
