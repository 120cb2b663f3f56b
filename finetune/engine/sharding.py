"""A model sharded by torch's fully_shard, and filled from the one rank that loaded its weights.

    decoder layer   one unit each: gathered before its forward, freed after it
    embedding       a unit; part of the next unit if the head shares its weight
    norm and head   a unit, not freed between forward and backward, which begins with it
    the rest        the root's

Units follow the model's own list of layers that must not be split, or the accelerate config's wrap policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from finetune.engine.parallelism import Parallelism
from finetune.engine.state_shards import ShardPart
from finetune.engine.tensor_parallel import ParameterShard
from finetune.errors import UserError
from finetune.models.packed_linear import state_tensors
from finetune.models.wrapped import WrappedModel, output_head
from finetune.utils import unwrap_peft


@dataclass(frozen=True)
class Meshes:
    """The ranks that share a parameter. One dimension: shards; two: replicas of shards (HSDP)."""

    layers: DeviceMesh
    ends: DeviceMesh  # for embeddings, final norm and head: not tensor parallel, so also over those ranks
    tensor: DeviceMesh | None  # ranks with other columns of a layer's matrices


def device_meshes(parallelism: Parallelism, device_type: str) -> Meshes:
    """Returns the meshes of this rank. Ranks that share the tokens of a row have different shards, as do those with
    different rows."""
    sharing = parallelism.shard * parallelism.tokens
    grid = _grid(parallelism, device_type, sharing, parallelism.tensor)
    if parallelism.tensor == 1:
        return Meshes(_data_mesh(grid), _data_mesh(grid), None)
    ends = _grid(parallelism, device_type, sharing * parallelism.tensor, 1)
    return Meshes(_data_mesh(grid), _data_mesh(ends), grid["tensor"])


def _grid(parallelism: Parallelism, device_type: str, shard: int, tensor: int) -> DeviceMesh:
    """Returns a mesh of all ranks."""
    sizes = {"pipeline": parallelism.pipeline, "replicate": parallelism.replicate, "shard": shard, "tensor": tensor}
    used = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh(device_type, tuple(used.values()), mesh_dim_names=tuple(used))


def _data_mesh(grid: DeviceMesh) -> DeviceMesh:
    """Returns this rank's replicas x shards."""
    return grid["replicate", "shard"] if "replicate" in (grid.mesh_dim_names or ()) else grid["shard"]


@dataclass(frozen=True)
class Sharding:
    """Options for sharding units."""

    meshes: Meshes
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    reshard: bool | int  # free a layer's weights after its forward

    def options(self, mesh: DeviceMesh) -> dict[str, Any]:
        return {"mesh": mesh, "mp_policy": self.precision, "offload_policy": self.offload}


def shard_model(
    model: WrappedModel,
    units: list[nn.Module],
    sharding: Sharding,
    expert_meshes: Mapping[nn.Module, DeviceMesh] | None = None,
) -> list[nn.Module]:
    """Shard every parameter of a model, in place; its forward gathers them. Returns the modules whose gathered
    parameters are freed after their forward, if the config says so.

    units: decoder layers, inner ones first. expert_meshes: modules in them that are sharded over other ranks, each a
    separate unit.
    """
    for module, mesh in (expert_meshes or {}).items():
        fully_shard(module, **sharding.options(mesh), reshard_after_forward=sharding.reshard)
    layers, ends = sharding.options(sharding.meshes.layers), sharding.options(sharding.meshes.ends)
    for module in units:
        fully_shard(module, **layers, reshard_after_forward=sharding.reshard)
    causal_lm = model.causal_lm
    embedding, head = causal_lm.get_input_embeddings(), output_head(causal_lm)
    freed = [*(expert_meshes or {}), *units]
    tail = [final_norm(causal_lm), head]
    embedding_parameters = {id(parameter) for parameter in embedding.parameters()}
    if any(id(parameter) in embedding_parameters for parameter in head.parameters()):  # tied
        tail.insert(0, embedding)  # the first to run gathers all of them
    else:
        fully_shard(embedding, **ends, reshard_after_forward=sharding.reshard)
        freed.append(embedding)
    fully_shard([module for module in tail if module is not None], **ends, reshard_after_forward=False)
    fully_shard(model, **layers)
    return freed if sharding.reshard is True else []


def shared_by_units(model: Any, units: list[nn.Module]) -> str | None:
    """Returns two names of a weight in two units, which FSDP does not support; embedding and tied head are one unit."""
    own = {id(unit) for unit in [*units, output_head(model)]}
    paths = [f"{name}." for name, module in model.named_modules() if id(module) in own]
    tied, first = {id(p) for p in model.get_input_embeddings().parameters()}, dict[int, tuple[str, str]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = max((path for path in paths if name.startswith(path)), key=len, default="")
        known, in_unit = first.setdefault(id(parameter), (name, unit))
        if in_unit != unit and id(parameter) not in tied:
            return f"`{known}` and `{name}`"
    return None


def final_norm(model: Any) -> nn.Module | None:
    """Returns the norm before the head: the last direct child of the base model that is a norm."""
    norms = [child for child in unwrap_peft(model).base_model.children() if "Norm" in type(child).__name__]
    return norms[-1] if norms else None


def sharding_units(model: Any, plugin: Any) -> list[nn.Module]:
    """Returns the modules to shard one by one, inner ones first. plugin: accelerate's, which has the wrap policy."""
    if plugin.transformer_cls_names_to_wrap is None:  # a text part's class names no module of a tower
        here = {type(module).__name__ for module in model.modules()}
        plugin.transformer_cls_names_to_wrap = sorted(here.intersection(unwrap_peft(model)._no_split_modules or ()))
    plugin.set_auto_wrap_policy(model)
    policy = plugin.auto_wrap_policy
    if policy is None:
        return []
    submodules = [module for module in model.modules() if module is not model]
    numels = [sum(parameter.numel() for parameter in module.parameters()) for module in submodules]
    return [
        module
        for module, numel in zip(reversed(submodules), reversed(numels), strict=True)
        if policy(module, recurse=False, nonwrapped_numel=numel)
    ]


# --- weights


@dataclass(frozen=True)
class Weights:
    """All values of a model, on the rank that has them; on the others only names."""

    saved: dict[str, Tensor]  # state dict; empty on the other ranks
    computed: dict[str, Tensor]  # {path of attributes: tensor} missing from a state dict, such as rotary frequencies


def take_weights(model: Any, on_this_rank: bool) -> Weights:
    """Move a model to `meta`. Returns its values on the rank that has them, shapes on the others. Collective.

    on_this_rank: whether the values are here. Raises UserError on every rank if their models differ.
    """
    state = model.state_dict(keep_vars=True)
    computed = dict(_computed_tensors(model))
    types = _adopt_types(state, computed)
    saved = {name: tensor.detach() for name, tensor in state.items()} if on_this_rank else {}
    computed = {name: tensor.to(types[name]) if tensor.is_meta else tensor for name, tensor in computed.items()}
    model.to("meta")
    model.tie_weights()  # moved one by one, tied weights are separate tensors
    return Weights(saved, computed)


def _computed_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (path of attributes, tensor) missing from state dicts: buffers that are not saved, plain attributes, and
    tensors that unpack a weight."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name in module._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer
        yield from ((f"{path}.{name}", value) for name, value in vars(module).items() if isinstance(value, Tensor))
        yield from ((f"{path}.{name}", value) for name, value in state_tensors(module))


_TensorList = list[tuple[str, tuple[int, ...], torch.dtype]]


def _adopt_types(state: Mapping[str, Tensor], computed: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    """Compare the tensors that ranks will send and receive, before any is sent. Returns the type of each on rank 0.

    Only the rank that reads the weights knows which tensors are kept in fp32: the others adopt its types.
    """
    tensors = [*state.items(), *computed.items()]
    own: _TensorList = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors]
    received: list[Any] = [own]
    dist.broadcast_object_list(received, src=0)
    rank_0_tensors: _TensorList = received[0]
    differences: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(differences, _difference(own, rank_0_tensors))
    for rank, difference in enumerate(differences):
        if difference is not None:
            raise UserError(
                f"FSDP2: the model that rank {rank} created from the config is not the one that rank 0 has read: "
                f"{difference}. Use ddp or zero3, where every rank reads the weights itself"
            )
    types = {name: dtype for name, _, dtype in rank_0_tensors}
    for name, tensor in state.items():
        if tensor.is_meta and tensor.dtype != types[name]:
            tensor.data = tensor.data.to(types[name])
    return types


def _difference(own: _TensorList, rank_0_tensors: _TensorList) -> str | None:
    """Returns the first difference in names, their order, or shapes."""
    shapes = {name: shape for name, shape, _ in own}
    for name, shape, _ in rank_0_tensors:
        if name not in shapes:
            return f"it lacks `{name}` {list(shape)}"
        if shapes[name] != shape:
            return f"`{name}` is {list(shapes[name])}, not {list(shape)}"
    if additional := set(shapes) - {name for name, _, _ in rank_0_tensors}:
        return f"it has `{min(additional)}` in addition"
    same_order = [name for name, *_ in own] == [name for name, *_ in rank_0_tensors]
    return None if same_order else "its tensors come in another order"


def fill_shards(
    model: Any,
    weights: Weights,
    shards: Mapping[str, ParameterShard],
    device: torch.device,
    shard_device: torch.device,
) -> None:
    """Give every rank its shard of rank 0's weights; one tensor at a time is full. Collective.

    shards: tensor parallel parameters by name. device: device for communication of full tensors. shard_device: device
    of the shards, the CPU if they are offloaded. FSDP2 would move them there itself, but only the local tensor in a
    DTensor, whose device would then be wrong.
    """
    filled: dict[str, Tensor] = {}
    by_identity: dict[int, Tensor] = {}  # the model's tensors: tied weights have two names
    for name, sharded in model.state_dict(keep_vars=True).items():
        if id(sharded) not in by_identity:
            full = _broadcast(weights.saved.pop(name, None), sharded, shards.get(name), device)
            by_identity[id(sharded)] = _local_shard(full, sharded, shards.get(name), shard_device)
        filled[name] = by_identity[id(sharded)]
    model.load_state_dict(filled, assign=True)
    model.tie_weights()
    for name, tensor in weights.computed.items():
        *path, attribute = name.split(".")
        setattr(reduce(getattr, path, model), attribute, _broadcast_bytes(tensor, device))


def _broadcast_bytes(own: Tensor, device: torch.device) -> Tensor:
    """Returns rank 0's tensor, of any type: computed tensors may be complex or masks."""
    full = torch.empty(own.shape, dtype=own.dtype, device=device) if own.is_meta else own.to(device)
    full = full.clone(memory_format=torch.contiguous_format)
    if full.numel():
        dist.broadcast(full.view(-1).view(torch.uint8), src=0)
    return full


def _broadcast(own: Tensor | None, sharded: Tensor, shard: ParameterShard | None, device: torch.device) -> Tensor:
    shape = sharded.shape if shard is None else shard.full_shape(sharded.shape)
    full = torch.empty(shape, dtype=sharded.dtype, device=device) if own is None else own.to(device, sharded.dtype)
    full = full.contiguous()
    dist.broadcast(full, src=0)
    return full


def _local_shard(full: Tensor, sharded: Tensor, shard: ParameterShard | None, shard_device: torch.device) -> Tensor:
    """Returns a copy of this rank's shard, with the layout of `sharded`."""
    columns = full if shard is None else shard.take(full)
    if not isinstance(sharded, DTensor):
        return columns.clone()
    first, rows = first_row(sharded), sharded.to_local().shape[0]
    local = columns.narrow(0, first if rows else 0, rows).clone(memory_format=torch.contiguous_format)
    dtensor = DTensor.from_local(
        local, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )
    return dtensor.to(shard_device)  # from_local itself moves it to the mesh's device


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns the unsharded tensor. Collective. One mesh dimension after the other: torch's `full_tensor` warns if
    two dimensions shard the same one, as those of expert parallel do."""
    while isinstance(tensor, DTensor):
        sharded = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
        if not sharded:
            return tensor.to_local()
        placements = [Replicate() if dim == sharded[0] else p for dim, p in enumerate(tensor.placements)]
        tensor = tensor.redistribute(placements=placements)
    return tensor


def local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(parameter: Tensor) -> int:
    """Returns the first row of this rank's shard, among the rows shared by the ranks of its mesh."""
    if not isinstance(parameter, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0]


def part_of_shard(name: str, parameter: Tensor, local: Tensor, shard: ParameterShard | None) -> ShardPart:
    """Returns the range of the unsharded parameter in `local`.

    local: rows of `parameter`, a DTensor if they are not all, tensor parallel if `shard` is given.
    """
    first, width = first_row(parameter), math.prod(parameter.shape[1:])
    if shard is None or shard.dim == 0:
        shape = parameter.shape if shard is None else shard.full_shape(parameter.shape)
        above = 0 if shard is None else shard.index * parameter.shape[0]
        return ShardPart(name, tuple(shape), (above + first) * width, local.numel(), local, 0)
    pitch = width * shard.count
    start = first * pitch + shard.index * width
    return ShardPart(name, tuple(shard.full_shape(parameter.shape)), start, local.numel(), local, 0, width, pitch)
