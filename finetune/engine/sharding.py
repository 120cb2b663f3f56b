"""A model cut into shards by torch's fully_shard, and filled from the one rank that read its weights.

    decoder layer   one unit each: gathered before its forward, let go of behind it
    embedding       a unit; where the head shares its weight, of the unit below
    norm and head   a unit, not let go of between forward and backward, which begins with it
    the rest        the root's

Units follow the model's own list of layers that are not to be split, or the accelerate config's wrap policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from finetune.engine.parallelism import Parallelism
from finetune.engine.tensor_parallel import Cut


@dataclass(frozen=True)
class Meshes:
    """Which ranks share a parameter. One dimension: shards; two: replicas of shards (HSDP)."""

    layers: DeviceMesh
    ends: DeviceMesh  # of embeddings, final norm and head, which tensor parallelism leaves whole: its ranks as well
    tensor: DeviceMesh | None  # the ranks that hold other columns of a layer's matrices


def device_meshes(parallelism: Parallelism, device_type: str) -> Meshes:
    """Of the process group. Ranks that share the tokens of a row hold other shards, like those with other rows."""
    sharing = parallelism.shard * parallelism.tokens
    grid = _grid(parallelism, device_type, sharing, parallelism.tensor)
    if parallelism.tensor == 1:
        return Meshes(_of_data(grid), _of_data(grid), None)
    ends = _grid(parallelism, device_type, sharing * parallelism.tensor, 1)
    return Meshes(_of_data(grid), _of_data(ends), grid["tensor"])


def _grid(parallelism: Parallelism, device_type: str, shard: int, tensor: int) -> DeviceMesh:
    """Of all ranks."""
    sizes = {"pipeline": parallelism.pipeline, "replicate": parallelism.replicate, "shard": shard, "tensor": tensor}
    used = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh(device_type, tuple(used.values()), mesh_dim_names=tuple(used))


def _of_data(grid: DeviceMesh) -> DeviceMesh:
    """This rank's replicas x shards."""
    return grid["replicate", "shard"] if "replicate" in (grid.mesh_dim_names or ()) else grid["shard"]


@dataclass(frozen=True)
class Sharding:
    """How units are sharded."""

    meshes: Meshes
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    reshard: bool | int  # a layer's weights, after its forward

    def options(self, mesh: DeviceMesh) -> dict[str, Any]:
        return {"mesh": mesh, "mp_policy": self.precision, "offload_policy": self.offload}


def shard(
    model: Any, units: list[nn.Module], how: Sharding, elsewhere: Mapping[nn.Module, DeviceMesh] | None = None
) -> None:
    """Cut every parameter of a model, in place; its forward gathers them.

    units: decoder layers, inner ones first. elsewhere: modules in them that are shared over other ranks than the rest,
    each a unit of its own.
    """
    for module, mesh in (elsewhere or {}).items():
        fully_shard(module, **how.options(mesh), reshard_after_forward=how.reshard)
    for module in units:
        fully_shard(module, **how.options(how.meshes.layers), reshard_after_forward=how.reshard)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tail = [final_norm(model), head]
    if _shares_weight(embedding, head):
        tail.insert(0, embedding)  # the first of them to run gathers all
    else:
        fully_shard(embedding, **how.options(how.meshes.ends), reshard_after_forward=how.reshard)
    fully_shard(
        [module for module in tail if module is not None], **how.options(how.meshes.ends), reshard_after_forward=False
    )
    fully_shard(model, **how.options(how.meshes.layers))


def _shares_weight(embedding: Any, head: Any) -> bool:
    ours = {id(parameter) for parameter in embedding.parameters()}
    return any(id(parameter) in ours for parameter in head.parameters())


def final_norm(model: Any) -> nn.Module | None:
    """The norm before the head: the last one that the base model holds directly."""
    causal = model.get_base_model() if hasattr(model, "peft_config") else model
    norms = [module for _, module in causal.base_model.named_children() if "Norm" in type(module).__name__]
    return norms[-1] if norms else None


def units_of(model: Any, plugin: Any) -> list[nn.Module]:
    """Modules to shard one by one, inner ones first. plugin: accelerate's, which knows the config's wrap policy."""
    plugin.set_auto_wrap_policy(model)
    policy = plugin.auto_wrap_policy
    if policy is None:
        return []
    inside = [module for module in model.modules() if module is not model]
    return [module for module in reversed(inside) if policy(module, recurse=False, nonwrapped_numel=_numel(module))]


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# --- filling

Weights = dict[str, Tensor]


def take_weights(model: Any, has_them: bool) -> Weights:
    """Move a model to `meta` and return what it held: all on the rank that `has_them`, nothing on the others.

    Buffers that are not saved stay as they are: every rank has made its own.
    """
    weights = model.state_dict() if has_them else {}
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set
    ]
    model.to("meta")
    model.tie_weights()  # moved one by one, tied weights have come apart
    for module, name, buffer in buffers:
        module.register_buffer(name, buffer, persistent=False)
    return weights


def fill(
    model: Any, weights: Weights, cuts: Mapping[str, Cut], device: torch.device, shard_device: torch.device
) -> None:
    """Give every rank its shard of what rank 0 has taken; one tensor at a time is whole. Collective.

    cuts: of the parameters that tensor parallelism has cut before, by name. device: where a whole tensor is
    communicated. shard_device: where shards stay, the CPU where they are offloaded. FSDP2 would move them there itself,
    but only the local tensor within a DTensor, which then says another device than it is on.
    """
    filled: dict[str, Tensor] = {}
    known: dict[int, Tensor] = {}  # of tied weights, by what the model holds
    for name, held in model.state_dict(keep_vars=True).items():
        if id(held) not in known:
            whole = _broadcast(weights.pop(name, None), held, cuts.get(name), device)
            known[id(held)] = _share(whole, held, cuts.get(name), shard_device)
        filled[name] = known[id(held)]
    model.load_state_dict(filled, assign=True)
    model.tie_weights()


def _broadcast(own: Tensor | None, held: Tensor, cut: Cut | None, device: torch.device) -> Tensor:
    shape = held.shape if cut is None else cut.whole(held.shape)
    whole = torch.empty(shape, dtype=held.dtype, device=device) if own is None else own.to(device, held.dtype)
    whole = whole.contiguous()
    dist.broadcast(whole, src=0)
    return whole


def _share(whole: Tensor, held: Tensor, cut: Cut | None, shard_device: torch.device) -> Tensor:
    """A copy of this rank's part, as `held` is laid out."""
    mine = whole if cut is None else cut.of(whole)
    if not isinstance(held, DTensor):
        return mine.clone()
    first, rows = first_row(held), held.to_local().shape[0]
    local = mine.narrow(0, first if rows else 0, rows).clone(memory_format=torch.contiguous_format)
    part = DTensor.from_local(
        local, held.device_mesh, held.placements, run_check=False, shape=held.shape, stride=held.stride()
    )
    return part.to(shard_device)  # from_local itself puts it on the mesh's device


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a shard. Collective. One dimension of ranks after the other: `full_tensor` warns where shards lie
    in shards, as those of divided experts do."""
    while isinstance(tensor, DTensor):
        left = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
        if not left:
            return tensor.to_local()
        placements = [Replicate() if dim == left[0] else p for dim, p in enumerate(tensor.placements)]
        tensor = tensor.redistribute(placements=placements)
    return tensor


def first_row(parameter: Tensor) -> int:
    """Of this rank's shard, in what the ranks of its mesh share."""
    if not isinstance(parameter, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0]
