"""Memory of a run, from shapes alone: bytes of tensors at the peak of each phase, on the fullest rank.

    persistent     weights, gradients and optimizer state, as the engine of the config shards them (`engine/costs`)
    transient      activations, gathered layers and buffers: the parts of a micro-batch (`timeline.py`) and the bytes
                   that the engine moves (`engine/costs`), laid end to end

Tensors only: a device's context, communicators and the allocator's unused blocks come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PretrainedConfig

from finetune.checkpoints.weight_files import SHARD_BYTES
from finetune.engine.costs import Costs, Moving, Shapes, State
from finetune.engine.costs.common import (
    GRADIENTS,
    INITIAL,
    TEACHER,
    different_ranks,
    layout_of,
    weights_of_stage,
)
from finetune.engine.launch import Launch
from finetune.engine.parallelism import Parallelism
from finetune.engine.stages import schedulable_micro_batches
from finetune.models.base_config import dtypes, layer_configs
from finetune.models.head.chunked import is_small
from finetune.plan.micro_batch import HeaviestBatch, How
from finetune.plan.rollouts import longest_prompt, sampling_of
from finetune.plan.shapes import costs_at, shapes_of, shortened
from finetune.plan.teacher_memory import teacher_of
from finetune.plan.timeline import Part, Timeline, timeline_of
from finetune.recipe import Recipe
from finetune.recipe.objective_settings import Grpo
from finetune.release.export.figures import WHOLE_BYTES

__all__ = ["HeaviestBatch", "Memory", "Place", "estimate_memory", "phases_of"]

KEPT = "between steps"


@dataclass(frozen=True)
class Place:
    """A launch on a kind of device."""

    launch: Launch  # of an accelerate config, as `engine.launch.read_config_file` reads it
    per_host: int  # processes on each machine
    device: str = "cuda"  # or cpu: a rehearsal
    capability: tuple[int, int] | None = (9, 0)  # of the CUDA device: attention kernels depend on it; None: AMD
    gib: float | None = None  # memory of the device: chunks of the head depend on it; None: not known


@dataclass(frozen=True)
class Memory:
    """Memory of the fullest rank."""

    rank: int
    phases: dict[str, int]  # bytes of tensors on the device at the peak of each
    persistent: dict[str, int]  # bytes on the device between steps, or for gradients before one, by kind
    host: int  # bytes of offloaded tensors in its machine's memory, of all processes there
    disk: int = 0  # bytes on the disks of its machine: NVMe offload
    after: dict[str, int] = field(default_factory=dict)  # bytes in the host's memory of one process: save, merge
    reading: int = 0  # bytes in a machine's memory while ranks read weights for the others
    at_least: bool = False  # a step takes more: the persistent bytes exceed the device, so no step was weighed
    initial: int = 0  # bytes of one process in its machine's memory: the weights of `objective.kl`

    @property
    def tensors(self) -> int:
        return max(self.phases.values())


def estimate_memory(
    recipe: Recipe,
    config: PretrainedConfig,
    place: Place,
    batch: HeaviestBatch,
    micro_batches: int = 1,
    most: int | None = None,
) -> Memory:
    """Returns the memory of a run of `recipe` at `place`. config: `Base.of(recipe).config`.

    micro_batches: of a step on each process. most: bytes of a device; if persistent bytes exceed it, no step is
    weighed. No weights are read; raises UserError if no such model can be made.
    """
    memories, costs = list[Memory](), costs_at(recipe, config, place.launch, place.device)
    # Bytes in the host's memory after the run: rank 0's while it writes the result (`checkpoints/result.py`), and those
    # of `merge`, which adds up and compares tensor by tensor: three times the largest one in fp32 (the base's, its
    # update, the file's), or the whole model if it is small enough to be loaded whole.
    shapes, sizes = shapes_of(recipe, config), place.launch.parallelism
    weights = shapes.weights
    if recipe.mode == "full":
        saved = sum(weight.numel for weight in weights) * dtypes(recipe).frozen.itemsize
        after = {"save": min(SHARD_BYTES, saved)}
    else:
        of_each = [4 * (weight.packed or weight.numel) for weight in weights]
        merged = max(3 * max(of_each), sum(of_each) if sum(of_each) <= WHOLE_BYTES else 0)
        after = {"save": sum(weight.bytes for weight in weights if weight.trains), "merge": merged}
    reading = 0
    if costs.loads_by_copies:  # a stage's first rank reads its layers, and embedding and head, which it may drop
        own = [{id(weight) for weight in weights_of_stage(shapes, sizes, rank)} for rank in different_ranks(sizes)]
        copied = [weight for weight in weights if weight.trains or weight.packed]
        reads = [sum(w.bytes for w in copied if w.layer is None or id(w) in kept) for kept in own]
        reading = max(reads) * -(-place.per_host * sizes.pipeline // sizes.processes)
    elif costs.reads_everywhere:
        reading = place.per_host * sum(weight.bytes for weight in weights)
    for rank in different_ranks(sizes):
        phases, state = phases_of(costs, config, rank, place.capability, batch, micro_batches, most, place.gib)
        host, disk = state.host * place.per_host, state.disk * place.per_host
        at_least = list(phases) == [KEPT]
        memories.append(Memory(rank, phases, state.persistent, host, disk, after, reading, at_least, state.initial))
        if memories[-1].at_least:
            return memories[-1]
    return max(memories, key=lambda memory: memory.tensors)


def how_of(costs: Costs, capability: tuple[int, int] | None, micro_batches: int, gib: float | None = None) -> How:
    if capability and capability >= (8, 0) and costs.recipe.model.attention != "flash_attention_3":
        capability = (9, 0)  # the same kernel from 8.0 on: one timeline for all
    return How(
        device=costs.device,
        capability=capability,
        small=is_small(gib),
        casts_weights=costs.casts_weights,
        keeps_inputs_alone=costs.keeps_inputs_alone,
        gradients_there=costs.gradients_there(micro_batches),
        drops_gradients=costs.recipe.optimizer.in_backward,
        tensor=costs.sizes.tensor,
        expert=costs.sizes.expert,
        pipeline=costs.sizes.pipeline,
    )


def of_rank(batch: HeaviestBatch, sizes: Parallelism) -> HeaviestBatch:
    """Returns a rank's piece of a micro-batch whose tokens are shared."""
    if sizes.tokens == 1:
        return batch
    return HeaviestBatch((-(-sum(batch.documents) // sizes.tokens),), max(1, batch.targets // sizes.tokens))


# --- phases of a run on one rank


@dataclass
class Peaks:
    """Walks over the parts of a step."""

    now: int
    phases: dict[str, int] = field(default_factory=dict)

    def reach(self, phase: str, above: int) -> None:
        self.phases[phase] = max(self.phases.get(phase, 0), self.now + above)

    def run(self, phase: str, part: Part, moving: int) -> None:
        self.reach(phase, moving + part.peak)
        self.now += part.kept
        self.reach(phase, moving)


def phases_of(
    costs: Costs,
    config: PretrainedConfig,
    rank: int,
    capability: tuple[int, int] | None,
    batch: HeaviestBatch,
    micro_batches: int,
    most: int | None = None,
    gib: float | None = None,
) -> tuple[dict[str, int], State]:
    """Returns the bytes of tensors at the peak of each phase, and the persistent state. If that is more than `most`,
    it is the only phase, `KEPT`: weighing a step takes longer than all the rest."""
    recipe, sizes, state = costs.recipe, costs.sizes, costs.state(rank)
    if isinstance(recipe.objective, Grpo) and recipe.objective.kl:
        state.initial = costs.initial_weights(rank)
        if costs.device == "cpu":  # the host's memory is the device's
            state.persistent[INITIAL] = state.initial
        else:
            state.host += state.initial
    teacher = teacher_of(recipe, batch, how_of(costs, capability, micro_batches, gib))
    if teacher is not None:
        state.persistent[TEACHER] = teacher.kept
    gradients = state.persistent[GRADIENTS] if costs.frees_gradients else 0
    rest = state.device_bytes - gradients
    if most is not None and rest > most:
        return {KEPT: rest}, state
    parts = timeline_of(recipe, config, of_rank(batch, sizes), how_of(costs, capability, micro_batches, gib))
    moving = costs.moving(rank)
    if sizes.tokens > 1:
        # Keys and values of the row's other tokens are gathered and put in order; in the backward also their gradients,
        # in fp32 (`engine/context_parallel.py`).
        layers, itemsize = layer_configs(config.get_text_config()), dtypes(recipe).compute.itemsize
        keys_and_values = 2 * max(map(_key_width, layers)) * sum(batch.documents)  # elements
        moving.layer += 2 * keys_and_values * itemsize
        moving.layer_backward += keys_and_values * (itemsize + 4)
    walk = Peaks(rest, {"load": costs.load(state)})
    stage = Stage.of(costs.shapes, sizes, rank, shortened(config)[1])
    walk.now += gradients if costs.begins_with_gradients(micro_batches) else 0
    walk.now += moving.always + stage.in_flight(sizes, micro_batches, parts, rank)
    if recipe.optimizer.in_backward:
        moving.freed_of_layer = moving.freed_of_tail = 0
    # HSDP keeps sums over replicas until the end of a backward, next to the gradients that they are added to.
    first = (micro_batches == 1 or sizes.replicate > 1) and not recipe.optimizer.in_backward
    _micro_batch(walk, parts, stage, moving, first)
    walk.reach("reduction", moving.end)
    walk.now = rest + gradients
    walk.reach("optimizer", max(moving.optimizer + costs.orthogonalizing(), costs.norm_buffer()))
    # An evaluation keeps nothing for a backward.
    walk.now = rest + moving.always
    forward = max(part.peak for part in parts.layers) + moving.layer
    head = parts.head.peak - max(0, parts.head.kept) + moving.tail if stage.last else 0
    walk.reach("evaluation", parts.before.kept + max(forward, head))
    if recipe.rollouts is not None:
        prompt = longest_prompt(recipe.rollouts, batch.documents)
        sampled = sampling_of(recipe, config, prompt, how_of(costs, capability, micro_batches))
        walk.reach("sampling", sampled.peak + max(moving.layer, moving.tail))
    walk.now = rest
    if teacher is not None:
        walk.reach("teacher", teacher.forward)
    walk.reach("checkpoint", 0)
    walk.reach("save", costs.whole_tensor())
    return walk.phases, state


def _key_width(layer: PretrainedConfig) -> int:
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    return heads * (getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)


@dataclass(frozen=True)
class Stage:
    """The parts of a micro-batch that a rank runs."""

    layers: Sequence[int]  # kinds
    first: bool = True
    last: bool = True

    @classmethod
    def of(cls, shapes: Shapes, sizes: Parallelism, rank: int, kinds: list[int]) -> Stage:
        if sizes.pipeline == 1:
            return cls(kinds)
        layout, place = layout_of(shapes, sizes), sizes.coordinates(rank)["pipeline"]
        mine = sorted(layout.layers_of(place))
        return cls([kinds[i] for i in mine], place == 0, place == layout.rank_of(layout.stages - 1))

    def in_flight(self, sizes: Parallelism, micro_batches: int, parts: Timeline, rank: int) -> int:
        """Returns the bytes that earlier forwards keep: a pipeline runs some before their backwards."""
        if sizes.pipeline == 1:
            return 0
        count = schedulable_micro_batches(sizes.schedule, sizes.pipeline, micro_batches)
        place = sizes.coordinates(rank)["pipeline"]
        before = {
            "gpipe": count,
            "1f1b": min(count, sizes.pipeline - place),
            "interleaved": min(count, 2 * (sizes.pipeline - place) - 1 + (sizes.stages_per_rank - 1) * sizes.pipeline),
            "zero_bubble": min(count, sizes.pipeline - place + (sizes.stages_per_rank - 1) * sizes.pipeline),
        }[sizes.schedule]
        one = sum(parts.layers[kind].kept for kind in self.layers) + (parts.before.kept if self.first else 0)
        one += parts.head.kept if self.last else 0
        share = one if sizes.schedule == "gpipe" else one // sizes.stages_per_rank
        return (before - 1) * share


def _micro_batch(walk: Peaks, parts: Timeline, stage: Stage, moving: Moving, first: bool) -> None:
    """first: gradients are created, rather than added to."""
    walk.run("forward", parts.before, moving.embedding)
    for kind in stage.layers:
        walk.run("forward", parts.layers[kind], moving.layer)
        walk.now += moving.stays
    if stage.last:
        walk.now += moving.tail
        walk.run("forward", parts.head, 0)
    walk.now += moving.backward
    walk.reach("backward", 0)
    if stage.last:
        walk.run("backward", parts.head_backward, 0)
        walk.now -= moving.tail
        walk.reach("backward", moving.tail_end)
        walk.now += (moving.sharded_tail if first else 0) - moving.freed_of_tail
    for kind in reversed(stage.layers):
        walk.run("backward", parts.layers_backward[kind], moving.layer_backward)
        walk.reach("backward", moving.layer_end)
        walk.now += (moving.sharded if first else 0) - moving.freed_of_layer - moving.stays
    walk.run("backward", parts.before_backward, moving.embedding)
