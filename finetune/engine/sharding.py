"""A model cut into shards by torch's fully_shard, and filled from the one rank that read its weights.

    decoder layer   one unit each: gathered before its forward, let go of behind it
    embedding       a unit; where the head shares its weight, of the unit below
    norm and head   a unit, not let go of between forward and backward, which begins with it
    the rest        the root's

Units follow the model's own list of layers that are not to be split, or the accelerate config's wrap policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from finetune.errors import UserError


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


@dataclass(frozen=True)
class Weights:
    """All values of a model, on the rank that has them; on the others what they are called."""

    saved: dict[str, Tensor]  # its state dict; empty on the other ranks
    computed: dict[str, Tensor]  # by `module.attribute`: what a state dict lacks, such as rotary frequencies


def take_weights(model: Any, has_them: bool) -> Weights:
    """Move a model to `meta`; returns what it had, values on the rank that `has_them`, shapes on the others.

    Collective. Raises UserError on every rank where they do not have the same model.
    """
    state = model.state_dict(keep_vars=True)
    types = _agree(model, state)
    saved = {name: tensor.detach() for name, tensor in state.items()} if has_them else {}
    found = ((f"{path}.{name}", tensor) for path, name, tensor in _computed(model))
    computed = {name: tensor.to(types[name]) if tensor.is_meta else tensor for name, tensor in found}
    model.to("meta")
    model.tie_weights()  # moved one by one, tied weights have come apart
    return Weights(saved, computed)


def _computed(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """(path of a module, name, tensor) of what is in no state dict: buffers that are not saved, plain attributes."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name in module._non_persistent_buffers_set:
                yield path, name, buffer
        yield from ((path, name, value) for name, value in vars(module).items() if isinstance(value, Tensor))


_Listed = list[tuple[str, tuple[int, ...], torch.dtype]]


def _agree(model: Any, state: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    """Compare what every rank is going to send or take, before anything is sent; returns the type of each tensor.

    Only the rank that reads the weights knows which of them their code keeps in fp32: the others adopt its types.
    """
    ours = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()]
    ours += [(f"{path}.{name}", tuple(tensor.shape), tensor.dtype) for path, name, tensor in _computed(model)]
    theirs: list[Any] = [ours]
    dist.broadcast_object_list(theirs, src=0)
    differences: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(differences, _difference(ours, theirs[0]))
    for rank, difference in enumerate(differences):
        if difference is not None:
            raise UserError(
                f"FSDP2: the model that rank {rank} made from the config is not the one that rank 0 has read: "
                f"{difference}. Use ddp or zero3, where every rank reads the weights itself"
            )
    types = {name: dtype for name, _, dtype in theirs[0]}
    for name, tensor in state.items():
        if tensor.is_meta and tensor.dtype != types[name]:
            tensor.data = tensor.data.to(types[name])
    return types


def _difference(ours: _Listed, theirs: _Listed) -> str | None:
    """In names, their order, and shapes."""
    shapes = {name: shape for name, shape, _ in ours}
    for name, shape, _ in theirs:
        if name not in shapes:
            return f"it lacks `{name}` {list(shape)}"
        if shapes[name] != shape:
            return f"`{name}` is {list(shapes[name])}, not {list(shape)}"
    if additional := set(shapes) - {name for name, _, _ in theirs}:
        return f"it has `{min(additional)}` in addition"
    same_order = [name for name, *_ in ours] == [name for name, *_ in theirs]
    return None if same_order else "its tensors come in another order"


def fill(model: Any, weights: Weights, cuts: Mapping[str, Cut], device: torch.device) -> None:
    """Give every rank its shard of what rank 0 has taken; one tensor at a time is unsharded. Collective.

    cuts: of the parameters that tensor parallelism has cut before, by name.
    """
    filled: dict[str, Tensor] = {}
    known: dict[int, Tensor] = {}  # of tied weights, by what the model holds
    for name, held in model.state_dict(keep_vars=True).items():
        if id(held) not in known:
            whole = _broadcast(weights.saved.pop(name, None), held, cuts.get(name), device)
            known[id(held)] = _share(whole, held, cuts.get(name))
        filled[name] = known[id(held)]
    model.load_state_dict(filled, assign=True)
    model.tie_weights()
    for name, tensor in weights.computed.items():
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, _broadcast_bytes(tensor, device))


def _broadcast_bytes(own: Tensor, device: torch.device) -> Tensor:
    """Of any type: what is computed may be complex or a mask."""
    whole = torch.empty(own.shape, dtype=own.dtype, device=device) if own.is_meta else own.to(device)
    whole = whole.clone(memory_format=torch.contiguous_format)
    if whole.numel():
        dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
    return whole


def _broadcast(own: Tensor | None, held: Tensor, cut: Cut | None, device: torch.device) -> Tensor:
    shape = held.shape if cut is None else cut.whole(held.shape)
    whole = torch.empty(shape, dtype=held.dtype, device=device) if own is None else own.to(device, held.dtype)
    whole = whole.contiguous()
    dist.broadcast(whole, src=0)
    return whole


def _share(whole: Tensor, held: Tensor, cut: Cut | None) -> Tensor:
    """A copy of this rank's part, as `held` is laid out."""
    mine = whole if cut is None else cut.of(whole)
    if not isinstance(held, DTensor):
        return mine.clone()
    first, rows = first_row(held), held.to_local().shape[0]
    local = mine[first : first + rows].clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local, held.device_mesh, held.placements, run_check=False, shape=held.shape, stride=held.stride()
    )


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
