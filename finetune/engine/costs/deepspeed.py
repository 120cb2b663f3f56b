"""Costs of `engine/zero.py`: DeepSpeed's flat buffers (stages 1 and 2), and its ranges of each weight (stage 3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from finetune.engine.costs.common import (
    BUFFERS,
    COPIES,
    COPIES_OF_GRADIENTS,
    GRADIENTS,
    OPTIMIZER,
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
)

PERSISTENT = 100_000  # elements: weights up to this size stay gathered under stage 3; DeepSpeed's default, as below
_BUCKET, _SUB_GROUP = 500_000_000, 1_000_000_000  # elements
_NORMED = 250_000_000  # elements of a gradient that stage 3 casts to fp64 at a time
_REUSED_WITHIN, _PREFETCHED = 500_000_000, 50_000_000  # elements that stage 3 keeps gathered, and prefetches


class ZeroCosts(Costs):
    @property
    def bucket_elements(self) -> int:
        """Returns the number of gradients reduced at a time; see `Zero._limit_buckets`."""
        trained = sum(weight.numel for weight in self.shapes.weights if weight.trains)
        size = (self.launch.deepspeed.get("zero_optimization") or {}).get("reduce_bucket_size", _BUCKET)
        return min(int(size), trained) if isinstance(size, int | float) else trained

    @property
    def decay_groups(self) -> list[list[Weight]]:
        """Returns matrices and vectors, those for images and for Muon separately, as `training/optim.py` does."""
        groups: dict[tuple[bool, bool, bool], list[Weight]] = {}
        of_muon = {weight.name for weight in self.orthogonalized}
        for weight in self.shapes.weights:
            if weight.trains:
                kind = weight.name not in of_muon, weight.of_media, len(weight.shape) < 2
                groups.setdefault(kind, []).append(weight)
        return [groups[key] for key in sorted(groups)]

    # --- memory

    @property
    def reads_everywhere(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.launch.zero_stage == 3 and any(weight.packed for weight in self.shapes.weights)

    @property
    def keeps_inputs_alone(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.launch.zero_stage == 3

    @property
    def frees_gradients(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.launch.zero_stage < 3

    def gradients_there(self, micro_batches: int) -> bool:
        return not self.recipe.optimizer.in_backward

    def state(self, rank: int) -> State:
        section, shapes = self.launch.deepspeed, self.shapes
        state = self._stage_3() if self.launch.zero_stage == 3 else self._flat(rank)
        if "nvme" in (section.get("offload_optimizer_device"), section.get("offload_param_device")):
            state.disk = 12 * sum(weight.numel for weight in shapes.weights if weight.trains) // self.launch.processes
        scales = sum(weight.scales for weight in shapes.weights)
        state.persistent[WEIGHTS] += scales + shapes.buffers + shapes.buffers_of_layer * shapes.layers
        return state

    def _flat(self, rank: int) -> State:
        """Returns the state of stages 1 and 2: a buffer of trained weights per group, padded to 2 per rank."""
        state, ranks, weights = State(), self.launch.processes, self.shapes.weights
        state.persistent[WEIGHTS] = sum(weight.bytes for weight in weights if not weight.trains)
        optimizer = gradients = 0
        for group in self.decay_groups:
            numel = sum(weight.numel for weight in group)
            flat = -(-numel // (2 * ranks)) * 2 * ranks
            part = flat // ranks
            state.persistent[WEIGHTS] += 4 * flat
            optimizer += 4 * part + self._of_flat(group, part)
            # With offload the gradients of master weights are in the host's memory instead.
            offloads = self.launch.offloads_optimizer
            gradients += 4 * (part if offloads else _touched(group, rank * part, (rank + 1) * part))
        if self.is_away:
            state.host = optimizer + gradients
            # `temp_grad_buffer_for_gpu_offload`
            state.persistent[BUFFERS] = max((weight.bytes for weight in weights if weight.trains), default=0)
        else:
            state.persistent[GRADIENTS], state.persistent[OPTIMIZER] = gradients, optimizer
        return state

    def _stage_3(self) -> State:
        """Returns the state of stage 3: equal ranges of each weight, the last one padded; small weights also whole."""
        state, ranks, weights = State(), self.launch.processes, self.shapes.weights
        parts = [(weight, -(-weight.numel // ranks)) for weight in weights]
        state.persistent[WEIGHTS] = sum(part * weight.size for weight, part in parts)
        optimizer = 0
        for group in self.decay_groups:
            part = sum(-(-weight.numel // ranks) for weight in group)
            groups = max(1, -(-part // _SUB_GROUP))
            optimizer += 4 * part + self._of_flat(group, part) + 4 * (groups - 1)
        gradients = sum(4 * part for weight, part in parts if weight.trains)
        state.persistent[BUFFERS] = 4 * self.bucket_elements
        state.persistent[BUFFERS] += sum(w.bytes for w in weights if w.numel <= PERSISTENT and ranks > 1)
        if self.is_away:
            params_away = self.launch.deepspeed.get("offload_param_device") in ("cpu", "nvme")
            trained = sum(part * weight.size for weight, part in parts if weight.trains)
            state.host = optimizer + gradients + (state.persistent[WEIGHTS] if params_away else 0) + trained
            state.persistent[WEIGHTS] = 0 if params_away else state.persistent[WEIGHTS]
        else:
            state.persistent[GRADIENTS], state.persistent[OPTIMIZER] = gradients, optimizer
        return state

    def initial_weights(self, rank: int) -> int:
        """Returns the bytes of this rank's range of master weights, without what pads it: of each group, under stage 3
        of each weight."""
        if self.launch.zero_stage == 3:
            sizes, unit = [weight.numel for weight in self.shapes.weights if weight.trains], 1
        else:
            sizes, unit = [sum(weight.numel for weight in group) for group in self.decay_groups], 2
        parts = [(numel, unit * -(-numel // (unit * self.launch.processes))) for numel in sizes]
        return 4 * sum(max(0, min(part, numel - rank * part)) for numel, part in parts)

    def _of_flat(self, group: list[Weight], numel: int) -> int:
        weight = replace(group[0], size=4)  # one of its kind
        return sum(self.optimizer_bytes([Shard(weight, numel, numel)], "cpu"))

    def moving(self, rank: int) -> Moving:
        moving, bucket, ranks = Moving(), 4 * self.bucket_elements, self.launch.processes
        groups = [[weight.numel for weight in group] for group in self.decay_groups]
        if self.launch.zero_stage < 3:
            parts = [4 * -(-sum(group) // ranks) for group in groups]
            moving.backward = bucket
            moving.end = 2 * sum(parts)  # this rank's part, in a buffer and as tensors
            moving.optimizer = max(parts, default=0)
            return moving
        weights = self.shapes.weights
        size = max((weight.size for weight in weights), default=4)
        large = [weight for weight in weights if weight.numel > PERSISTENT]
        live, most = sum(weight.bytes for weight in large), (_REUSED_WITHIN + _PREFETCHED) * size
        most += sum(weight.bytes for weight in large if weight.layer == 0)
        moving.always = min(live, most)
        # A large embedding is freed after its forward, unless it is the head as well, or has the last backward of all:
        # if it trains, or layers are recomputed, for which transformers gives its output a gradient.
        is_tied = not any(weight.unit == "embedding" for weight in weights)
        of_embedding = [weight for weight in weights if weight.unit == ("tail" if is_tied else "embedding")]
        kept = sum(weight.bytes for weight in of_embedding if weight.numel > PERSISTENT)
        if not self.recipe.train.activation_checkpointing and not any(weight.trains for weight in of_embedding):
            moving.embedding, kept = (0 if is_tied else kept), 0
            moving.always = min(live - moving.embedding, most)
        moving.end = bucket
        if bucket >= 4 * sum(map(sum, groups)):  # all gradients, reduced when the other weights have been freed
            moving.end -= moving.always - min(moving.always, kept)
        if self.device == "cpu":  # gloo reduces a copy (torch's ProcessGroupGloo.cpp)
            moving.end += bucket
        if self.is_away:  # a gradient on the device, fp32, and what its norm reads (`_constant_buffered_norm2`)
            part = max((-(-n // ranks) for group in groups for n in group), default=0)
            moving.end += 4 * part + 8 * min(_NORMED, part)
        moving.optimizer = 4 * min(_SUB_GROUP, max((sum(-(-n // ranks) for n in group) for group in groups), default=0))
        return moving

    def load(self, state: State) -> int:
        """Returns the bytes of a second copy of the trained weights; under stage 3 of the master weights."""
        weights, trained = state.persistent[WEIGHTS], [weight for weight in self.shapes.weights if weight.trains]
        if self.launch.zero_stage < 3:
            return weights + sum(weight.bytes for weight in trained)
        master = sum(4 * -(-weight.numel // self.launch.processes) for weight in trained)
        return weights + master + state.persistent[GRADIENTS] + 4 * self.bucket_elements

    def norm_buffer(self) -> int:
        return 0

    def whole_tensor(self) -> int:
        if self.launch.zero_stage < 3:
            return 0
        full = self.recipe.mode == "full"
        return max(weight.bytes for weight in self.shapes.weights if weight.trains or full)

    # --- time

    def host_operators(self, model: ModelSize) -> float:
        if self.launch.zero_stage < 3:
            return 10.0 * model.tensors
        return 42.0 * model.weights * (1.5 if self.recipe.train.activation_checkpointing else 1.0)

    @property
    def owners(self) -> int:
        return self.sizes.processes

    def transfers_of_weights(self, model: ModelSize, micro_batches: int) -> Iterator[Transfer]:
        """Yields transfers. Stages 1 and 2 reduce every micro-batch on every rank, keep a part
        (`allreduce_and_scatter`), and gather the stepped weights. Stage 3 gathers a layer once more for its
        recomputation."""
        ranks, times, units = self.sizes.processes, micro_batches, model.gathered
        if ranks == 1:
            return
        yield from self.shared_matrices(ranks, ranks)
        weights, trained = model.parameters * self.weight_bytes(), 4 * model.trained
        copied = times * trained * COPIES_OF_GRADIENTS
        if self.launch.zero_stage < 3:
            yield Transfer("all-reduce", times * all_reduce(ranks, trained), times * units, ranks, copied=copied)
            yield Transfer("all-gather", one_way(ranks, trained), 1, ranks, overlaps=False)
            return
        gathered = times * weights * (3 if self.recipe.train.activation_checkpointing else 2)
        yield Transfer("all-gather", one_way(ranks, gathered), 2 * times * units, ranks, copied=gathered * COPIES)
        yield Transfer("reduce-scatter", times * one_way(ranks, trained), times * units, ranks, copied=copied)

    def transfers_to_host(self, model: ModelSize, micro_batches: int) -> Iterator[Transfer]:
        """Yields transfers. Gradients travel down with each micro-batch, and up again to be added on the device.
        Stepped weights travel up once a step, those that stage 3 keeps in the host's memory for each gather."""
        if not self.is_away:
            return
        trained = 4 * model.trained / self.owners
        yield Transfer("host", 2 * micro_batches * trained, 0, 0)
        if self.launch.zero_stage == 3 and self.launch.deepspeed.get("offload_param_device") in ("cpu", "nvme"):
            gathers = 3 if self.recipe.train.activation_checkpointing else 2
            own = model.parameters * self.weight_bytes() / self.owners
            yield Transfer("host", micro_batches * gathers * own, 0, 0)
        else:
            yield Transfer("host", trained, 0, 0, overlaps=False)


def _touched(group: Sequence[Weight], begin: int, end: int) -> int:
    """Returns the elements of weights, kept whole, and of padding that overlap a range of a flat group."""
    total = first = 0
    for weight in group:
        if first < end and first + weight.numel > begin:
            total += weight.numel
        first += weight.numel
    return total + max(0, end - max(first, begin))
