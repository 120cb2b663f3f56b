"""The peak of each phase of a run on one rank: what it keeps (`state.py`), the parts of a micro-batch (`timeline.py`),
and what the engine moves while they run: gathered weights, buckets, gradients on their way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from transformers import PretrainedConfig

from finetune.engine.launch import Launch
from finetune.engine.parallelism import Parallelism
from finetune.engine.stages import schedulable_micro_batches
from finetune.models.config import dtypes, layer_configs
from finetune.plan.micro_batch import HeaviestBatch, How
from finetune.plan.shapes import Shapes, Weight, shapes_of, shortened
from finetune.plan.state import (
    GRADIENTS,
    WEIGHTS,
    State,
    bucket_elements,
    decay_groups,
    layout_of,
    state_of,
    zero_stage,
)
from finetune.plan.timeline import Part, Timeline, timeline_of
from finetune.recipe import Recipe

_NORM_CHUNK = 2**18  # elements of `optimizer_step.squared_norm`'s buffer, fp64, on the CPU
_REUSED_WITHIN, _PREFETCHED = 500_000_000, 50_000_000  # elements that DeepSpeed's stage 3 keeps gathered, and fetches


@dataclass
class Moving:
    """Bytes on the device in addition to what is kept and to a micro-batch's own, by when."""

    always: int = 0  # during forward and backward
    backward: int = 0  # during the backward
    embedding: int = 0
    tail: int = 0  # from the head's forward to the end of its backward
    layer: int = 0  # a layer's forward
    layer_backward: int = 0
    layer_end: int = 0  # above what is there when a layer's backward has ended
    tail_end: int = 0
    freed_of_layer: int = 0  # gradients in the timeline that the end of a layer's backward replaces
    freed_of_tail: int = 0
    sharded: int = 0  # by these bytes a layer, in the first micro-batch
    sharded_tail: int = 0
    stays: int = 0  # by these bytes a layer: weights that stay gathered from its forward to its backward
    end: int = 0  # when a backward has ended: the last reduction
    optimizer: int = 0


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


KEPT = "between steps"


def phases_of(
    recipe: Recipe,
    config: PretrainedConfig,
    launch: Launch,
    rank: int,
    device: str,
    capability: tuple[int, int],
    batch: HeaviestBatch,
    micro_batches: int,
    most: int | None = None,
) -> tuple[dict[str, int], State]:
    """Returns the bytes of tensors at the peak of each phase, and what is kept. Where that is more than `most`, it is
    the only phase, `KEPT`: to weigh a step takes longer than all the rest."""
    sizes = launch.parallelism
    state, shapes = state_of(recipe, config, launch, rank, device), shapes_of(recipe, config, sizes.tensor)
    sharded = launch.kind == "fsdp2" or sizes.tensor > 1
    stage_3 = launch.kind == "zero" and zero_stage(launch) == 3
    gradients = 0 if stage_3 else state.persistent[GRADIENTS]  # stage 3's are one buffer, as long as the engine lives
    rest = state.device_bytes - gradients
    if most is not None and rest > most:
        return {KEPT: rest}, state
    in_backward = recipe.optimizer.in_backward
    how = how_of(recipe, launch, device, capability, micro_batches)
    parts = timeline_of(recipe, config, of_rank(batch, sizes), how)
    kinds = shortened(config)[1]
    moving = _moving(recipe, config, shapes, launch, device, batch)
    walk = Peaks(rest, {"load": _load(shapes, launch, state)})
    stage = Stage.of(shapes, sizes, rank, kinds)
    several = micro_batches > 1 and not in_backward
    walk.now += gradients if several or (launch.kind == "replicated" and how.gradients_there) else 0
    walk.now += moving.always + stage.in_flight(launch, micro_batches, parts, rank)
    if in_backward:
        moving.freed_of_layer = moving.freed_of_tail = 0
    # HSDP keeps what it sums over replicas until the end of a backward, next to what it adds that to.
    first = sharded and (micro_batches == 1 or sizes.replicate > 1) and not in_backward
    _micro_batch(walk, parts, stage, moving, first)
    walk.reach("reduction", moving.end)
    walk.now = rest + gradients
    walk.reach("optimizer", max(moving.optimizer, _norm_buffer(shapes, launch, device)))
    walk.now = rest
    _without_gradients(walk, parts, moving, stage)
    walk.reach("checkpoint", 0)
    walk.reach("save", _whole_tensor(recipe, shapes, launch))
    return walk.phases, state


def _norm_buffer(shapes: Shapes, launch: Launch, device: str) -> int:
    """Returns the bytes in which the gradients' norm is summed, in fp64 on a CPU."""
    trained = max((weight.numel for weight in shapes.weights if weight.trains), default=0)
    return 8 * min(_NORM_CHUNK, trained) if device == "cpu" and launch.kind != "zero" else 0


def how_of(recipe: Recipe, launch: Launch, device: str, capability: tuple[int, int], micro_batches: int) -> How:
    sharded = launch.kind == "fsdp2" or launch.parallelism.tensor > 1
    keeps_gradients = not sharded and launch.kind != "zero" and launch.processes == 1 and micro_batches == 1
    return How(
        device=device,
        capability=capability,
        casts_weights=sharded and recipe.train.precision in ("bf16", "fp16", "fp8"),
        keeps_inputs_alone=launch.kind == "zero" and zero_stage(launch) == 3,
        gradients_there=not sharded and not keeps_gradients and not recipe.optimizer.in_backward,
        drops_gradients=recipe.optimizer.in_backward,
        tensor=launch.parallelism.tensor,
        expert=launch.parallelism.expert,
    )


def of_rank(batch: HeaviestBatch, sizes: Parallelism) -> HeaviestBatch:
    """Returns what a rank has of a micro-batch whose tokens are shared: one piece of the row."""
    if sizes.tokens == 1:
        return batch
    return HeaviestBatch((-(-sum(batch.documents) // sizes.tokens),), max(1, batch.targets // sizes.tokens))


# --- a step


@dataclass(frozen=True)
class Stage:
    """Which parts of a micro-batch a rank runs."""

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

    def in_flight(self, launch: Launch, micro_batches: int, parts: Timeline, rank: int) -> int:
        """Returns what the forwards before this one keep: a pipeline runs some before their backwards."""
        sizes = launch.parallelism
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
    """first: gradients come to be, rather than being added to."""
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


def _without_gradients(walk: Peaks, parts: Timeline, moving: Moving, stage: Stage) -> None:
    """An evaluation: nothing is kept for a backward."""
    walk.now += moving.always
    forward = max(part.peak for part in parts.layers) + moving.layer
    head = parts.head.peak - max(0, parts.head.kept) + moving.tail if stage.last else 0
    walk.reach("evaluation", parts.before.kept + max(forward, head))
    walk.now -= moving.always


def _load(shapes: Shapes, launch: Launch, state: State) -> int:
    """Returns the bytes at the peak of loading and wrapping: weights, and a full tensor or a second copy of what
    trains."""
    weights, trained = state.persistent[WEIGHTS], [weight for weight in shapes.weights if weight.trains]
    if launch.kind == "zero" and zero_stage(launch) < 3:
        return weights + sum(weight.bytes for weight in trained)
    if launch.kind == "zero":
        master = sum(4 * -(-weight.numel // launch.processes) for weight in trained)
        return weights + master + state.persistent[GRADIENTS] + 4 * bucket_elements(launch, shapes)
    if launch.kind == "fsdp2" or launch.parallelism.tensor > 1:
        return weights + max(weight.bytes for weight in shapes.weights)
    return weights


def _whole_tensor(recipe: Recipe, shapes: Shapes, launch: Launch) -> int:
    """Returns what the largest tensor of the result takes, which is gathered: FSDP2 gathers it in one piece more."""
    largest = max(weight.bytes for weight in shapes.weights if weight.trains or recipe.mode == "full")
    if launch.kind == "zero":
        return largest if zero_stage(launch) == 3 else 0
    return 2 * largest if launch.kind == "fsdp2" or launch.parallelism.tensor > 1 else 0


# --- what engines move


def _moving(
    recipe: Recipe, config: PretrainedConfig, shapes: Shapes, launch: Launch, device: str, batch: HeaviestBatch
) -> Moving:
    if launch.kind == "zero":
        return _of_zero(shapes, launch, zero_stage(launch))
    sharded = launch.kind == "fsdp2" or launch.parallelism.tensor > 1
    moving = _of_fsdp2(recipe, shapes, launch, device) if sharded else Moving()
    if launch.parallelism.tokens > 1:
        _add_exchange(moving, recipe, config, batch)
    return moving


def _add_exchange(moving: Moving, recipe: Recipe, config: PretrainedConfig, batch: HeaviestBatch) -> None:
    """Keys and values of the row's other tokens, which are gathered and put in order; in the backward also their
    gradients, in fp32 (`engine/context_parallel.py`)."""
    layers = layer_configs(config.get_text_config())
    row = 2 * max(map(_key_width, layers)) * sum(batch.documents)  # elements of keys and values
    moving.layer += 2 * row * dtypes(recipe).compute.itemsize
    moving.layer_backward += row * (dtypes(recipe).compute.itemsize + 4)


def _key_width(layer: PretrainedConfig) -> int:
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    return heads * (getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)


def _of_fsdp2(recipe: Recipe, shapes: Shapes, launch: Launch, device: str) -> Moving:
    """A unit is gathered into one buffer and copied from it; its gradients are reduced in fp32, and the buffer for that
    is kept until the next unit's (torch's _fsdp_param_group.py)."""
    sizes, types = launch.parallelism, dtypes(recipe)
    cast = types.compute.itemsize if recipe.train.precision in ("bf16", "fp16", "fp8") else None
    reduced = 4 if cast is not None else types.trained.itemsize
    moving = Moving()
    layer, experts = _units_of_layer(shapes, sizes.expert)
    embedding = [weight for weight in shapes.weights if weight.unit == "embedding"]
    tail = [weight for weight in shapes.weights if weight.unit == "tail"]
    inner = sizes.shard * sizes.tokens
    outer, same = inner * sizes.tensor, sizes.shard // sizes.expert  # same: ranks with the same experts
    gathered = _gathered(layer, cast, inner) + _gathered(experts, cast, same)
    copied = (_gathered(layer, cast, inner) if inner > 1 else 0) + (_gathered(experts, cast, same) if same > 1 else 0)
    moving.layer = gathered + copied
    moving.embedding = _gathered(embedding, cast, outer) * (2 if outer > 1 else 1)
    moving.tail = _gathered(tail, cast, outer) * (2 if outer > 1 else 1)
    root, tower = _around_layers(shapes)
    moving.always = _gathered(root, cast, inner)
    moving.embedding = max(
        moving.embedding, *(_gathered(unit, cast, inner) * (2 if inner > 1 else 1) for unit in tower)
    )
    of_layer, of_experts = _reduced(layer, reduced, inner), _reduced(experts, reduced, same)
    reduction = of_layer + of_experts
    moving.freed_of_layer, moving.freed_of_tail = _gradients([*layer, *experts], cast), _gradients(tail, cast)
    fsdp = launch.config.get("fsdp_config") or {}
    reshards = launch.kind == "fsdp2" and str(fsdp.get("fsdp_reshard_after_forward", True)).lower() != "false"
    moving.stays = 0 if reshards else gathered
    moving.layer_backward = (gathered + copied if reshards else 0) + reduction
    moving.sharded = of_layer // inner + of_experts // same
    moving.sharded_tail = _reduced(tail, reduced, outer) // outer
    moving.layer_end = (gathered if reshards else 0) + reduction + moving.sharded
    moving.tail_end = _reduced(tail, reduced, outer) + moving.sharded_tail
    if launch.offloads_optimizer and device != "cpu":
        moving.sharded = moving.sharded_tail = 0
    return moving


def _units_of_layer(shapes: Shapes, expert: int) -> tuple[list[Weight], list[Weight]]:
    """Returns what is gathered as one unit, and under expert parallel a rank's experts, which are another."""
    layer = [weight for weight in shapes.weights if weight.layer == 0]
    if expert == 1:
        return layer, []
    experts = [replace(w, shape=(w.shape[0] // expert, *w.shape[1:])) for w in layer if w.expert]
    return [weight for weight in layer if not weight.expert], experts


def _around_layers(shapes: Shapes) -> tuple[list[Weight], list[list[Weight]]]:
    """Returns what the root gathers, which stays until the backward has ended, and the units of a tower."""
    units: dict[str, list[Weight]] = {}
    for weight in shapes.weights:
        units.setdefault(weight.unit, []).append(weight)
    known = [units.pop(name, []) for name in ("rest", "layer", "embedding", "tail")]
    return known[0], [*units.values(), []]


def _gathered(unit: Sequence[Weight], cast: int | None, ranks: int) -> int:
    return sum(_padded(weight, ranks) * (cast or weight.size) for weight in unit)


def _reduced(unit: Sequence[Weight], size: int, ranks: int) -> int:
    return sum(_padded(weight, ranks) * size for weight in unit if weight.trains)


def _gradients(unit: Sequence[Weight], cast: int | None) -> int:
    return sum(weight.numel * (cast or weight.size) for weight in unit if weight.trains)


def _padded(weight: Weight, ranks: int) -> int:
    rows, width = weight.shape[0], math.prod(weight.shape[1:])
    return -(-rows // ranks) * ranks * width


def _of_zero(shapes: Shapes, launch: Launch, stage: int) -> Moving:
    moving, bucket = Moving(), 4 * bucket_elements(launch, shapes)
    groups = decay_groups(shapes.weights)
    parts = [4 * -(-sum(weight.numel for weight in group) // launch.processes) for group in groups]
    if stage < 3:
        moving.backward = bucket
        moving.end = 2 * sum(parts)  # this rank's part, in a buffer of its own and as tensors
        moving.optimizer = max(parts, default=0)
        return moving
    size = max((weight.size for weight in shapes.weights), default=4)
    large = [weight for weight in shapes.weights if weight.numel > 100_000]
    live = sum(weight.bytes for weight in large)
    layer = sum(weight.bytes for weight in large if weight.layer == 0)
    moving.always = min(live, (_REUSED_WITHIN + _PREFETCHED) * size + layer)
    moving.end = bucket
    moving.optimizer = 4 * min(10**9, max((sum(-(-w.numel // launch.processes) for w in g) for g in groups), default=0))
    return moving
