"""Shared parts of every backend's costs: weights as shapes, a rank's shards of them, and the interface."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from finetune.engine.launch import Launch
from finetune.engine.muon import iteration_flops
from finetune.engine.parallelism import Parallelism
from finetune.engine.stages import Layout, stage_bounds
from finetune.models.mtp import in_head
from finetune.recipe import Recipe

WEIGHTS, GRADIENTS, OPTIMIZER, BUFFERS = "weights", "gradients", "optimizer state", "buffers"
PARTS = (WEIGHTS, GRADIENTS, OPTIMIZER, BUFFERS)
INITIAL, TEACHER = "initial weights", "teacher"  # parts of few runs
NORM_CHUNK = 2**18  # elements of `optimizer_step.squared_norm`'s buffer, fp64, on the CPU
# Passes over gathered weights, and over gradients, in new memory: an engine's copies around its collectives, on CPUs.
COPIES, COPIES_OF_GRADIENTS = 2.2, 7.0
_BUCKET = 25 * 2**20  # bytes per bucket of DDP's gradients


# --- a model as shapes


@dataclass(frozen=True)
class Weight:
    """A parameter."""

    name: str
    shape: tuple[int, ...]
    size: int  # bytes per element
    trains: bool
    layer: int | None  # decoder layer
    unit: str  # gathered together: layer, embedding, tail (final norm and head, tied embedding), rest, or a
    # module of the tower that must not be split, by its path
    packed: int = 0  # quantized weights that its elements hold; 0: not packed
    scales: int = 0  # bytes of the tensors that unpack them
    parts: int = 1  # of the parameter, of which this is one: ranks of a tensor parallel group
    expert: bool = False  # dimension 0 counts experts
    rows: int = 0  # of all tensor parallel ranks, whose parts of dimension 0 differ by one if not divisible; 0: of one
    partial: bool = False  # whole on each of these ranks, which add up their gradients
    table: bool = False  # see `ParameterRoles`, as for the next
    of_media: bool = False

    @functools.cached_property  # read many times
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.size

    @property
    def is_hidden_matrix(self) -> bool:
        """Returns whether Muon steps it, if it trains."""
        return len(self.shape) == 2 and not self.table


@dataclass(frozen=True)
class Shapes:
    weights: tuple[Weight, ...]
    buffers: int  # bytes of buffers outside layers: rotary frequencies
    buffers_of_layer: int
    layers: int
    splits_tokens: bool = False  # tensor parallel ranks have some of the tokens between their matrices


@dataclass(frozen=True)
class ModelSize:
    """Counts of a full model."""

    parameters: int
    trained: int
    ends: int  # parameters outside of layers: embedding and head
    tail: int  # parameters of final norm and head
    experts: int
    weights: int  # tensors
    tensors: int  # trained
    gathered: int  # gathered one by one by DeepSpeed's stage 3
    layers: int
    hidden: int
    queries: int  # width of all heads
    keys: int
    experts_per_token: int  # 0: no experts


# --- state and shards of a rank


@dataclass
class State:
    """Bytes that one rank keeps between steps.

    weights             and buffers, scales of packed weights
    gradients           before the optimizer's step
    optimizer state     master weights as well
    buffers             of an engine, for its lifetime: DeepSpeed's bucket, its gathered small weights
    initial weights     for `objective.kl`, in the host's memory: on processors only
    teacher             of the student's own samples, whole
    """

    persistent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    host: int = 0
    disk: int = 0
    initial: int = 0  # of the host's memory: initial weights

    @property
    def device_bytes(self) -> int:
        return sum(self.persistent.values())


@dataclass(frozen=True)
class Shard:
    """A rank's part of a weight."""

    weight: Weight
    numel: int  # elements of its own
    padded: int  # elements of the memory that holds them


OptimizerBytes = Callable[[Sequence[Shard], str], tuple[int, int]]  # for a device's type: bytes there, and paged ones


@dataclass
class Moving:
    """Bytes on the device in addition to kept state and a micro-batch's own, by phase."""

    always: int = 0  # during forward and backward
    backward: int = 0  # during the backward
    embedding: int = 0
    tail: int = 0  # from the head's forward to the end of its backward
    layer: int = 0  # a layer's forward
    layer_backward: int = 0
    layer_end: int = 0  # above the level after a layer's backward
    tail_end: int = 0
    freed_of_layer: int = 0  # gradients in the timeline that the end of a layer's backward replaces
    freed_of_tail: int = 0
    sharded: int = 0  # bytes per layer, in the first micro-batch
    sharded_tail: int = 0
    stays: int = 0  # bytes per layer: weights that stay gathered from its forward to its backward
    end: int = 0  # after a backward: the last reduction
    optimizer: int = 0


@dataclass(frozen=True)
class Transfer:
    """Bytes that one rank sends in a step, with the algorithm that sends least
    (https://andrew.gibiansky.com/blog/machine-learning/baidu-allreduce/). Headers, sizes and small reductions (loss,
    norm) are left out. Compared with what gloo sent (benchmarks/communication.py)."""

    kind: Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send", "host"]
    moved: float
    collectives: float
    ranks: int  # ranks that communicate; 0: between device and host
    overlaps: bool = True  # overlaps with compute; else compute waits for it
    copied: float = 0.0  # bytes of copies around it
    stride: int = 1  # from a rank of the group to the next: over machines each sends by its own share of the network

    def members(self, per_machine: int) -> int:
        """Returns how many devices of a machine carry the same collective over the network. An exchange of each with
        each, and a send, has no one to share its bytes with."""
        alone = self.kind in ("all-to-all", "send")
        return 1 if alone else max(1, per_machine // self.stride)


def all_reduce(ranks: int, size: float) -> float:
    return 2 * (ranks - 1) / ranks * size


def one_way(ranks: int, size: float) -> float:
    """Returns the bytes sent by an all-gather to `size`, a reduce-scatter from `size`, or an all-to-all of `size`."""
    return (ranks - 1) / ranks * size


@dataclass(frozen=True)
class Costs(abc.ABC):
    """Costs of one launch."""

    recipe: Recipe
    launch: Launch
    shapes: Shapes
    device: str
    optimizer_bytes: OptimizerBytes

    # --- memory

    casts_weights = False  # gathers weights in the compute type
    keeps_inputs_alone = False  # linear layers keep no casts of their weights
    frees_gradients = True  # after the step; else they are one buffer for the engine's lifetime
    loads_by_copies = False  # of trained and packed weights, on the rank that reads them
    reads_everywhere = False  # each rank has all weights in the host's memory until they are sharded

    @property
    def sizes(self) -> Parallelism:
        return self.launch.parallelism

    @property
    def is_away(self) -> bool:
        """Returns whether the optimizer's state is in the host's memory."""
        return self.launch.offloads_optimizer and self.device != "cpu"

    def shard(self, weight: Weight, place: dict[str, int]) -> Shard:
        """Returns a rank's part of a weight. place: coordinates of the rank."""
        return Shard(weight, weight.numel, weight.numel)

    def state(self, rank: int) -> State:
        kept, place = weights_of_stage(self.shapes, self.sizes, rank), self.sizes.coordinates(rank)
        shards = [self.shard(weight, place) for weight in kept]
        trained = [shard for shard in shards if shard.weight.trains]
        layers = {weight.layer for weight in kept if weight.layer is not None}
        state = State()
        state.persistent[WEIGHTS] = sum(shard.padded * shard.weight.size for shard in shards)
        if not self.recipe.optimizer.in_backward:
            state.persistent[GRADIENTS] = sum(shard.padded * shard.weight.size for shard in trained)
        state.persistent[OPTIMIZER], state.host = self.optimizer_bytes(trained, self.device)
        if self.is_away:
            state.host += state.device_bytes
            state.persistent = dict.fromkeys(state.persistent, 0)
        scales = sum(weight.scales for weight in kept)
        state.persistent[WEIGHTS] += scales + self.shapes.buffers + self.shapes.buffers_of_layer * len(layers)
        return state

    def initial_weights(self, rank: int) -> int:
        """Returns the bytes that `engine/kept_weights.py` keeps in the host's memory: what a rank trains, as it is
        stepped."""
        place = self.sizes.coordinates(rank)
        trained = [weight for weight in weights_of_stage(self.shapes, self.sizes, rank) if weight.trains]
        return sum(self.shard(weight, place).numel * weight.size for weight in trained)

    def gradients_there(self, micro_batches: int) -> bool:
        """Returns whether a backward of the timeline adds to full gradients rather than allocating them."""
        return False

    def begins_with_gradients(self, micro_batches: int) -> bool:
        """Returns whether a rank's gradients exist before a step's heaviest micro-batch."""
        return micro_batches > 1 and not self.recipe.optimizer.in_backward

    def moving(self, rank: int) -> Moving:
        return Moving()

    def load(self, state: State) -> int:
        """Returns the bytes at the peak of loading and wrapping."""
        return state.persistent[WEIGHTS]

    def norm_buffer(self) -> int:
        """Returns the bytes used to sum the gradients' norm, in fp64 on a CPU."""
        trained = max((weight.numel for weight in self.shapes.weights if weight.trains), default=0)
        return 8 * min(NORM_CHUNK, trained) if self.device == "cpu" else 0

    @property
    def orthogonalized(self) -> list[Weight]:
        """Returns the matrices that Muon steps, none with another optimizer."""
        uses_muon = self.recipe.optimizer.name == "muon"
        return [weight for weight in self.shapes.weights if uses_muon and weight.trains and weight.is_hidden_matrix]

    def orthogonalizing(self) -> int:
        """Returns the bytes to orthogonalize the largest matrix (`engine/muon.py`): its direction in fp32, or a bf16
        copy and its parts; two bf16 matrices of the iteration and two squares of its shorter side."""
        ranks = self.sizes.tensor
        sizes = [(w.numel * ranks, min(max(w.shape), min(w.shape) * ranks)) for w in self.orthogonalized]
        return max(((4 + 2 * 2) * numel + 2 * 2 * side**2 for numel, side in sizes), default=0)

    def orthogonalizing_flops(self) -> float:
        """Returns the FLOPs of Muon's iteration on the busiest rank in a step: those that share a stage's weights take
        turns, the largest matrices first."""
        ranks, tensor = self.owners // self.sizes.pipeline, self.sizes.tensor
        sides = [(min(max(w.shape), min(w.shape) * tensor), w.numel * tensor) for w in self.orthogonalized]
        return sum(sorted((iteration_flops(side, numel // side) for side, numel in sides), reverse=True)[::ranks])

    def shared_matrices(self, ranks: int, parts: int) -> Iterator[Transfer]:
        """Yields the exchange of whole matrices: `ranks` gather them in bf16 and send them back. parts: ranks that
        divide a matrix as `shapes` has it."""
        if ranks > 1 and (matrices := self.orthogonalized):
            own = 2 * 2 * sum(weight.numel for weight in matrices) / parts
            rounds = -(-len(matrices) // ranks)
            yield Transfer("all-to-all", one_way(ranks, own), 2 * rounds, ranks, overlaps=False)

    def whole_tensor(self) -> int:
        """Returns the bytes of the result's largest tensor on the device, if it is gathered there."""
        return 0

    # --- time

    hides = 0.5  # share of compute that hides communication; assumed

    def host_operators(self, model: ModelSize) -> float:
        """Returns the work of an engine's hooks in operators per micro-batch (scripts/planner/plan_times.py)."""
        return 0.0

    @property
    def owners(self) -> int:
        """Returns the number of ranks that step different parts of the weights."""
        return self.sizes.shard * self.sizes.tensor * self.sizes.pipeline

    def weight_bytes(self) -> float:
        """Returns the bytes per weight when gathered."""
        if self.recipe.mode == "qlora":
            return 0.55
        if self.recipe.mode == "lora":
            return 4 if self.recipe.train.precision == "fp32" and self.recipe.model.dtype in ("auto", "float32") else 2
        return 4

    @abc.abstractmethod
    def transfers_of_weights(self, model: ModelSize, micro_batches: int) -> Iterator[Transfer]:
        """Yields the transfers that keep the ranks' weights equal."""

    def transfers_to_host(self, model: ModelSize, micro_batches: int) -> Iterator[Transfer]:
        """Yields the transfers between a device and the host's memory, if the optimizer is there."""
        yield from ()

    def host_additions(self, model: ModelSize, micro_batches: int) -> float:
        """Returns the elements of gradients that a rank's processor adds up in a step."""
        return 0.0

    def replicas(self, model: ModelSize) -> Iterator[Transfer]:
        """Yields the all-reduces of DDP's buckets."""
        trained = 4 * model.trained / (self.sizes.tensor * self.sizes.pipeline)
        if (ranks := self.sizes.data * self.sizes.tokens) > 1:
            buckets = max(1.0, trained / _BUCKET)
            stride = self.sizes.tensor
            yield Transfer("all-reduce", all_reduce(ranks, trained), buckets, self.sizes.processes, stride=stride)

    def transfers_of_rows(
        self, model: ModelSize, micro_batches: int, tokens: float, targets: float
    ) -> Iterator[Transfer]:
        """Yields transfers between ranks that share rows; compute waits for them. tokens: of these ranks, per step;
        targets: those that the head reads."""
        sizes, passes = self.sizes, 2 + bool(self.recipe.train.activation_checkpointing)  # forwards and the backward
        element = 4 if self.recipe.train.precision == "fp32" else 2
        layers, here = model.layers / sizes.pipeline, tokens / sizes.tokens
        hidden, keys, times = here * model.hidden * element, 2 * model.keys * element, layers * micro_batches
        wait = functools.partial(Transfer, overlaps=False)
        if (n := sizes.tensor) > 1:  # the embedding in a forward, the head's input in the backward
            yield wait("all-reduce", all_reduce(n, hidden) * (1 + targets / tokens), 2 * micro_batches, n)
            if not self.shapes.splits_tokens:  # twice in a layer
                yield wait("all-reduce", layers * passes * 2 * all_reduce(n, hidden), 2 * passes * times, n)
            else:  # the same in two halves; and at the ends of the layers of a stage, forward and backward
                stages = sizes.stages_per_rank * (1 + (self.recipe.mode == "full" or sizes.pipeline > 1))
                yield wait("all-gather", layers * passes * 2 * one_way(n, hidden), 2 * passes * times, n)
                yield wait("reduce-scatter", layers * passes * 2 * one_way(n, hidden), 2 * passes * times, n)
                yield wait("all-gather", stages * one_way(n, hidden), stages * micro_batches, n)
            shards = sizes.pipeline * sizes.shard * sizes.tokens
            partial = 4 * sum(weight.numel for weight in self.shapes.weights if weight.partial and weight.trains)
            if partial:
                yield wait("all-reduce", all_reduce(n, partial / shards), max(1.0, partial / shards / _BUCKET), n)
        neighbours = sizes.tensor * sizes.tokens
        if (n := sizes.context) > 1:
            row = layers * one_way(n, here * n * keys)
            if sizes.exchange == "allgather":
                yield wait("all-gather", passes * row, passes * times, neighbours)
                yield wait("reduce-scatter", row, times, neighbours)
            else:
                yield wait("send", (passes + 1) * row, (passes + 1) * times, neighbours)
        if (n := sizes.sequence) > 1:
            heads = here * (2 * model.queries * element + keys)
            yield wait("all-to-all", layers * passes * one_way(n, heads), 4 * passes * times, neighbours)
        if (n := sizes.expert) > 1:
            routed = layers * passes * 2 * one_way(n, hidden * model.experts_per_token)
            yield wait("all-to-all", routed, 2 * passes * times, neighbours * sizes.shard)
        if (n := sizes.pipeline) > 1:
            borders = (n * sizes.stages_per_rank - 1) / n  # per rank, on average
            yield wait("send", 2 * borders * hidden, 2 * micro_batches * sizes.stages_per_rank, sizes.processes)
            # Embedding and head can be one matrix, whose gradients the first and the last stage add up; and a head that
            # predicts ahead has the embedding in the last stage.
            weights = self.shapes.weights
            if any(in_head(weight.name) for weight in weights):
                weights = tuple(weight for weight in weights if "embed_tokens" in weight.name)
            elif any(weight.unit == "embedding" for weight in weights):
                weights = ()
            if shared := sum(weight.numel for weight in weights if weight.table and weight.trains):
                tied = 4 * shared / (sizes.shard * sizes.tokens)
                yield wait("all-reduce", all_reduce(2, tied), max(1.0, tied / _BUCKET), sizes.processes)
        if self.recipe.train.precision == "fp16":
            yield from self._sums_that_overflow(micro_batches)

    def _sums_that_overflow(self, micro_batches: int) -> Iterator[Transfer]:
        """Yields those of `engine/overflow.py`: the gradients of matrices, in 16 bits, for every micro-batch."""
        sizes, matrices = self.sizes, [w for w in self.shapes.weights if w.trains and not w.table and len(w.shape) > 1]
        partial = [weight for weight in matrices if weight.partial]
        neighbours = sizes.tensor * sizes.tokens
        for n, summed in ((sizes.context, matrices), (sizes.sequence, matrices), (sizes.tensor, partial)):
            if n > 1 and summed:
                moved, times = 2 * sum(weight.numel for weight in summed), micro_batches / sizes.pipeline
                yield Transfer(
                    "all-reduce", times * all_reduce(n, moved), times * len(summed), neighbours, overlaps=False
                )


class ReplicatedCosts(Costs):
    """Costs of `engine/ddp.py`: every rank has all weights, and gradients are summed in permanent buckets."""

    def gradients_there(self, micro_batches: int) -> bool:
        # CUDA graphs keep them, if they are possible.
        train = self.recipe.train
        graphs = train.graphs == "auto" and self.device == "cuda" and not train.activation_checkpointing
        several = self.launch.processes > 1 or micro_batches > 1 or graphs
        return several and not self.recipe.optimizer.in_backward

    def begins_with_gradients(self, micro_batches: int) -> bool:
        return self.gradients_there(micro_batches)

    def transfers_of_weights(self, model: ModelSize, micro_batches: int) -> Iterator[Transfer]:
        yield from self.replicas(model)


# --- pipelines: ranks and weights


def different_ranks(sizes: Parallelism) -> Sequence[int]:
    """Returns the ranks that may differ in memory and work: one per pipeline stage, else the first."""
    return range(0, sizes.processes, sizes.processes // sizes.pipeline)


def layout_of(shapes: Shapes, sizes: Parallelism) -> Layout:
    """Returns the stages of a pipeline; from the model's own weights alone, as the engine does."""
    base = [weight for weight in shapes.weights if "lora_" not in weight.name and "modules_to_save" not in weight.name]
    numel = [0] * shapes.layers
    first = last = 0
    for weight in base:
        count = (weight.packed or weight.numel) * weight.parts
        if weight.rows:  # parts of the ranks may differ by one
            count = weight.rows * math.prod(weight.shape[1:])
        if weight.layer is not None:
            numel[weight.layer] += count
        first += count if "embed_tokens" in weight.name else 0
        last += count if weight.unit == "tail" or in_head(weight.name) else 0
    return Layout(stage_bounds(tuple(numel), sizes.pipeline * sizes.stages_per_rank, first, last), sizes.pipeline)


def weights_of_stage(shapes: Shapes, sizes: Parallelism, rank: int) -> Sequence[Weight]:
    """Returns the weights of a pipeline rank; a matrix that is embedding and head is at both ends, as is the embedding
    of a model whose head predicts ahead."""
    if sizes.pipeline == 1:
        return shapes.weights
    layout, place = layout_of(shapes, sizes), sizes.coordinates(rank)["pipeline"]
    layers = layout.layers_of(place)
    first, last = place == 0, place == layout.rank_of(layout.stages - 1)
    ahead = any(in_head(weight.name) for weight in shapes.weights)

    def is_here(weight: Weight) -> bool:
        if "embed_tokens" in weight.name and (first or (last and ahead)):
            return True
        return weight.layer in layers or (last and (weight.unit == "tail" or in_head(weight.name)))

    return [weight for weight in shapes.weights if is_here(weight)]
