"""Time of a step, by formula: FLOPs by kind of operator over a device's speed, and communication it waits for.

    products, attention   executed FLOPs (`models/flops.py`) over peak times share
    element-wise          bytes that all other operators read and write, as `timeline.py` runs them
    launches              operators that the host starts: on a CPU all of them, else if the device waits for the host
    unpacking             4-bit weights, and fp32 weights that are cast for each forward
    optimizer             bytes of weights, gradients and moments; on the host's processors under offload; Muon's
                          products
    communication         the part that compute does not hide, by link
    host transfers        the same of weights, gradients and activations that are kept in the host's memory
    bubble                stages of a pipeline that wait for its first and last micro-batches
    data                  wait for rows, which a thread prepares during the step: as in finished runs, if any

Not predicted: evaluations, checkpoints, the start.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PretrainedConfig

from finetune.engine.costs import Costs, ModelSize, Weight
from finetune.engine.costs.common import different_ranks
from finetune.engine.costs.deepspeed import PERSISTENT
from finetune.engine.hardware import CPU, Hardware, Link
from finetune.engine.launch import Launch
from finetune.models.attention import DOCUMENTS
from finetune.models.base_config import dtypes, layer_configs
from finetune.models.flops import ModelFlops, model_flops
from finetune.models.towers import patches_of
from finetune.plan.lengths import RowFacts
from finetune.plan.memory import Stage, how_of, of_rank
from finetune.plan.meter import Work, together
from finetune.plan.micro_batch import HeaviestBatch
from finetune.plan.rollouts import cohorts, longest_prompt, sampling_of
from finetune.plan.shapes import CacheKey, costs_at, shortened, skeleton
from finetune.plan.tables import Machines
from finetune.plan.timeline import timeline_of
from finetune.recipe import Recipe

_BYTES_OF_ADAMW = 28  # of fp32: weight, gradient, two moments read; weight and moments written
_BYTES_OF_8BIT = 16
# Products in 8 bits over those in bf16, dense: 1,979 and 989.5 TFLOP/s in the data sheet of H100 (hardware.yaml).
_FP8_RATE = 2.0
_PACKED = 2.6  # bytes read and written to unpack a weight of 4 bits
# Work of the host that no operator shows, in operators as `Speeds.operator_s` counts them, for each micro-batch. Fitted
# to the fitted cells of scripts/planner/plan_times.py; its blind cells say how well that holds elsewhere.
_OF_MICRO_BATCH = 80.0  # this project's loop
_OF_RECOMPUTED_LAYER = 120.0  # torch's hooks on saved tensors of a checkpoint
_OF_STAGE = 280.0  # a pipeline's schedule, and its sends and receives
_OF_STEPPED = 4.0  # for a trained weight, in clipping and the optimizer, once a step
_FRESH = 2.0**27  # bytes of a pass over new memory, such as an engine's copies around its collectives


@dataclass(frozen=True)
class Shape(ModelSize):
    """Counts of a model that times depend on."""

    flops: ModelFlops

    @classmethod
    def of(
        cls, weights: Sequence[Weight], recipe: Recipe, config: PretrainedConfig, on_cpu: bool, recomputes: bool
    ) -> Shape:
        """weights: of the full model. recomputes: full activation checkpointing."""
        text = config.get_text_config()
        queries, keys = [], []  # widths of each layer, which may differ: the mean of all
        for layer in layer_configs(text):
            heads = getattr(layer, "num_attention_heads", 1) or 1  # hybrids may have none
            size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
            queries.append(heads * size)
            keys.append((getattr(layer, "num_key_value_heads", None) or heads) * size)
        implementation = recipe.model.attention
        if implementation == "auto":
            implementation = DOCUMENTS if on_cpu else "varlen"
        trained = [weight.numel for weight in weights if weight.trains]
        counts = [(weight, weight.packed or weight.numel) for weight in weights]
        return cls(
            parameters=sum(count for _, count in counts),
            trained=sum(trained),
            ends=sum(count for weight, count in counts if weight.layer is None),
            tail=sum(count for weight, count in counts if weight.unit == "tail"),
            experts=sum(count for weight, count in counts if weight.expert),
            weights=len(weights),
            tensors=len(trained),
            gathered=sum(weight.numel > PERSISTENT for weight in weights),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            queries=sum(queries) // len(queries),
            keys=sum(keys) // len(keys),
            experts_per_token=getattr(text, "num_experts_per_tok", 0) or 0,
            flops=flops_of(recipe, config, implementation, recomputes),
        )


def flops_of(recipe: Recipe, config: PretrainedConfig, implementation: str, recomputes: bool) -> ModelFlops:
    """Counts on `meta`; if all layers are alike, models of one and two layers are extrapolated to all."""
    models = _models(CacheKey(recipe, config, {"precision", "activation_checkpointing"}))
    layers = config.get_text_config().num_hidden_layers
    one, *two = (model_flops(model, implementation, recomputes) for model in models)
    if not two:
        return one
    names = ("token_forward", "token_backward", "token_recomputed")
    drawn = {name: getattr(one, name) + (layers - 1) * (getattr(two[0], name) - getattr(one, name)) for name in names}
    own = len(two[0].attention) - 1  # a head that predicts ahead has one behind those of the layers
    own = own if recipe.mtp_weight is None else own - 1
    attention = (*two[0].attention[:1], *two[0].attention[1 : 1 + own] * (layers - 1), *two[0].attention[1 + own :])
    return replace(one, attention=attention, **drawn)


@functools.lru_cache(maxsize=2)
def _models(key: CacheKey) -> tuple[Any, ...]:
    """Returns models of one and of two layers, or the full one if its layers differ."""
    short, kinds = shortened(key.config)
    if len(set(kinds)) > 1 or len(kinds) < 3:
        return (skeleton(key.recipe, key.config),)
    longer = copy.deepcopy(short)
    longer.get_text_config().num_hidden_layers = 2
    if types := getattr(short.get_text_config(), "layer_types", None):
        longer.get_text_config().layer_types = list(types) * 2
    return skeleton(key.recipe, short), skeleton(key.recipe, longer)


@dataclass(frozen=True)
class Level:
    """Speeds of finished runs on a device over its shipped ones."""

    runs: int = 0
    compute: float = 1.0  # times as fast
    optimizer: float = 1.0
    wait_token_s: float | None = None  # for rows, for each token of a process; None: not known


@dataclass(frozen=True)
class Speeds:
    """Speeds that one device reaches, and their origin."""

    products: float  # FLOP/s
    attention: float
    memory: tuple[tuple[float, float], ...]  # (bytes of an operator, bytes/s), ascending; larger ones as the last
    source: str
    operator_s: float  # that the host takes to start an operator
    beside_host: bool = True  # a device that computes while the host starts the next operators
    step_elements: float | None = None  # that the optimizer and clipping step in a second; None: by bytes
    level: Level = Level()  # corrects all of the above

    @property
    def knows_data_wait(self) -> bool:
        return self.level.wait_token_s is not None

    def bandwidth(self, size: float) -> float:
        """size: bytes that one operator reads and writes. Between two measured sizes: in proportion."""
        smaller = next((pair for pair in reversed(self.memory) if pair[0] <= size), None)
        larger = next((pair for pair in self.memory if pair[0] > size), None)
        if smaller is None or larger is None:
            return (smaller or larger or (0.0, 1.0))[1]
        share = (size / smaller[0] - 1) / (larger[0] / smaller[0] - 1)
        return smaller[1] + share * (larger[1] - smaller[1])

    def moving(self, work: Work) -> float:
        """Returns the seconds in which operators read and write. The arithmetic of products hides theirs on a device
        with many cores; a CPU's core waits for the weights."""
        sizes = work.moved if self.beside_host else (*work.moved, *work.multiplied)
        return sum(size * count / self.bandwidth(size) for size, count in sizes if size)

    def starting(self, work: Work) -> float:
        """Returns the seconds that the host takes; a view is about half an operator."""
        return (work.operators + work.views / 2) * self.operator_s


@dataclass(frozen=True)
class StepTime:
    parts: dict[str, float]  # s
    hides: float  # share of compute that hides communication
    source: str  # of the speeds
    knows_data_wait: bool

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def busy(self) -> float:
        """Returns the seconds without those in which the rank samples, or waits for other stages or for rows."""
        return self.seconds - sum(self.parts.get(name, 0.0) for name in ("bubble", "data", "generation"))

    @property
    def limit(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])


def table_speeds(recipe: Recipe, machines: Machines, hardware: Hardware) -> Speeds | None:
    """Returns the shipped shares of the device's peaks; None if it has no peak in the compute type of the recipe."""
    compute = dtypes(recipe).compute
    device, shares = machines.device, hardware.shares(machines.key)
    peak = {torch.bfloat16: device.bf16, torch.float16: device.fp16}.get(compute, device.fp32)
    if peak is None or machines.key == CPU:
        return None
    efficiency = hardware.efficiency
    attention = shares.attention * (1.0 if device.has_flash_kernels else efficiency.flex)
    of_device = any(machines.key in keys for keys in efficiency.by_device.values())
    assumed = "" if of_device else f"; it has no {device.name}, whose shares are assumed"
    return Speeds(
        peak * 1e12 * shares.products,
        peak * 1e12 * attention,
        ((1.0, device.bandwidth_gb_s * 1e9 * shares.memory),),
        f"shipped table ({efficiency.date}), fitted to {efficiency.source}{assumed}",
        efficiency.operator_us * 1e-6,
    )


def processor_speeds(hardware: Hardware) -> Speeds:
    """Returns the speeds of the table's processors in fp32; other machines are faster or slower."""
    table = hardware.processors
    return Speeds(
        table.products,
        table.attention,
        table.memory,
        f"{table.source} ({table.date}), not of this machine",
        table.operator_us * 1e-6,
        beside_host=False,
        step_elements=table.adamw,
    )


@dataclass(frozen=True)
class Job:
    """A recipe on a launch and machines: all that a step's time depends on."""

    recipe: Recipe
    config: PretrainedConfig
    shape: Shape
    launch: Launch
    machines: Machines
    hardware: Hardware
    rows: RowFacts
    batch: HeaviestBatch  # the largest micro-batch
    speeds: Speeds
    micro_batches: int  # of a step on each process

    @property
    def row_tokens(self) -> float:
        """Tokens of a step that one group of ranks has."""
        return self.rows.tokens_per_row * self.recipe.batch.rows / self.launch.parallelism.data

    @cached_property
    def costs(self) -> Costs:
        return costs_at(self.recipe, self.config, self.launch, "cpu" if self.machines.key == CPU else "cuda")

    @cached_property
    def work(self) -> tuple[Work, float, bool]:
        """Returns the work of one micro-batch on the rank with most, its share of the layers, and whether it has the
        head."""
        sizes, costs = self.launch.parallelism, self.costs
        if costs.is_away and self.launch.processes == 1:
            # What `single` computes: copies of weights around gathers cost the casts that FSDP2 saves, or more.
            alone = Launch("replicated", 1)
            costs = costs_at(self.recipe, self.config, alone, costs.device)
        how = how_of(costs, self.machines.device.kernels, self.micro_batches, self.machines.device.gib)
        parts = timeline_of(self.recipe, self.config, of_rank(self.batch, sizes), how)
        shapes, kinds = self.costs.shapes, shortened(self.config)[1]
        larger = self.row_tokens / self.micro_batches / sum(self.batch.documents)
        works = []
        for rank in different_ranks(sizes):
            stage = Stage.of(shapes, sizes, rank, kinds)
            mine = [part[kind] for kind in stage.layers for part in (parts.layers, parts.layers_backward)]
            mine += [parts.before, parts.before_backward] if stage.first else []
            mine += [parts.head, parts.head_backward] if stage.last else []
            work = together([part.work for part in mine]).times(1, larger)
            works.append((work, len(stage.layers) / len(kinds), stage.last))
        return max(works, key=lambda one: self._flops(one[1], one[2])[0])

    def _flops(self, share: float, head: bool) -> tuple[float, float]:
        """Returns the executed FLOPs of a step on a rank: (products, attention). Those in 8 bits count by their rate.

        share: of the layers.
        """
        flops, sizes, rows = self.shape.flops, self.launch.parallelism, self.rows
        in_layers = of_layers = flops.token_forward + flops.token_backward + flops.token_recomputed
        if self.recipe.train.precision == "fp8":  # but for gradients of weights, half of the backward (fp8_linear.py)
            of_layers -= (1 - 1 / _FP8_RATE) * (in_layers - flops.token_backward / 2)
        of_head = flops.head * rows.targets_per_row if head else 0.0
        every = [flops.of(row, row, 0)[1 if flops.hardware_known else 0] - in_layers * sum(row) for row in rows.sample]
        times = self.recipe.batch.rows / sizes.data / (sizes.tokens * sizes.tensor)
        attention = max(0.0, sum(every) / len(every))
        tower = 0.0  # with the projector, for a row; each tensor rank computes all of it
        for of_kind in flops.towers if rows.sample_images else ():
            tokens = [[one.tokens for one in row if one.kind == of_kind.kind] for row in rows.sample_images]
            patches = [patches_of(self.config, row, of_kind.kind) for row in tokens]
            tower += sum(of_kind.of(of_row).hardware for of_row in patches) / len(patches) * sizes.tensor
        return times * (share * of_layers * rows.tokens_per_row + of_head + tower), times * share * attention

    def time(self) -> StepTime:
        """Returns the time of one step on the rank that waits least."""
        speeds, sizes, micro_batches = self.speeds, self.launch.parallelism, self.micro_batches
        work, share, head = self.work
        products, attention = self._flops(share, head)
        step = work.times(micro_batches)
        # Fused operators read and write once what each of them does alone.
        compiled = self.recipe.train.compile and self.machines.key != CPU
        compute = {
            "products": products / speeds.products,
            "attention": attention / speeds.attention,
            "element-wise": speeds.moving(step) * (self.hardware.efficiency.fused if compiled else 1.0),
        }
        if self.recipe.mode == "qlora":  # casts of other weights are among the operators
            passes = 3 if self.recipe.train.activation_checkpointing else 2
            frozen, ranks = self.shape.parameters - self.shape.trained, sizes.tensor * sizes.pipeline
            unpacked = passes * _PACKED * frozen / ranks  # bytes
            compute["unpacking"] = micro_batches * unpacked / speeds.bandwidth(1e9)
        # Operators that the host starts, and other work of it.
        others = _OF_MICRO_BATCH + self.costs.host_operators(self.shape)
        if self.recipe.train.activation_checkpointing:
            others += _OF_RECOMPUTED_LAYER * self.shape.layers / sizes.pipeline
        if sizes.pipeline > 1:
            others += _OF_STAGE * sizes.stages_per_rank
        of_host, busy = speeds.starting(step) + others * micro_batches * speeds.operator_s, sum(compute.values())
        compute["launches"] = max(0.0, of_host - busy) if speeds.beside_host else of_host
        compute = {name: seconds / speeds.level.compute for name, seconds in compute.items()}
        busy = sum(compute.values())
        stepping = self._stepping() + self.costs.orthogonalizing_flops() / speeds.products
        optimizer = stepping / speeds.level.optimizer
        parts = {**compute, "optimizer": optimizer, **self._waits(busy)}
        if sizes.pipeline > 1:
            waiting = (sizes.pipeline - 1) / (micro_batches * sizes.stages_per_rank)
            parts["bubble"] = busy * waiting / (3 if sizes.schedule == "zero_bubble" else 1)
        parts["data"] = (speeds.level.wait_token_s or 0.0) * self.row_tokens
        parts["generation"] = self._generation() / speeds.level.compute
        positive = {name: seconds for name, seconds in parts.items() if seconds}
        return StepTime(positive, self.costs.hides, speeds.source, speeds.knows_data_wait)

    def _generation(self) -> float:
        """Returns the seconds in which a rank samples its cohorts, one after another, each for as long as a sample may
        be; 0 without rollouts. A token takes as long as the host starts its operators, the device reads weights and
        caches, or multiplies, whichever is longest."""
        recipe, speeds, sizes, settings = self.recipe, self.speeds, self.launch.parallelism, self.recipe.rollouts
        if settings is None:
            return 0.0
        how = how_of(self.costs, self.machines.device.kernels, self.micro_batches)
        prompt = longest_prompt(settings, self.batch.documents)
        sampled = sampling_of(recipe, self.config, prompt, how)
        each = sampled.samples * self.shape.flops.token_forward / sizes.tensor / speeds.products  # s for a token of all
        forwards = []
        for work, tokens in ((sampled.prompt_work, prompt), (sampled.token_work, 1)):
            moved = sum(
                size * count / speeds.bandwidth(size) for size, count in (*work.moved, *work.multiplied) if size
            )
            computed, started = max(tokens * each, moved), speeds.starting(work)
            forwards.append(max(computed, started) if speeds.beside_host else tokens * each + moved + started)
        of_prompts, of_token = forwards
        return cohorts(settings, sizes.data)[1] * (of_prompts + (settings.max_new_tokens - 1) * of_token)

    def _waits(self, busy: float) -> dict[str, float]:
        """Returns the seconds in which compute waits for other ranks, and for the host's memory. busy: of compute."""
        hidden = busy * self.costs.hides if self.speeds.beside_host else 0.0
        shape, link, rate = self.shape, self.host_link, self.host_rate
        transfers = self.costs.transfers_to_host(shape, self.micro_batches)
        others, host = list(self._traffic()), [(_seconds(link, rate, one.moved), one.overlaps) for one in transfers]
        if self.recipe.train.activation_offload and self.machines.key != CPU:
            element = 4 if self.recipe.train.precision == "fp32" else 2
            moved = 2 * self.row_tokens / self.launch.parallelism.tokens * shape.hidden * element
            host.append((_seconds(link, rate, moved * shape.layers), True))
        overlapping, of_host = (sum(seconds for seconds, overlaps in x if overlaps) for x in (others, host))
        alone, of_host_alone = (sum(seconds for seconds, overlaps in x if not overlaps) for x in (others, host))
        left, left_of_host = max(0.0, overlapping - hidden), max(0.0, of_host - max(0.0, hidden - overlapping))
        return {"communication": left + alone, "host transfers": left_of_host + of_host_alone}

    def _stepping(self) -> float:
        """Returns the seconds to read and write weights, gradients and moments."""
        sizes, launch, speeds = self.launch.parallelism, self.launch, self.speeds
        owned, host = self.shape.trained / self.costs.owners, self.hardware.host
        if self.costs.is_away:
            on_disk = 24 * owned * self.machines.per_machine / (host.disk_gb_s * 1e9) if launch.uses_nvme else 0.0
            # The processor is limited by its memory: an addition reads and writes 12 bytes.
            added = self.costs.host_additions(self.shape, self.micro_batches) * 12 / _BYTES_OF_ADAMW
            return (owned + added) / (host.adamw_per_core * host.cores_per_device) + on_disk
        if speeds.step_elements is not None:
            tensors = self.shape.tensors / sizes.pipeline * _OF_STEPPED * speeds.operator_s
            return owned / speeds.step_elements + tensors
        each = _BYTES_OF_8BIT if self.recipe.optimizer.name.endswith("8bit") else _BYTES_OF_ADAMW
        return owned * each / speeds.bandwidth(1e9)

    def _traffic(self) -> Iterator[tuple[float, bool]]:
        """Yields (seconds, whether compute may overlap) of each transfer of a rank to others in a step."""
        device, shape = self.machines.device, self.shape
        targets = self.rows.supervised_share * self.row_tokens
        rows = self.costs.transfers_of_rows(shape, self.micro_batches, self.row_tokens, targets)
        for one in (*self.costs.transfers_of_weights(shape, self.micro_batches), *rows):
            link, per_machine = self.hardware.links[device.link], self.machines.per_machine
            rate = link.gb_s * link.share
            if one.ranks > per_machine:  # never faster than what brings the bytes to the machine's network cards
                link = self.hardware.links[device.network]
                rate = min(rate, link.between_machines(per_machine, one.members(per_machine)))
            # An engine's copies, which a device hides during the collective.
            copies = 0.0 if self.speeds.beside_host else one.copied / self.speeds.bandwidth(_FRESH)
            yield _seconds(link, rate, one.moved, one.collectives, copies), one.overlaps

    @property
    def host_link(self) -> Link:
        return self.hardware.links[self.hardware.host.link_of(self.machines.device.link)]

    @property
    def host_rate(self) -> float:
        return self.host_link.gb_s * self.host_link.share


def _seconds(link: Link, rate: float, moved: float, collectives: float = 0, copies: float = 0.0) -> float:
    """rate: GB/s; moved: bytes that one rank sends; copies: seconds."""
    return copies + moved / (rate * 1e9) + collectives * link.latency_us * 1e-6
