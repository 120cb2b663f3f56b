"""Costs of `engine/fsdp2.py`: units of weights are gathered when needed, gradients reduced into shards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from finetune.engine.costs.common import (
    COPIES,
    COPIES_OF_GRADIENTS,
    WEIGHTS,
    Costs,
    ModelSize,
    Moving,
    Shard,
    State,
    Transfer,
    Weight,
    all_reduce,
    one_way,
    weights_of_stage,
)
from finetune.models.base_config import dtypes


class ShardedCosts(Costs):
    """Costs of FSDP2, in stages of a pipeline as well; with tensor parallel replicas alone, each group acts as one
    rank."""

    @property
    def is_fsdp(self) -> bool:
        return self.launch.kind == "fsdp2"

    @property
    def once_a_step(self) -> bool:
        """Returns whether a pipeline's stage is gathered once a step, and its gradients reduced once."""
        return self.sizes.pipeline > 1 and not self.launch.frees_gathered

    # --- memory

    loads_by_copies = True

    @property
    def casts_weights(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.recipe.train.precision in ("bf16", "fp8")

    def shard(self, weight: Weight, place: dict[str, int]) -> Shard:
        """Returns rows of dimension 0, as `torch.chunk` splits them; FSDP2 allocates as many as the first rank has."""
        sizes, rows, width = self.sizes, weight.shape[0], math.prod(weight.shape[1:])
        count = sizes.shard * sizes.tokens
        index = place["shard"] * sizes.tokens + place["context"] * sizes.sequence + place["sequence"]
        if weight.expert and sizes.expert > 1:
            rows //= sizes.expert
            count, index = sizes.shard // sizes.expert, place["shard"] // sizes.expert
        elif weight.rows:
            each, more = divmod(weight.rows, sizes.tensor)  # as `TensorGroup.shard`
            rows = each + (place["tensor"] < more)
        each = -(-rows // count)
        own = min(each, max(0, rows - index * each))
        return Shard(weight, own * width, each * width)

    def begins_with_gradients(self, micro_batches: int) -> bool:
        return super().begins_with_gradients(micro_batches) and not self.once_a_step

    def moving(self, rank: int) -> Moving:
        """Returns the moving bytes. A unit is gathered into one buffer and copied from it; its gradients are reduced in
        fp32, and the buffer for that is kept until the next unit's (torch's _fsdp_param_group.py)."""
        sizes, types = self.sizes, dtypes(self.recipe)
        cast = types.compute.itemsize if self.casts_weights else None
        reduced = 4 if cast is not None else types.trained.itemsize
        moving = Moving()
        # A layer's weights are one unit, under expert parallel this rank's experts a second one.
        layer = [weight for weight in self.shapes.weights if weight.layer == 0]
        experts: list[Weight] = []
        if (divided := sizes.expert) > 1:
            own = [weight for weight in layer if weight.expert]
            experts = [replace(w, shape=(w.shape[0] // divided, *w.shape[1:])) for w in own]
            layer = [weight for weight in layer if not weight.expert]
        units: dict[str, list[Weight]] = {"rest": [], "layer": [], "embedding": [], "tail": []}
        for weight in self.shapes.weights:
            units.setdefault(weight.unit, []).append(weight)
        root, _, embedding, tail, *tower = units.values()  # the root's stay gathered until the backward has ended
        inner, same = sizes.shard * sizes.tokens, sizes.shard // sizes.expert  # same: ranks with the same experts
        gathered = _gathered(layer, cast, inner) + _gathered(experts, cast, same)
        copied = _gathered(layer, cast, inner) if inner > 1 else 0
        copied += _gathered(experts, cast, same) if same > 1 else 0
        moving.layer = gathered + copied
        moving.embedding = _gathered(embedding, cast, inner) * (2 if inner > 1 else 1)
        moving.tail = _gathered(tail, cast, inner) * (2 if inner > 1 else 1)
        moving.always = _gathered(root, cast, inner)
        of_tower = [_gathered(unit, cast, inner) * (2 if inner > 1 else 1) for unit in tower]
        moving.embedding = max(moving.embedding, *of_tower, 0)
        of_layer, of_experts = _reduced(layer, reduced, inner), _reduced(experts, reduced, same)
        reduction = of_layer + of_experts
        moving.freed_of_layer, moving.freed_of_tail = _gradients([*layer, *experts], cast), _gradients(tail, cast)
        reshards = self.launch.frees_gathered
        moving.stays = 0 if reshards else gathered
        moving.layer_backward = (gathered + copied if reshards else 0) + reduction
        moving.sharded = of_layer // inner + of_experts // same
        moving.sharded_tail = _reduced(tail, reduced, inner) // inner
        moving.layer_end = (gathered if reshards else 0) + reduction + moving.sharded
        moving.tail_end = _reduced(tail, reduced, inner) + moving.sharded_tail
        if self.is_away:
            moving.sharded = moving.sharded_tail = 0
        return self.in_kept_stage(moving, rank, cast, reduced) if self.once_a_step else moving

    def in_kept_stage(self, moving: Moving, rank: int, cast: int | None, reduced: int) -> Moving:
        """Returns the moving bytes of a stage that stays gathered, with sums of unsharded gradients, until the last
        backward of a step: then unit by unit is reduced."""
        sizes, kept = self.sizes, weights_of_stage(self.shapes, self.sizes, rank)
        inner = sizes.shard * sizes.tokens
        own = [replace(w, shape=(w.shape[0] // (sizes.expert if w.expert else 1), *w.shape[1:])) for w in kept]
        whole = _gathered(own, cast, inner) + sum(w.numel * reduced for w in own if w.trains)
        largest = max(moving.layer_end, moving.tail_end)
        return Moving(
            always=whole,
            embedding=moving.embedding // 2,  # into the buffer of a gather, in the first micro-batch
            layer=moving.layer // 2,
            freed_of_layer=moving.freed_of_layer,
            freed_of_tail=moving.freed_of_tail,
            end=largest,
        )

    def load(self, state: State) -> int:
        return state.persistent[WEIGHTS] + self.sizes.tensor * max(weight.bytes for weight in self.shapes.weights)

    def whole_tensor(self) -> int:
        """Gathers the tensor in one more piece."""
        full = self.recipe.mode == "full"
        largest = max(weight.bytes for weight in self.shapes.weights if weight.trains or full)
        return 2 * self.sizes.tensor * largest

    # --- time

    @property
    def hides(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 0.9 if self.is_fsdp else 0.5

    def host_operators(self, model: ModelSize) -> float:
        return (17.0 if self.is_fsdp else 9.0) * model.weights

    @property
    def owners(self) -> int:
        return super().owners * (self.sizes.tokens if self.is_fsdp else 1)

    def weight_bytes(self) -> float:
        casts = self.recipe.mode == "full" and self.is_fsdp and self.recipe.train.precision != "fp32"
        return 2 if casts else super().weight_bytes()

    def transfers_of_weights(self, model: ModelSize, micro_batches: int) -> Iterator[Transfer]:
        """Yields transfers. Each micro-batch gathers for forward and backward, the tail once, and scatters gradients;
        or each step, in a pipeline's stages that stay gathered. Divided experts are separate units."""
        sizes, each, share = self.sizes, self.weight_bytes(), model.trained / model.parameters
        group, gathers, times = sizes.shard * sizes.tokens, 2 if self.is_fsdp else 1, micro_batches
        if self.once_a_step:
            gathers = times = 1
        ranks, divided = group * sizes.tensor, model.experts if sizes.expert > 1 else 0
        own, units = sizes.tensor * sizes.pipeline, model.layers / sizes.pipeline
        layers, ends = (model.parameters - model.ends - divided) / own, model.ends / own
        gathered_ends = gathers * ends - (gathers - 1) * model.tail / own
        n, stride = group, sizes.tensor
        for size, again, count in ((layers, gathers * layers, units), (ends, gathered_ends, 2)):
            if n > 1:
                gathered, reduced = times * again * each, times * size * share * 4
                copies = COPIES * gathered, COPIES_OF_GRADIENTS * reduced
                every = gathers * times * count
                yield Transfer("all-gather", one_way(n, gathered), every, ranks, copied=copies[0], stride=stride)
                yield Transfer(
                    "reduce-scatter", one_way(n, reduced), times * count, ranks, copied=copies[1], stride=stride
                )
        if divided and (n := group // sizes.expert) > 1:
            experts = times * divided / sizes.expert / sizes.pipeline
            every, stride = times * units, sizes.expert
            yield Transfer("all-gather", one_way(n, gathers * experts * each), gathers * every, ranks, stride=stride)
            yield Transfer("reduce-scatter", one_way(n, experts * share * 4), every, ranks, stride=stride)
        if self.is_fsdp and sizes.replicate > 1:
            shard = times * 4 * share * (layers + ends) / group
            every, moved = units * times, all_reduce(sizes.replicate, shard)
            yield Transfer("all-reduce", moved, every, sizes.processes, stride=ranks)
        if not self.is_fsdp:
            yield from self.replicas(model)
        yield from self.shared_matrices(ranks, group)

    def transfers_to_host(self, model: ModelSize, micro_batches: int) -> Iterator[Transfer]:
        """Yields transfers. Shards travel for each gather in the type in which they are kept. Gradients of the first
        micro-batch travel beside the backward; the processor adds later ones to them, and waits for these (torch's
        `foreach_reduce`)."""
        if self.is_fsdp and self.is_away:
            own, gradients = model.parameters / self.owners, 4 * model.trained / self.owners
            yield Transfer("host", 2 * micro_batches * own * super().weight_bytes() + gradients, 0, 0)
            if micro_batches > 1:
                yield Transfer("host", (micro_batches - 1) * gradients, 0, 0, overlaps=False)

    def host_additions(self, model: ModelSize, micro_batches: int) -> float:
        return (micro_batches - 1) * model.trained / self.owners if self.is_fsdp and self.is_away else 0.0


def _gathered(unit: Sequence[Weight], cast: int | None, ranks: int) -> int:
    return sum(_padded(weight, ranks) * (cast or weight.size) for weight in unit)


def _reduced(unit: Sequence[Weight], size: int, ranks: int) -> int:
    return sum(_padded(weight, ranks) * size for weight in unit if weight.trains)


def _gradients(unit: Sequence[Weight], cast: int | None) -> int:
    return sum(weight.numel * (cast or weight.size) for weight in unit if weight.trains)


def _padded(weight: Weight, ranks: int) -> int:
    rows, width = weight.shape[0], math.prod(weight.shape[1:])
    return -(-rows // ranks) * ranks * width
