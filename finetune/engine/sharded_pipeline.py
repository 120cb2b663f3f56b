"""Pipeline parallel with shards in its stages: the ranks of a stage share its weights, as FSDP2's ranks share those of
a model, the columns of its matrices (tensor parallel), or the tokens of its rows.

    stage 0                        stage 1                         processes = pipeline 2 x shard 2 x tensor 2
    ranks 0 1 2 3                  ranks 4 5 6 7
    shard 0: 0 1   shard 1: 2 3    shard 0: 4 5   shard 1: 6 7     tensor ranks are neighbours
    rank 0 ----- hidden states ---> rank 4                         each to the rank with its place in the next stage

How often a stage's weights travel is FSDP's own key in the accelerate config, `fsdp_reshard_after_forward`:

    false    gathered once a step and kept until its last backward, gradients summed unsharded and reduced once
    true     gathered for each forward and each backward of a layer, gradients reduced after each micro-batch

(ZeRO 1 and ZeRO 3 of a stage: Rajbhandari et al. 2019, https://arxiv.org/abs/1910.02054.) The former sends as much for
any number of micro-batches, the latter keeps the least.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from finetune.engine.base import BuildOptimizers, Forward, Loss, NamedTensors, T, detached
from finetune.engine.fsdp2 import Fsdp2
from finetune.engine.pipeline import CalledStage, Pipeline
from finetune.engine.ranks import group_over
from finetune.engine.sharding import ReadingRank, Sharding, fill_shards, local_tensor, shard_layers, take_weights
from finetune.engine.stages import StageModel, parts_of
from finetune.engine.tensor_packed import shard_scales
from finetune.models.packed_linear import make_plain
from finetune.models.weights import Placement
from finetune.models.wrapped import WrappedModel
from finetune.recipe.schema import Recipe


class ShardedPipeline(Fsdp2, Pipeline):
    """Schedules and relays of `Pipeline`; shards, steps and checkpoints of `Fsdp2`, here of the ranks of a stage."""

    def placement(self, recipe: Recipe) -> Placement:
        """Returns host memory of the first rank of each stage: it reads the stage's layers for the others."""
        reads = self.rank == self.first_of_stage or not self._rank_0_reads
        layers = self._layout.layers_of(self.place)
        return Placement("load" if reads else "meta", self.device, layers, packed_on=torch.device("cpu"))

    def wrap(self, model: WrappedModel, build: BuildOptimizers, micro_batches: int) -> None:
        make_plain(model.causal_lm)
        shares = self._rank_0_reads and self.ranks_of_stage > 1  # a rank that has a stage alone reads for itself
        self.keep_stages(model, torch.device("cpu") if shares else self.device)
        weights, causal_lm = None, self.unwrapped
        if shares:
            stage = group_over(("replicate", "shard", "context", "sequence", "tensor"), self.parallelism, self.rank)
            is_source = self.rank == self.first_of_stage
            weights = take_weights(causal_lm, is_source, ReadingRank(self.first_of_stage, stage))
        here = {module for called in self._stages for module in called.modules()}
        tied = self.tied_names(here)
        sharding, units, expert_meshes = self.split(causal_lm, here)
        self._freed = [
            module for called in self._stages for module in self.shard_stage(called, units, sharding, expert_meshes)
        ]
        self._roots = list(self._stages)
        self._tie(tied)
        if weights is not None:
            fill_shards(causal_lm, weights, self._sharded.shards, self.device, sharding.device(self.device))
            self._tie(tied)
        shard_scales(causal_lm, self._sharded.shards)
        self.build_over_shards(build)
        self.find_overflows(model)

    def trained_here(self) -> NamedTensors:
        """Those of this rank's stages: others are on `meta`."""
        return self._trained()

    @property
    def first_of_stage(self) -> int:
        return self.place * self.ranks_of_stage

    def shard_stage(
        self,
        called: CalledStage,
        units: list[nn.Module],
        sharding: Sharding,
        expert_meshes: dict[nn.Module, DeviceMesh],
    ) -> list[nn.Module]:
        """Shard a stage. Returns the modules whose gathered parameters are freed after their forward.

        Each layer is a unit, so is the embedding, and norm and head together; `called` is the root.
        """
        options = sharding.options(sharding.meshes.shards)
        own, stage = set(called.modules()), called.stage
        mine = [unit for unit in units if unit in own]
        experts = {module: mesh for module, mesh in expert_meshes.items() if module in own}
        shard_layers(mine, sharding, experts)
        parts = parts_of(self.unwrapped, self._layout, stage.index)[len(self._layout.layers(stage.index)) :]
        first, last = (parts[:1] if stage.index == 0 else []), (parts[-2:] if stage.is_last else [])
        if first:
            fully_shard(first[0], **options, reshard_after_forward=sharding.reshard)
        if last:
            fully_shard(last, **options, reshard_after_forward=False)
        fully_shard(called, **options, reshard_after_forward=sharding.reshard)
        return [*experts, *mine, *first] if sharding.reshard is True else []

    def tied_names(self, here: Set[nn.Module]) -> list[tuple[str, list[str]]]:
        """Returns, for each parameter of this rank with several names, that of a stage's module, and the others."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.unwrapped.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        tied = []
        for several in (each for each in names.values() if len(each) > 1):
            own = [name for name in several if self.unwrapped.get_submodule(name.rpartition(".")[0]) in here]
            tied += [(own[0], [name for name in several if name != own[0]])] if own else []
        return tied

    def _tie(self, tied: list[tuple[str, list[str]]]) -> None:
        for name, others in tied:
            parameter = self.unwrapped.get_parameter(name)
            for other in others:
                module, _, own = other.rpartition(".")
                self.unwrapped.get_submodule(module)._parameters[own] = parameter

    # --- a step

    def accumulate(self, batches: Sequence[T], forward: Forward[T], loss: Loss[T]) -> None:
        """Begins with shards on all ranks of a stage: a schedule of torch that is new frees what an evaluation has left
        gathered, and the pipelines of these ranks get new ones in different steps, as their rows are longer."""
        self.free_gathered()
        super().accumulate(batches, forward, loss)

    def scheduled_module(self, stage: CalledStage) -> nn.Module:
        """Returns a module by which torch's schedule sees FSDP2, and reduces once, or does not."""
        return _OneByOne(stage) if self.launch.frees_gathered else stage

    def run_scheduled(self, stage: StageModel, received: Tensor | None, index: int) -> Tensor:
        """As `Pipeline`, but never a view, as layers of tensor parallel return one: FSDP2 hooks what a stage returns,
        and torch warns that an operation in place on a view would drop the hook."""
        return super().run_scheduled(stage, received, index).clone()

    def reduce_gradients(self) -> None:
        named = [(name, p.grad) for name, p, _ in self._shards if p.grad is not None]
        self.sum_ends([(name, local_tensor(gradient)) for name, gradient in named])

    def _counts(self, name: str) -> bool:
        return super()._counts(name) and self._holders[name][0] == self.place

    def knows_waits(self, compiles: bool) -> bool:
        """False: shards are gathered in the time in which a stage computes."""
        return False

    # --- the result

    def full_on_main(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor | None:
        """Returns the tensor on rank 0, sent by the first rank of its stage, all of which gather it."""
        source = self._savers[name]
        if self.place == source:
            full = self.gathered(name, tensor, dtype)
            if self.rank == self.first_of_stage != 0:
                dist.send(full.contiguous(), 0)
            return full.cpu() if self.is_main else None
        if not self.is_main:
            return None
        shard = self._sharded.shards.get(name)
        shape = tensor.shape if shard is None else shard.full_shape(tensor.shape)
        full = torch.empty(shape, dtype=detached(tensor, dtype).dtype, device=self.device)
        dist.recv(full, source * self.ranks_of_stage)
        return full.cpu()


class _OneByOne(nn.Module):
    """Hides FSDP2 from torch's schedule, which would gather once and reduce at the end."""

    def __init__(self, stage: CalledStage):
        super().__init__()
        self.stage = stage

    def forward(self, received: Tensor, of: Tensor) -> Any:
        return self.stage(received, of)
