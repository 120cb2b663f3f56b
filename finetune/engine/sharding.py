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
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from finetune.engine.parallelism import Parallelism
from finetune.engine.state_shards import ShardPart
from finetune.engine.tensor_group import ParameterShard
from finetune.errors import UserError
from finetune.models.packed_linear import state_tensors
from finetune.models.wrapped import WrappedModel, output_head
from finetune.utils import unwrap_peft


@dataclass(frozen=True)
class Meshes:
    """The ranks that share a parameter. One dimension: shards; two: replicas of shards (HSDP)."""

    shards: DeviceMesh
    tensor: DeviceMesh | None  # ranks with other parts of the matrices


def device_meshes(parallelism: Parallelism, device_type: str) -> Meshes:
    """Returns this rank's meshes. Ranks that share the tokens of a row have different shards."""
    sizes = {
        "pipeline": parallelism.pipeline,
        "replicate": parallelism.replicate,
        "shard": parallelism.shard * parallelism.tokens,
        "tensor": parallelism.tensor,
    }
    used = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    grid = init_device_mesh(device_type, tuple(used.values()), mesh_dim_names=tuple(used))
    shards = grid["replicate", "shard"] if "replicate" in used else grid["shard"]
    return Meshes(shards, grid["tensor"] if "tensor" in used else None)


@dataclass(frozen=True)
class Sharding:
    """Options for sharding units."""

    meshes: Meshes
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    reshard: bool | int  # free a layer's weights after its forward

    def options(self, mesh: DeviceMesh) -> dict[str, Any]:
        return {"mesh": mesh, "mp_policy": self.precision, "offload_policy": self.offload}

    def device(self, compute: torch.device) -> torch.device:
        """Returns the device of shards."""
        return torch.device("cpu") if isinstance(self.offload, CPUOffloadPolicy) else compute


def shard_model(
    model: WrappedModel,
    units: list[nn.Module],
    sharding: Sharding,
    expert_meshes: Mapping[nn.Module, DeviceMesh] | None = None,
) -> list[nn.Module]:
    """Shard every parameter of a model, in place; its forward gathers them.

    units: decoder layers, inner ones first. expert_meshes: modules in them that are sharded over other ranks, each a
    separate unit. Returns the modules whose gathered parameters are freed after their forward, if any.
    """
    shard_layers(units, sharding, expert_meshes)
    options = sharding.options(sharding.meshes.shards)
    causal_lm = model.causal_lm
    embedding, head = causal_lm.get_input_embeddings(), output_head(causal_lm)
    freed = [*(expert_meshes or {}), *units]
    tail = [final_norm(causal_lm), head]
    embedding_parameters = {id(parameter) for parameter in embedding.parameters()}
    if any(id(parameter) in embedding_parameters for parameter in head.parameters()):  # tied
        tail.insert(0, embedding)  # the first to run gathers all of them
    else:
        fully_shard(embedding, **options, reshard_after_forward=sharding.reshard)
        freed.append(embedding)
    fully_shard([module for module in tail if module is not None], **options, reshard_after_forward=False)
    fully_shard(model, **options)
    return freed if sharding.reshard is True else []


def shard_layers(
    units: list[nn.Module], sharding: Sharding, expert_meshes: Mapping[nn.Module, DeviceMesh] | None = None
) -> None:
    for module, mesh in (expert_meshes or {}).items():
        fully_shard(module, **sharding.options(mesh), reshard_after_forward=sharding.reshard)
    for module in units:
        fully_shard(module, **sharding.options(sharding.meshes.shards), reshard_after_forward=sharding.reshard)


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
class ReadingRank:
    """The rank that has read a model's weights, for the ranks of a process group; None: for all."""

    rank: int = 0
    group: Any = None


@dataclass(frozen=True)
class Weights:
    """All values of a model, or of a pipeline's stage, on the rank that has them; on the others only names."""

    saved: dict[str, Tensor]  # state dict; empty on the other ranks
    computed: dict[str, Tensor]  # {path of attributes: tensor} missing from a state dict, such as rotary frequencies
    names: frozenset[str] | None = None  # of the state dict, with values; None: all
    source: ReadingRank = ReadingRank()


def take_weights(model: Any, on_this_rank: bool, source: ReadingRank = ReadingRank()) -> Weights:
    """Move a model to `meta`. Returns its values on the rank that has them, shapes on the others. Collective.

    on_this_rank: whether the values are here. Raises UserError on every rank if their models differ.
    """
    state = model.state_dict(keep_vars=True)
    computed = dict(_computed_tensors(model))
    tensors = (*state.items(), *computed.items())
    own = [(name, tuple(tensor.shape), tensor.dtype, tensor.is_meta) for name, tensor in tensors]
    received: list[Any] = [own]
    dist.broadcast_object_list(received, src=source.rank, group=source.group)
    differences: list[Any] = [None] * dist.get_world_size()
    pairs = zip_longest(own, received[0], fillvalue=("no more tensors", ()))
    different = ((ours, theirs) for ours, theirs in pairs if ours[:2] != theirs[:2])
    dist.all_gather_object(differences, next(different, None))
    for rank, difference in enumerate(differences):
        if difference is not None:
            (name, shape, *_), (name_0, shape_0, *_) = difference
            raise UserError(
                f"FSDP2: rank {rank} created another model from the config than was loaded. It has `{name}` "
                f"{list(shape)}, not `{name_0}` {list(shape_0)}. Fix: use ddp or zero3, where every rank reads the "
                "weights itself"
            )
    types = {name: dtype for name, _, dtype, _ in received[0]}  # only the rank that reads knows what is kept in fp32
    in_stages = source.group is not None
    elsewhere = {name for name, *_, is_meta in received[0] if is_meta and in_stages}  # in another stage of a pipeline
    for name, tensor in state.items():
        if tensor.is_meta and tensor.dtype != types[name]:
            tensor.data = tensor.data.to(types[name])
    names = frozenset(name for name in state if name not in elsewhere)
    saved = {name: state[name].detach() for name in names} if on_this_rank else {}
    computed = {
        name: tensor.to(types[name]) if tensor.is_meta else tensor
        for name, tensor in computed.items()
        if name not in elsewhere
    }
    model.to("meta")
    model.tie_weights()  # moved one by one, tied weights are separate tensors
    return Weights(saved, computed, names, source)


def _computed_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (path, tensor) missing from state dicts: unsaved buffers, attributes, tensors that unpack weights."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name in module._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer
        yield from ((f"{path}.{name}", value) for name, value in vars(module).items() if isinstance(value, Tensor))
        yield from ((f"{path}.{name}", value) for name, value in state_tensors(module))


def fill_shards(
    model: Any,
    weights: Weights,
    shards: Mapping[str, ParameterShard],
    device: torch.device,
    shard_device: torch.device,
) -> None:
    """Give every rank its shard of the weights that one has read; one tensor at a time is full. Collective.

    Tied weights are separate tensors afterwards, as `load_state_dict` leaves them.

    shards: tensor parallel parameters by name. device: of full tensors. shard_device: the CPU if shards are offloaded.
    FSDP2 would move them itself, but only the local tensor in a DTensor, whose device would then be wrong.
    """
    filled: dict[str, Tensor] = {}
    by_identity: dict[int, Tensor] = {}  # the model's tensors: tied weights have two names
    source = {"src": weights.source.rank, "group": weights.source.group}
    for name, sharded in model.state_dict(keep_vars=True).items():
        if weights.names is not None and name not in weights.names:
            continue
        if id(sharded) not in by_identity:
            own, shard = weights.saved.pop(name, None), shards.get(name)
            shape = sharded.shape if shard is None else shard.full_shape(sharded.shape)
            full = (
                torch.empty(shape, dtype=sharded.dtype, device=device) if own is None else own.to(device, sharded.dtype)
            )
            full = full.contiguous()
            dist.broadcast(full, **source)
            by_identity[id(sharded)] = _local_shard(full if shard is None else shard.take(full), sharded, shard_device)
        filled[name] = by_identity[id(sharded)]
    model.load_state_dict(filled, assign=True, strict=False)
    for name, tensor in weights.computed.items():
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if tensor.is_meta else tensor.to(device)
        full = full.clone(memory_format=torch.contiguous_format)
        if full.numel():
            dist.broadcast(full.view(-1).view(torch.uint8), **source)  # may be complex, or masks
        *path, attribute = name.split(".")
        setattr(reduce(getattr, path, model), attribute, full)


def _local_shard(columns: Tensor, sharded: Tensor, shard_device: torch.device) -> Tensor:
    """Returns a copy of this rank's rows, with the layout of `sharded`."""
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
    """Returns the range of the full parameter in `local`: rows of `parameter`, of columns if `shard` is given."""
    first, width = first_row(parameter), math.prod(parameter.shape[1:])
    if shard is None or shard.dim == 0:
        shape = parameter.shape if shard is None else shard.full_shape(parameter.shape)
        above = 0 if shard is None else shard.start
        return ShardPart(name, tuple(shape), (above + first) * width, local.numel(), local, 0)
    pitch = width // shard.size * shard.total
    start = first * pitch + width // shard.size * shard.start
    return ShardPart(name, tuple(shard.full_shape(parameter.shape)), start, local.numel(), local, 0, width, pitch)
