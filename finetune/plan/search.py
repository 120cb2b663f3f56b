"""Launches that a recipe could run on: every shipped config and its sizes on given devices, legal by the rules of
`check`, with memory, time and price of each.

The recipe fixes the maths, so choices differ in the config, its sizes, rows per device and recomputation only.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import track
from transformers import PretrainedConfig

from finetune.engine.compatibility import check_launch, check_products
from finetune.engine.costs.common import TEACHER
from finetune.engine.hardware import CPU, GIB, Hardware
from finetune.engine.launch import Launch, read_config_file
from finetune.errors import UserError
from finetune.models.dropout import drops
from finetune.plan.lengths import RowFacts
from finetune.plan.memory import HeaviestBatch, Memory, Place, estimate_memory, how_of
from finetune.plan.rollouts import cohorts, longest_prompt, sampling_of
from finetune.plan.shapes import costs_at
from finetune.plan.speed import Job, Shape, Speeds, StepTime
from finetune.plan.tables import Machines, Price, Prices
from finetune.recipe import Recipe
from finetune.recipe.schema import BatchSettings
from finetune.shipped import SHIPPED
from finetune.training.run_plan import run_length
from finetune.utils import divisors

Verdict = Literal["fits", "tight", "no"]
ORDER: tuple[Verdict, ...] = ("fits", "tight", "no")
_PARALLELISM = "parallelism_config"
_FREES = "fsdp_reshard_after_forward"
_ROWS = (1, 2, 4)  # per device


@dataclass(frozen=True)
class PlanRequest:
    """A recipe to plan, with all that does not depend on the devices. `config` is transformers' of its model."""

    recipe: Recipe
    path: str
    config: PretrainedConfig
    shapes: dict[bool, Shape]  # without and with full activation checkpointing
    rows: RowFacts
    hardware: Hardware
    prices: Prices
    shapes_from: str = "its config.json"
    repack: Callable[[Recipe], RowFacts] | None = None  # the rows of other lengths
    host_gib: float | None = None  # host memory of each machine; None: as the tables say


@dataclass(frozen=True)
class Sampled:
    """How a rank samples a step's rollouts."""

    cohorts: int  # of a step
    each: int  # of them, on a data-parallel rank, one after another
    cache: int  # bytes of one cohort's keys and values
    peak: int  # bytes of one cohort in all
    largest: int  # `rollouts.cohort` that fits
    teacher: int  # bytes of its weights, on each device
    initial: int  # bytes of the weights that `objective.kl` keeps in the host's memory, of each process


@dataclass(frozen=True)
class Choice:
    """A launch on some machines, with memory, time and price of the run."""

    launch: Launch
    machines: Machines
    changes: dict[str, Any]  # other values of the recipe's keys, none of which changes its result
    batch: HeaviestBatch
    memory: Memory
    peak: int  # bytes of the fullest device, with context and slack
    verdict: Verdict
    step: StepTime | None  # None: speeds are not known
    tokens_per_s: float | None
    hours: float | None
    price: float | None  # of the run; None: hours or prices are not known
    per_million: float | None  # supervised tokens
    currency: str | None
    host_need: float = 0.0  # GiB of host memory on each machine
    host_has: float | None = None  # None: not known
    faster: Choice | None = None  # on fewer of these devices, if that is known
    sampled: Sampled | None = None  # None: without rollouts, or the state alone does not fit

    @property
    def config(self) -> str:
        return self.launch.where

    @property
    def sizes(self) -> str:
        return "" if self.launch.parallelism.is_plain else self.launch.parallelism.summary()

    @property
    def config_changes(self) -> dict[str, Any]:
        """Other values of the accelerate config's keys than the shipped file's, beside sizes."""
        frees = self.launch.parallelism.pipeline > 1 and self.launch.frees_gathered
        return {_FREES: True} if frees else {}

    @property
    def name(self) -> str:
        sizes = f" ({self.sizes})" if self.sizes else ""
        changes = "".join(f", {line}" for line in as_lines({**self.changes, **self.config_changes}))
        return f"{self.config}{sizes} on {self.machines.name}{changes}"

    @property
    def place_in_order(self) -> tuple[int, bool, float]:
        """Smaller is better: by verdict; of those that do not fit by what is missing, last those without an estimate of
        a step."""
        missing = max(0.0, -self.free) + self.host_missing
        return ORDER.index(self.verdict), self.memory.at_least, missing if self.verdict == "no" else 0.0

    @property
    def free(self) -> float:
        """GiB that stay free on the fullest device; negative if too few."""
        return self.machines.device.gib - self.peak / GIB

    @property
    def host_missing(self) -> float:
        """GiB of host memory that a machine has too few; 0 if it is not known what it has."""
        return 0.0 if self.host_has is None else max(0.0, self.host_need - self.host_has)


@dataclass
class SearchResult:
    """All that was tried on one kind of machines."""

    machines: Machines
    choices: list[Choice] = field(default_factory=list)
    illegal: dict[str, str] = field(default_factory=dict)  # config and sizes, and the rule
    alone: Choice | None = None  # on one of several devices


def config_folder() -> Path:
    """Returns accelerate_configs/ of the current folder, else those that come with the package."""
    own = Path("accelerate_configs")
    return own if (own / "single.yaml").is_file() else SHIPPED / "accelerate_configs"


def launches(machines: Machines) -> Iterator[Launch]:
    """Yields every config that uses all devices, with every size of its dimensions that they allow; a pipeline of
    shards also with what FSDP2 frees after each forward."""
    for path in sorted(config_folder().glob("*.yaml")):
        as_written = read_config_file(str(path))
        alone = as_written.config["distributed_type"] == "NO"
        if alone != (machines.count == 1) and not (machines.count == 1 and as_written.offloads_optimizer):
            continue
        keys = open_sizes(as_written.config)
        written = math.prod(as_written.config[_PARALLELISM][f"{_PARALLELISM}_{key}"] for key in keys)
        for sizes in product(*(sizes_to_try(key, as_written, machines) for key in keys)):
            taken = math.prod(sizes)
            leaves = written < as_written.processes and "dp_replicate_size" not in keys  # shards or replicas
            if keys and (machines.count % taken or (leaves and taken == machines.count)):
                continue
            config = copy.deepcopy(as_written.config)
            for key, size in zip(keys, sizes, strict=True):
                config[_PARALLELISM][f"{_PARALLELISM}_{key}"] = size
            launch = Launch(as_written.kind, machines.count, str(path), config)
            yield launch
            if "pp_size" in keys and launch.with_other_freeing is not launch:
                yield launch.with_other_freeing


def open_sizes(config: dict[str, Any]) -> list[str]:
    """Returns the keys of the sizes, such as `tp_size`, of which a config's own numbers are examples."""
    keys = [key for key in config.get(_PARALLELISM) or {} if key.endswith("_size")]
    return [key.removeprefix(f"{_PARALLELISM}_") for key in keys]


def sizes_to_try(key: str, as_written: Launch, machines: Machines) -> list[int]:
    """Returns the sizes to try, by what the config does with its own number of processes."""
    if key == "dp_replicate_size":  # replicas are machines if there are several
        return [machines.machines] if machines.machines > 1 else [2] if machines.count % 2 == 0 else []
    if key == "pp_size" and as_written.config[_PARALLELISM][f"{_PARALLELISM}_{key}"] == as_written.processes:
        sizes = [machines.count]
    else:  # tensor parallel groups stay on a machine
        sizes = sorted(divisors(machines.count if key in ("pp_size", "ep_size") else machines.per_machine))
    return [size for size in sizes if 1 < size <= 16]


def search(request: PlanRequest, machines: Machines, speeds: Speeds | None, widely: bool = True) -> SearchResult:
    """Returns the best legal choice of every config and size, and the rules that forbid the others.

    widely: tries other rows per device and recomputation as well, if they could help; and one of several devices alone.
    """
    result, places = SearchResult(machines), list(launches(machines))
    found = dict[tuple[str, str], list[Choice]]()  # those of equal sizes differ in what FSDP2 frees
    console = Console(stderr=True)
    for launch in track(places, machines.name, console=console, transient=True, disable=not console.is_terminal):
        try:
            one = _best_of(request, launch, machines, speeds, widely)
            found.setdefault((one.config, one.sizes), []).append(one)
        except UserError as error:
            of_launch = launch.config.get(_PARALLELISM) or {}
            sizes = [f"{key} {of_launch[f'{_PARALLELISM}_{key}']}" for key in open_sizes(launch.config)]
            size = f" ({', '.join(sizes)})" if sizes else ""
            # A message of `check` has a heading.
            lines = [line.strip() for line in str(error).splitlines()]
            rule = lines[1] if len(lines) > 1 else lines[0].partition(": ")[2] or lines[0]
            result.illegal[f"{launch.where}{size}"] = rule
    result.choices = [best(choices) for choices in found.values()]
    one = replace(machines, per_machine=1, machines=1)
    alone = next((x for x in launches(one) if x.config["distributed_type"] == "NO"), None)
    if widely and machines.count > 1 and alone is not None:
        with contextlib.suppress(UserError):
            result.alone = _best_of(request, alone, one, speeds, widely)
    return result


def _best_of(request: PlanRequest, launch: Launch, machines: Machines, speeds: Speeds | None, widely: bool) -> Choice:
    """Returns the best choice of one launch. Raises UserError if a rule forbids it."""
    own = evaluate(request, launch, machines, speeds, {})
    recipe, rows = request.recipe, request.recipe.batch.rows_per_device
    fewer, keeps = own.verdict != "fits", recipe.train.activation_checkpointing
    if not widely or own.memory.at_least or (not fewer and launch.parallelism.data < launch.processes):
        return own
    # Changes of the recipe that do not change its result: less memory if it does not fit, else more speed.
    changes: list[dict[str, Any]] = []
    if keeps is not fewer:
        changes.append({"train.activation_checkpointing": fewer})
    if rows != "auto" and recipe.batch.tokens_per_device is None and not drops(recipe.lora, request.config):
        changes += [{"batch.rows_per_device": n} for n in _ROWS if n != rows and (n < rows) == fewer]
        if fewer and keeps is not True and rows > 1:
            changes.append({"train.activation_checkpointing": True, "batch.rows_per_device": 1})
    choices = [own]
    for change in changes:
        with contextlib.suppress(UserError):
            choices.append(evaluate(request, launch, machines, speeds, change))
    return best(choices)


def with_faster(choices: Sequence[Choice], known: Sequence[Choice]) -> list[Choice]:
    """Returns the choices, each with the fastest of `known` on fewer of the same devices that is at least as fast."""

    def beats(other: Choice, one: Choice) -> bool:
        if other.step is None or one.step is None or other.verdict == "no":
            return False
        fewer = other.machines.key == one.machines.key and other.machines.count < one.machines.count
        return fewer and other.step.seconds <= one.step.seconds

    faster = [[other for other in known if beats(other, one)] for one in choices]
    return [replace(one, faster=best(others) if others else None) for one, others in zip(choices, faster, strict=True)]


def best(choices: Sequence[Choice]) -> Choice:
    """Returns the fastest of those that fit best; of equals the first."""
    return min(choices, key=lambda one: (*one.place_in_order, one.step.seconds if one.step else 0.0, one.peak))


def answers(choices: Sequence[Choice]) -> list[Choice]:
    """Returns the first choice of each kind of machines."""
    first: dict[str, Choice] = {}
    for one in choices:
        first.setdefault(one.machines.name, one)
    return list(first.values())


def as_lines(values: dict[str, Any]) -> list[str]:
    """Returns a line `section.key: value` for each, as in a recipe."""
    return [f"{key}: {str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]


def value_of(recipe: Recipe, key: str) -> Any:
    """key: `section.key`."""
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name)


def changed(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    """Returns a recipe with other values of `section.key`."""
    for key, value in changes.items():
        section, _, name = key.partition(".")
        part = getattr(recipe, section).model_copy(update={name: value})
        recipe = recipe.model_copy(update={section: part})
    return recipe


def evaluate(
    request: PlanRequest, launch: Launch, machines: Machines, speeds: Speeds | None, changes: dict[str, Any]
) -> Choice:
    """Returns memory, time and price of a launch. Raises UserError if recipe and launch do not go together."""
    recipe = changed(request.recipe, changes)
    micro_batches = check_launch(recipe, request.path, launch, request.config)
    if (capability := machines.device.capability) is not None:
        check_products(recipe.train, recipe.quantization, machines.device.name, capability)
    device = "cpu" if machines.key == CPU else "cuda"
    per_host, card = min(launch.processes, machines.per_machine), machines.device
    place = Place(launch, per_host, device, card.kernels, card.gib)
    batch = heaviest(recipe.batch, request.rows)
    if (budget := recipe.batch.tokens_per_device) is not None:
        tokens = request.rows.tokens_per_row * recipe.batch.rows / launch.parallelism.data
        micro_batches = max(1, min(micro_batches, math.ceil(tokens / budget)))
    most = int(machines.device.gib * GIB)
    memory = estimate_memory(recipe, request.config, place, batch, micro_batches, most)
    need, has = host_need(request, memory, place), host_memory(request, machines)
    peak = memory.tensors + (0 if device == "cpu" else request.hardware.reserve.bytes(memory.tensors, launch.processes))
    step = None
    if speeds is not None and not memory.at_least:
        shape = request.shapes[recipe.train.activation_checkpointing is True]
        at = (launch, machines, request.hardware, request.rows, batch)
        step = Job(recipe, request.config, shape, *at, speeds, micro_batches).time()
    tokens = request.rows.tokens_per_row * recipe.batch.rows
    steps = None
    if request.rows.rows or recipe.train.max_steps:
        steps = run_length(recipe.train, recipe.batch.rows, request.rows.rows)[0]
    hours = step.seconds * steps / 3600 if step and steps else None
    rate = hourly(request.prices, machines)
    supervised = request.rows.targets_per_row * recipe.batch.rows
    return Choice(
        launch,
        machines,
        changes,
        batch,
        memory,
        peak,
        verdict(peak, machines, request.hardware, need, has),
        step,
        tokens / step.seconds if step else None,
        hours,
        rate[0] * hours if rate and hours else None,
        rate[0] * step.seconds / 3600 / supervised * 1e6 if rate and step and supervised else None,
        rate[1] if rate else None,
        need,
        has,
        sampled=None if memory.at_least else _sampled(request, recipe, place, batch, memory, machines, micro_batches),
    )


def _sampled(
    request: PlanRequest,
    recipe: Recipe,
    place: Place,
    batch: HeaviestBatch,
    memory: Memory,
    machines: Machines,
    micro_batches: int,
) -> Sampled | None:
    """Returns how a rank samples a step; None without rollouts. The largest cohort leaves the margin free."""
    if recipe.rollouts is None:
        return None
    how = how_of(costs_at(recipe, request.config, place.launch, place.device), place.capability, micro_batches)
    sampling = sampling_of(recipe, request.config, longest_prompt(recipe.rollouts, batch.documents), how)
    reserve, device = request.hardware.reserve, machines.device.gib * GIB
    others = memory.phases["sampling"] - sampling.peak
    fixed = 0 if place.device == "cpu" else reserve.bytes(0, place.launch.processes)
    room = int((device * (1 - reserve.margin) - fixed) / (1 + (0 if place.device == "cpu" else reserve.gaps))) - others
    count, each = cohorts(recipe.rollouts, place.launch.parallelism.data)
    most = recipe.rollouts.prompts * recipe.rollouts.samples
    largest = sampling.largest(max(0, room), most)
    models = memory.persistent.get(TEACHER, 0), memory.initial
    return Sampled(count, each, sampling.cache, sampling.peak, largest, *models)


def host_need(request: PlanRequest, memory: Memory, place: Place) -> float:
    """Returns GiB of host memory on each machine: offloaded tensors and rank 0's result, or the weights that it reads;
    and what processes need without tensors. Nothing if the processors are the devices."""
    if place.device == "cpu":
        return 0.0
    tensors = max(memory.host + memory.after.get("save", 0), memory.reading) / GIB
    return tensors + place.per_host * request.hardware.host.process_gib


def host_memory(request: PlanRequest, machines: Machines) -> float | None:
    """Returns GiB of host memory of each machine: as was asked for, of the device's table, or of the cheapest offer
    that says it."""
    if machines.key == CPU or request.host_gib or machines.device.host_gib:
        return None if machines.key == CPU else request.host_gib or machines.device.host_gib
    known = tuple(one for one in request.prices.prices if one.host_gib)
    offer = cheapest(request.prices.model_copy(update={"prices": known}), machines)
    return offer.host_gib * machines.per_machine if offer and offer.host_gib else None


def verdict(
    peak: int, machines: Machines, hardware: Hardware, host_need: float = 0.0, host_has: float | None = None
) -> Verdict:
    """Returns `fits` only if the margin stays free, on devices and on their machines. host_*: GiB of a machine."""
    shares = [1 - peak / GIB / machines.device.gib]  # free
    shares += [] if host_has is None else [1 - host_need / host_has]
    if min(shares) < 0:
        return "no"
    return "fits" if min(shares) >= hardware.reserve.margin else "tight"


def heaviest(batch: BatchSettings, rows: RowFacts) -> HeaviestBatch:
    """Returns the largest micro-batch: the fullest row, once for each row of a forward."""
    if (most := batch.tokens_per_device) is not None:
        times = max(1, most // sum(rows.heaviest))
    else:
        times = 1 if batch.rows_per_device == "auto" else batch.rows_per_device
    images = (rows.images,) * times if rows.images else ()
    return HeaviestBatch(rows.heaviest * times, max(1, rows.most_targets * times), images)


def cheapest(prices: Prices, machines: Machines) -> Price | None:
    """Returns the line of the cheapest provider of a device."""
    offers = [price for price in prices.prices if price.device == machines.key]
    return min(offers, key=lambda price: price.on_demand[0], default=None)


def hourly(prices: Prices, machines: Machines) -> tuple[float, str] | None:
    """Returns the price of all devices for an hour, and its currency."""
    if (offer := cheapest(prices, machines)) is None:
        return None
    amount, currency = offer.on_demand
    return amount * machines.count, currency
