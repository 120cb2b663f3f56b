"""Expert parallel under fully_shard: which rank holds which experts, and over whom they are sharded.

    4 ranks in one shard group, expert 2, 8 experts      rank      0         1         2         3
    divided over neighbours                              experts   0 1 2 3   4 5 6 7   0 1 2 3   4 5 6 7
    those of ranks 0 and 2 are sharded over these two    shard     0 1       4 5       2 3       6 7

A parameter is a DTensor over both dimensions of ranks, so its name, shape and rows are those of the whole: checkpoints
and results need to know nothing of this. Its gradient is reduced over the ranks that hold the same experts, and comes
from the tokens of all (`AllToAll.weight`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from finetune.engine.all_to_all import AllToAll
from finetune.engine.parallelism import Parallelism
from finetune.engine.stopwatch import Stopwatch
from finetune.models.experts import dispatch_tokens, experts_of


def divide_experts(
    model: Any, parallelism: Parallelism, device_type: str, stopwatch: Stopwatch
) -> dict[nn.Module, DeviceMesh]:
    """Leave each rank the experts that it holds, and let tokens travel. Before the model is sharded; collective.

    Returns the mesh over which each module of experts is to be sharded: the ranks that hold the same ones. Nothing
    where experts are not divided. Raises UserError for a model whose experts cannot be.
    """
    if parallelism.expert == 1:
        return {}
    sizes = {"replicate": parallelism.replicate, "same": parallelism.shard // parallelism.expert}
    grid = init_device_mesh(device_type, (*sizes.values(), parallelism.expert), mesh_dim_names=(*sizes, "expert"))
    holders, same = grid["expert"], grid["replicate", "same"] if parallelism.replicate > 1 else grid["same"]
    found = experts_of(model)
    for experts in found.values():
        for name, weight in list(experts.named_parameters(recurse=False)):
            held = nn.Parameter(_held(weight.detach(), holders), weight.requires_grad)
            experts.register_parameter(name, held)
        dispatch_tokens(experts, AllToAll(holders.get_group(), stopwatch))
    return dict.fromkeys(found.values(), same)


def _held(weight: Tensor, holders: DeviceMesh) -> DTensor:  # (E, ...), of which E/P rows are here
    rows = weight.shape[0] // holders.size()
    local = weight.narrow(0, holders.get_local_rank() * rows, rows).clone()
    return DTensor.from_local(local, holders, [Shard(0)], run_check=False, shape=weight.shape, stride=weight.stride())
