"""Bytes that a run keeps between its steps, on one rank, as its engine shards them.

weights             and buffers, scales of 4-bit weights
gradients           before the optimizer's step
optimizer state     master weights as well
buffers             of an engine, as long as it lives: DeepSpeed's bucket, its gathered small weights
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PretrainedConfig

from finetune.engine.launch import Launch
from finetune.engine.parallelism import Parallelism
from finetune.engine.stages import Layout, stage_bounds
from finetune.plan.shapes import Shapes, Weight, shapes_of
from finetune.recipe import Recipe
from finetune.recipe.schema import Optimizer

WEIGHTS, GRADIENTS, OPTIMIZER, BUFFERS = "weights", "gradients", "optimizer state", "buffers"
PARTS = (WEIGHTS, GRADIENTS, OPTIMIZER, BUFFERS)
_DEEPSPEED_BUCKET, _PERSISTENT, _SUB_GROUP = 500_000_000, 100_000, 1_000_000_000  # elements; DeepSpeed's defaults
_SMALL, _QUANTILES, _BLOCK = 4096, 2 * 256 * 4, 256  # bitsandbytes: elements kept in 32 bit; bytes of tables; a scale's


@dataclass
class State:
    """Bytes of one rank."""

    persistent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    host: int = 0
    disk: int = 0

    @property
    def device_bytes(self) -> int:
        return sum(self.persistent.values())


@dataclass(frozen=True)
class Shard:
    """A rank's part of a weight."""

    weight: Weight
    numel: int  # of its own elements
    padded: int  # of the memory that they are in


def state_of(recipe: Recipe, config: PretrainedConfig, launch: Launch, rank: int, device: str) -> State:
    """Returns what `rank` keeps. device: of the compute, cuda or cpu."""
    sizes = launch.parallelism
    shapes = shapes_of(recipe, config, sizes.tensor)
    if launch.kind == "zero":
        return _zero(recipe, shapes, launch, rank, device)
    kept = _of_stage(shapes, sizes, rank)
    if launch.kind == "fsdp2" or sizes.tensor > 1:
        place = sizes.coordinates(rank)
        shards = [_row_shard(weight, sizes, place) for weight in kept]
    else:
        shards = [Shard(weight, weight.numel, weight.numel) for weight in kept]
    trained = [shard for shard in shards if shard.weight.trains]
    layers = {weight.layer for weight in kept if weight.layer is not None}
    state = State()
    state.persistent[WEIGHTS] = sum(shard.padded * shard.weight.size for shard in shards)
    scales = sum(weight.scales for weight in kept) + shapes.buffers + shapes.buffers_of_layer * len(layers)
    if not recipe.optimizer.in_backward:
        state.persistent[GRADIENTS] = sum(shard.padded * shard.weight.size for shard in trained)
    state.persistent[OPTIMIZER], paged = optimizer_bytes(recipe.optimizer, trained, device)
    state.host = paged
    if launch.offloads_optimizer and device != "cpu":
        state.host += state.device_bytes
        state.persistent = dict.fromkeys(state.persistent, 0)
    state.persistent[WEIGHTS] += scales
    return state


# --- which weights, and how much of each


def different_ranks(sizes: Parallelism) -> Sequence[int]:
    """Returns the ranks that may differ in memory and work: of a pipeline one of each stage, else the first."""
    return range(0, sizes.processes, sizes.processes // sizes.pipeline)


def layout_of(shapes: Shapes, sizes: Parallelism) -> Layout:
    """Returns the stages of a pipeline; of the weights of the model alone, as the engine lays them out."""
    base = [weight for weight in shapes.weights if "lora_" not in weight.name and "modules_to_save" not in weight.name]
    numel = [0] * shapes.layers
    first = last = 0
    for weight in base:
        count = weight.packed or weight.numel
        if weight.layer is not None:
            numel[weight.layer] += count
        first += count if "embed_tokens" in weight.name else 0
        last += count if weight.unit == "tail" else 0
    return Layout(stage_bounds(tuple(numel), sizes.pipeline * sizes.stages_per_rank, first, last), sizes.pipeline)


def _of_stage(shapes: Shapes, sizes: Parallelism, rank: int) -> Sequence[Weight]:
    """Returns the weights that a rank of a pipeline has; a matrix that is embedding and head is in both ends."""
    if sizes.pipeline == 1:
        return shapes.weights
    layout, place = layout_of(shapes, sizes), sizes.coordinates(rank)["pipeline"]
    layers = layout.layers_of(place)
    first, last = place == 0, place == layout.rank_of(layout.stages - 1)
    return [
        weight
        for weight in shapes.weights
        if (weight.layer in layers if weight.layer is not None else False)
        or ("embed_tokens" in weight.name and first)
        or (weight.unit == "tail" and last)
    ]


def _row_shard(weight: Weight, sizes: Parallelism, place: dict[str, int]) -> Shard:
    """Rows of dimension 0, as `torch.chunk` cuts them; FSDP2's memory is that of the first rank's. place: a rank's
    coordinates."""
    rows, width = weight.shape[0], math.prod(weight.shape[1:])
    count = sizes.shard * sizes.tokens
    index = place["shard"] * sizes.tokens + place["context"] * sizes.sequence + place["sequence"]
    if weight.expert and sizes.expert > 1:
        rows //= sizes.expert
        count, index = sizes.shard // sizes.expert, place["shard"] // sizes.expert
    elif weight.layer is None and weight.unit != "rest" and sizes.tensor > 1:
        count, index = count * sizes.tensor, index * sizes.tensor + place["tensor"]
    each = -(-rows // count)
    own = min(each, max(0, rows - index * each))
    return Shard(weight, own * width, each * width)


# --- optimizers


def optimizer_bytes(recipe: Optimizer, shards: Sequence[Shard], device: str) -> tuple[int, int]:
    """Returns the state's bytes: on the device, and in memory that CUDA moves out (paged). See `training/optim.py`."""
    steps = [(shard.numel, shard.weight) for shard in shards if shard.numel]
    paged = recipe.name.startswith("paged") and device == "cuda"
    if recipe.name == "sgd":
        return (sum(numel * weight.size for numel, weight in steps) if recipe.momentum else 0), 0
    if recipe.name == "muon":
        hidden = [(n, w) for n, w in steps if _is_hidden(w)]
        rest = [(n, w) for n, w in steps if not _is_hidden(w)]
        return sum(n * w.size for n, w in hidden) + sum(2 * n * w.size + 4 for n, w in rest), 0
    if recipe.name == "adamw":
        return sum(2 * numel * weight.size + 4 for numel, weight in steps), 0
    here = away = 0
    for numel, _ in steps:
        eighth = "8bit" in recipe.name and numel >= _SMALL
        states = 2 * numel * (1 if eighth else 4)
        here += 2 * 4 * -(-numel // _BLOCK) if eighth else 0
        if paged and numel >= 100_000:  # get_state_buffer in bitsandbytes
            away += states
        else:
            here += states
    tables = _QUANTILES if "8bit" in recipe.name and any(numel >= _SMALL for numel, _ in steps) else 0
    return here + tables, away


def _is_hidden(weight: Weight) -> bool:
    return len(weight.shape) == 2 and not weight.table


# --- DeepSpeed


def zero_stage(launch: Launch) -> int:
    """launch: of DeepSpeed; its config of accelerate's keys, or DeepSpeed's own."""
    section = launch.deepspeed
    return int((section.get("zero_optimization") or {}).get("stage", section.get("zero_stage", 2)))


def _zero(recipe: Recipe, shapes: Shapes, launch: Launch, rank: int, device: str) -> State:
    section, stage = launch.deepspeed, zero_stage(launch)
    away = launch.offloads_optimizer and device != "cpu"
    state = _stage_3(recipe, shapes, launch, away) if stage == 3 else _flat(recipe, shapes, launch, rank, stage, away)
    if "nvme" in (section.get("offload_optimizer_device"), section.get("offload_param_device")):
        state.disk = 12 * sum(w.numel for w in shapes.weights if w.trains) // launch.processes
    scales = sum(weight.scales for weight in shapes.weights)
    state.persistent[WEIGHTS] += scales + shapes.buffers + shapes.buffers_of_layer * shapes.layers
    return state


def decay_groups(weights: Sequence[Weight]) -> list[list[Weight]]:
    """Returns matrices and vectors, of images by themselves, as `training/optim.py` groups what is trained."""
    groups: dict[tuple[bool, bool], list[Weight]] = {}
    for weight in weights:
        if weight.trains:
            groups.setdefault((weight.of_images, len(weight.shape) < 2), []).append(weight)
    return [groups[key] for key in sorted(groups)]


def bucket_elements(launch: Launch, shapes: Shapes) -> int:
    """Returns the gradients that DeepSpeed reduces at a time; see `Zero._limit_buckets`."""
    trained = sum(weight.numel for weight in shapes.weights if weight.trains)
    size = (launch.deepspeed.get("zero_optimization") or {}).get("reduce_bucket_size", _DEEPSPEED_BUCKET)
    return min(int(size), trained) if isinstance(size, int | float) else trained


def _flat(recipe: Recipe, shapes: Shapes, launch: Launch, rank: int, stage: int, away: bool) -> State:
    """Stages 1 and 2: trained weights lie in one buffer for each group, whose length divides by two per rank."""
    state, ranks = State(), launch.processes
    state.persistent[WEIGHTS] = sum(weight.bytes for weight in shapes.weights if not weight.trains)
    optimizer = gradients = 0
    for group in decay_groups(shapes.weights):
        numel = sum(weight.numel for weight in group)
        flat = -(-numel // (2 * ranks)) * 2 * ranks
        part = flat // ranks
        state.persistent[WEIGHTS] += 4 * flat
        optimizer += 4 * part + _of_flat(recipe.optimizer, part)
        # With offload the gradients of master weights are there instead.
        gradients += 4 * (part if launch.offloads_optimizer else _touched(group, rank * part, (rank + 1) * part))
    state.persistent[GRADIENTS] = gradients
    if away:
        state.host = optimizer + gradients
        state.persistent[GRADIENTS] = 0
        # `temp_grad_buffer_for_gpu_offload`
        state.persistent[BUFFERS] = max((weight.bytes for weight in shapes.weights if weight.trains), default=0)
    else:
        state.persistent[OPTIMIZER] = optimizer
    return state


def _touched(group: Sequence[Weight], begin: int, end: int) -> int:
    """Returns the elements of weights that a range of a flat group has a part of, and of the padding at its end:
    gradients are kept in full tensors."""
    total = first = 0
    for weight in group:
        if first < end and first + weight.numel > begin:
            total += weight.numel
        first += weight.numel
    return total + max(0, end - max(first, begin))


def _stage_3(recipe: Recipe, shapes: Shapes, launch: Launch, away: bool) -> State:
    """Each weight is cut into equal ranges, the last one padded; what is small is whole on every rank as well."""
    state, ranks = State(), launch.processes
    parts = [(weight, -(-weight.numel // ranks)) for weight in shapes.weights]
    state.persistent[WEIGHTS] = sum(part * weight.size for weight, part in parts)
    optimizer = 0
    for group in decay_groups(shapes.weights):
        part = sum(-(-weight.numel // ranks) for weight in group)
        groups = max(1, -(-part // _SUB_GROUP))
        optimizer += 4 * part + _of_flat(recipe.optimizer, part) + 4 * (groups - 1)
    gradients = sum(4 * part for weight, part in parts if weight.trains)
    state.persistent[GRADIENTS] = gradients
    state.persistent[BUFFERS] = 4 * bucket_elements(launch, shapes)
    state.persistent[BUFFERS] += sum(w.bytes for w in shapes.weights if w.numel <= _PERSISTENT and ranks > 1)
    if away:
        params_away = launch.deepspeed.get("offload_param_device") in ("cpu", "nvme")
        trained = sum(part * weight.size for weight, part in parts if weight.trains)
        state.host = optimizer + gradients + (state.persistent[WEIGHTS] if params_away else 0) + trained
        state.persistent[GRADIENTS] = 0
        state.persistent[WEIGHTS] = 0 if params_away else state.persistent[WEIGHTS]
    else:
        state.persistent[OPTIMIZER] = optimizer
    return state


def _of_flat(recipe: Optimizer, numel: int) -> int:
    weight = Weight("flat", (numel,), 4, True, None, "rest")
    return sum(optimizer_bytes(recipe, [Shard(weight, numel, numel)], "cpu"))
