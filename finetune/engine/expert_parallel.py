"""Expert parallel under fully_shard: placement of experts on ranks, their sharding, and the
all-to-all of tokens between them.

    4 ranks in one shard group, expert 2, 8 experts        rank      0         1         2         3
    expert parallel: neighbours have different experts     experts   0 1 2 3   4 5 6 7   0 1 2 3   4 5 6 7
    those of ranks 0 and 2 are sharded over these two      shard     0 1       4 5       2 3       6 7

A parameter is a DTensor over both mesh dimensions, so its name, shape and rows are those of all experts: checkpoints
and results need no special case. Its gradient is reduced over the ranks with the same experts, and comes from
the tokens of all ranks (`AllToAll.weight`). Adapters on experts are parameters like those of other layers: sharded over
all ranks and gathered with their decoder layer; a rank has gradients for its own experts only.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from finetune.engine.parallelism import Parallelism
from finetune.engine.timing import Stopwatch
from finetune.models.moe import adapters_of, dispatch_tokens, experts_of


def parallelize_experts(
    model: Any, parallelism: Parallelism, device_type: str, stopwatch: Stopwatch, here: Container[nn.Module]
) -> dict[nn.Module, DeviceMesh]:
    """Keep each rank's own experts, and dispatch tokens to them. Call before the model is sharded; collective.

    here: modules of this rank's pipeline stages, or of the model. Returns, for each module of experts, the mesh over
    which it must be sharded (ranks with equal experts); {} without expert parallel. Raises UserError for a model whose
    experts are not supported.
    """
    if parallelism.expert == 1:
        return {}
    sizes = {"pipeline": parallelism.pipeline, "replicate": parallelism.replicate}
    sizes |= {"same": parallelism.shard // parallelism.expert, "expert": parallelism.expert}
    grid = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    mesh, same_experts = grid["expert"], grid["replicate", "same"] if parallelism.replicate > 1 else grid["same"]
    modules = {path: module for path, module in experts_of(model).items() if module in here}
    for path, experts in modules.items():
        for name, weight in list(experts.named_parameters(recurse=False)):
            rows = weight.shape[0] // mesh.size()
            own = weight.detach().narrow(0, mesh.get_local_rank() * rows, rows).clone()
            size = {"shape": weight.shape, "stride": weight.stride()}  # (E, ...)
            sharded = DTensor.from_local(own, mesh, [Shard(0)], run_check=False, **size)
            experts.register_parameter(name, nn.Parameter(sharded, weight.requires_grad))
        first = mesh.get_local_rank() * (experts.num_experts // mesh.size())
        dispatch_tokens(experts, AllToAll(mesh.get_group(), stopwatch), adapters_of(model, path), first)
    return dict.fromkeys(modules.values(), same_experts)


class AllToAll:
    """An `Exchange` (models/moe.py) over a process group."""

    def __init__(self, group: ProcessGroup, stopwatch: Stopwatch):
        self.size, self._group, self._stopwatch = group.size(), group, stopwatch

    def weight(self, stacked: Any) -> Tensor:
        """Scales gradients. FSDP averages over a `size`-th of the ranks, and these come from the tokens of `size`
        ranks: divided by `size`, they are averages over all ranks, like those of the rest of the model."""
        local = stacked.to_local()
        if local.requires_grad:
            local.register_hook(lambda gradient: gradient / self.size)
        return local

    def counts(self, leaving: Tensor) -> tuple[Tensor, list[int], list[int]]:
        arriving = torch.empty_like(leaving)
        with self._stopwatch.waiting():
            torch.distributed.all_to_all_single(arriving, leaving, group=self._group)
        sent, received = torch.stack([leaving.sum(1), arriving.sum(1)]).tolist()  # waits, once
        return arriving, sent, received

    def rows(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        # torch's stubs have no type for `apply`.
        return _TokenExchange.apply(rows, sent, received, self._group, self._stopwatch)  # pyright: ignore[reportReturnType]


class _TokenExchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup, stopwatch: Stopwatch
    ) -> Tensor:
        ctx.inverse = (received, sent, group, stopwatch)
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        with stopwatch.waiting():
            torch.distributed.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _TokenExchange.apply(*gradients, *ctx.inverse), None, None, None, None
