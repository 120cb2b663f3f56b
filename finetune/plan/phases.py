"""The peak of each phase of a run on one rank: what its engine keeps and moves (`engine/costs`), and the parts of a
micro-batch (`timeline.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PretrainedConfig

from finetune.engine.costs import Costs, Moving, Shapes, State
from finetune.engine.costs.common import GRADIENTS, layout_of
from finetune.engine.parallelism import Parallelism
from finetune.engine.stages import schedulable_micro_batches
from finetune.models.base_config import dtypes, layer_configs
from finetune.plan.micro_batch import HeaviestBatch, How
from finetune.plan.shapes import shortened
from finetune.plan.timeline import Part, Timeline, timeline_of
from finetune.recipe import Recipe


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
    costs: Costs,
    config: PretrainedConfig,
    rank: int,
    capability: tuple[int, int],
    batch: HeaviestBatch,
    micro_batches: int,
    most: int | None = None,
) -> tuple[dict[str, int], State]:
    """Returns the bytes of tensors at the peak of each phase, and what is kept. Where that is more than `most`, it is
    the only phase, `KEPT`: to weigh a step takes longer than all the rest."""
    recipe, sizes, state = costs.recipe, costs.sizes, costs.state(rank)
    gradients = state.persistent[GRADIENTS] if costs.frees_gradients else 0
    rest = state.device_bytes - gradients
    if most is not None and rest > most:
        return {KEPT: rest}, state
    parts = timeline_of(recipe, config, of_rank(batch, sizes), how_of(costs, capability, micro_batches))
    moving = costs.moving()
    if sizes.tokens > 1:
        _add_exchange(moving, recipe, config, batch)
    walk = Peaks(rest, {"load": costs.load(state)})
    stage = Stage.of(costs.shapes, sizes, rank, shortened(config)[1])
    walk.now += gradients if costs.begins_with_gradients(micro_batches) else 0
    walk.now += moving.always + stage.in_flight(sizes, micro_batches, parts, rank)
    if recipe.optimizer.in_backward:
        moving.freed_of_layer = moving.freed_of_tail = 0
    # HSDP keeps what it sums over replicas until the end of a backward, next to what it adds that to.
    first = (micro_batches == 1 or sizes.replicate > 1) and not recipe.optimizer.in_backward
    _micro_batch(walk, parts, stage, moving, first)
    walk.reach("reduction", moving.end)
    walk.now = rest + gradients
    walk.reach("optimizer", max(moving.optimizer, costs.norm_buffer()))
    walk.now = rest
    _without_gradients(walk, parts, moving, stage)
    walk.reach("checkpoint", 0)
    walk.reach("save", costs.whole_tensor())
    return walk.phases, state


def how_of(costs: Costs, capability: tuple[int, int], micro_batches: int) -> How:
    return How(
        device=costs.device,
        capability=capability,
        casts_weights=costs.casts_weights,
        keeps_inputs_alone=costs.keeps_inputs_alone,
        gradients_there=costs.gradients_there(micro_batches),
        drops_gradients=costs.recipe.optimizer.in_backward,
        tensor=costs.sizes.tensor,
        expert=costs.sizes.expert,
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

    def in_flight(self, sizes: Parallelism, micro_batches: int, parts: Timeline, rank: int) -> int:
        """Returns what the forwards before this one keep: a pipeline runs some before their backwards."""
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


# --- rows that ranks share


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
