"""Where a recipe could run: every shipped config and its sizes on the devices at hand, legal by the rules of `check`.

The recipe fixes the maths, so all that differs between choices is memory, time and price: the config, its sizes, rows
per device, recomputation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import track
from transformers import PretrainedConfig

from finetune.engine.compatibility import check_launch, check_products
from finetune.engine.hardware import CPU, GIB, Hardware
from finetune.engine.launch import Launch, read_config_file
from finetune.errors import UserError
from finetune.models.config import active_dropouts
from finetune.plan.lengths import RowFacts
from finetune.plan.memory import HeaviestBatch, Memory, Place, estimate_memory
from finetune.plan.speed import Job, Shape, Speeds, StepTime
from finetune.plan.tables import Amount, Machines, Price, Prices
from finetune.recipe import Recipe
from finetune.training.run_plan import run_length
from finetune.utils import divisors

Verdict = Literal["fits", "tight", "no"]
ORDER: tuple[Verdict, ...] = ("fits", "tight", "no")
_SIZED = {  # keys of parallelism_config whose size a config leaves open
    "tp": "tp_size",
    "fsdp2_tp": "tp_size",
    "cp": "cp_size",
    "fsdp2_cp": "cp_size",
    "ulysses": "sp_size",
    "pp": "pp_size",
    "pp_dp": "pp_size",
    "ep": "ep_size",
    "hsdp": "dp_replicate_size",
}
_ROWS = (1, 2, 4)  # per device


@dataclass(frozen=True)
class PlanRequest:
    """What is planned. `config` is transformers' of the recipe's model."""

    recipe: Recipe
    path: str
    config: PretrainedConfig
    shapes: dict[bool, Shape]  # without and with full activation checkpointing
    rows: RowFacts
    hardware: Hardware
    prices: Prices
    shapes_from: str = "its config.json"
    spot: bool = False
    repack: Callable[[Recipe], RowFacts] | None = None  # the rows of other lengths


@dataclass(frozen=True)
class Choice:
    """One place, with what it takes there."""

    launch: Launch
    machines: Machines
    changes: dict[str, Any]  # keys of the recipe that differ from it, none of which changes its result
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

    @property
    def config(self) -> str:
        return self.launch.where

    @property
    def sizes(self) -> str:
        return "" if self.launch.parallelism.is_plain else self.launch.parallelism.summary()

    @property
    def name(self) -> str:
        sizes = f" ({self.sizes})" if self.sizes else ""
        changes = "".join(f", {line}" for line in as_lines(self.changes))
        return f"{self.config}{sizes} on {self.machines.name}{changes}"

    @property
    def place_in_order(self) -> tuple[int, bool]:
        """Smaller is better: by verdict, last those of which no step was weighed."""
        return ORDER.index(self.verdict), self.memory.at_least

    @property
    def free(self) -> float:
        """GiB that stay free on the fullest device; negative: that are missing."""
        return self.machines.device.gib - self.peak / GIB


@dataclass
class Found:
    choices: list[Choice] = field(default_factory=list)
    illegal: dict[str, str] = field(default_factory=dict)  # config and sizes, and the rule


def config_folder() -> Path:
    """Returns accelerate_configs/ of the current folder, else of the checkout that this package is in."""
    for folder in (Path("accelerate_configs"), Path(__file__).parents[3] / "accelerate_configs"):
        if (folder / "single.yaml").is_file():
            return folder
    raise UserError("no folder accelerate_configs here: run `plan` in the checkout, or copy it from there")


def launches(machines: Machines) -> Iterator[Launch]:
    """Yields every config, with every size of its dimension that the devices allow."""
    for path in sorted(config_folder().glob("*.yaml")):
        processes = 1 if path.stem == "single" else machines.count
        if machines.count == 1 and path.stem not in _ALONE:
            continue
        read = read_config_file(str(path), processes)
        key = _SIZED.get(path.stem)
        sizes = _sizes(path.stem, machines) if key else [1]
        for size in sizes:
            config = copy.deepcopy(read.config)
            if key:
                config["parallelism_config"][f"parallelism_config_{key}"] = size
            yield Launch(read.kind, processes, str(path), config)


_ALONE = ("single", "fsdp2_offload", "zero2_offload", "zero3_offload", "zero3_nvme")  # that make sense on one device


def _sizes(stem: str, machines: Machines) -> list[int]:
    """Tensor parallel groups stay on a machine; replicas are machines, where there are several."""
    if stem == "hsdp":
        return [machines.machines] if machines.machines > 1 else [2] if machines.count % 2 == 0 else []
    within = machines.count if stem in ("pp", "pp_dp", "ep") else machines.per_machine
    sizes = [size for size in divisors(within) if 1 < size <= 16]
    if stem == "pp":
        return [size for size in sizes if size == machines.count]
    if stem in ("pp_dp", "fsdp2_tp", "fsdp2_cp"):
        sizes = [size for size in sizes if size < machines.count]
    return sorted(sizes)


def search(request: PlanRequest, machines: Machines, speeds: Speeds | None, widely: bool = True) -> Found:
    """Returns what is legal with memory and time, and what is not with the rule.

    widely: other rows per device and recomputation as well, where they could help.
    """
    found, places = Found(), list(launches(machines))
    shows = Console(stderr=True)
    for launch in track(places, machines.name, console=shows, transient=True, disable=not shows.is_terminal):
        one = _best_at(request, launch, machines, speeds, widely)
        if isinstance(one, Choice):
            found.choices.append(one)
        else:
            found.illegal[f"{launch.where}{_size_words(launch)}"] = one
    return found


def _best_at(
    request: PlanRequest, launch: Launch, machines: Machines, speeds: Speeds | None, widely: bool
) -> Choice | str:
    """Returns the best that a config and its sizes allow, or the rule that forbids it."""
    try:
        own = evaluate(request, launch, machines, speeds, {})
    except UserError as error:
        return _rule(str(error))
    return best([own, *(_others(request, launch, machines, speeds, own) if widely else ())])


def _size_words(launch: Launch) -> str:
    """Returns the sizes that a config leaves open: ` (tp_size 4)`."""
    key = _SIZED.get(launch.where)
    return f" ({key} {launch.config['parallelism_config'][f'parallelism_config_{key}']})" if key else ""


def _rule(message: str) -> str:
    """Returns the reason of a message of `check`, without its heading."""
    lines = [line.strip() for line in message.splitlines()]
    return lines[1] if len(lines) > 1 else lines[0].partition(": ")[2] or lines[0]


def _others(
    request: PlanRequest, launch: Launch, machines: Machines, speeds: Speeds | None, own: Choice
) -> Iterator[Choice]:
    """Yields choices with keys of the recipe that do not change its result: less memory where it does not fit, more
    speed where there is room."""
    recipe, rows = request.recipe, request.recipe.batch.rows_per_device
    fewer, keeps = own.verdict != "fits", recipe.train.activation_checkpointing
    changes: list[dict[str, Any]] = []
    if own.memory.at_least or (not fewer and launch.parallelism.data < launch.processes):
        return
    if keeps is not fewer:
        changes.append({"train.activation_checkpointing": fewer})
    if rows != "auto" and recipe.batch.tokens_per_device is None and not drops(recipe, request.config):
        changes += [{"batch.rows_per_device": n} for n in _ROWS if n != rows and (n < rows) == fewer]
        if fewer and keeps is not True and rows > 1:
            changes.append({"train.activation_checkpointing": True, "batch.rows_per_device": 1})
    for change in changes:
        try:
            yield evaluate(request, launch, machines, speeds, change)
        except UserError:
            continue


def drops(recipe: Recipe, config: PretrainedConfig) -> bool:
    """Whether anything is dropped at random, again in each forward: rows per device would change the result."""
    return bool(recipe.lora and recipe.lora.dropout) or any(True for _ in active_dropouts(config))


def best(choices: Sequence[Choice]) -> Choice:
    """Returns the fastest of those that fit best; of equals the first."""
    return min(choices, key=lambda one: (*one.place_in_order, one.step.seconds if one.step else 0.0, one.peak))


def as_lines(values: dict[str, Any]) -> list[str]:
    """Returns `section.key: value` of each, as a recipe has it."""
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
    """Returns memory, time and price of one place. Raises UserError where recipe and launch do not go together."""
    recipe = changed(request.recipe, changes)
    micro_batches = check_launch(recipe, request.path, launch, request.config)
    if (capability := machines.device.capability) is not None:
        check_products(recipe, machines.device.name, capability)
    device = _device_type(machines)
    place = Place(launch, min(launch.processes, machines.per_machine), device)
    batch = heaviest(recipe, request.rows)
    most = int(machines.device.gib * GIB)
    memory = estimate_memory(recipe, request.config, place, batch, micro_batches, most)
    peak = memory.tensors + (0 if device == "cpu" else request.hardware.reserve.bytes(memory.tensors, launch.processes))
    step = None
    if speeds is not None and not memory.at_least:
        shape = request.shapes[recipe.train.activation_checkpointing is True]
        where = (launch, machines, request.hardware, request.rows, batch)
        step = Job(recipe, request.config, shape, *where, speeds, micro_batches).time()
    tokens = request.rows.tokens_per_row * recipe.batch.rows
    steps = run_length(recipe, request.rows.rows)[0] if request.rows.rows or recipe.train.max_steps else None
    hours = step.seconds * steps / 3600 if step and steps else None
    rate = hourly(request.prices, machines, request.spot)
    supervised = request.rows.targets_per_row * recipe.batch.rows
    return Choice(
        launch,
        machines,
        changes,
        batch,
        memory,
        peak,
        verdict(peak, machines, request.hardware),
        step,
        tokens / step.seconds if step else None,
        hours,
        rate[0] * hours if rate and hours else None,
        rate[0] * step.seconds / 3600 / supervised * 1e6 if rate and step else None,
        rate[1] if rate else None,
    )


def _device_type(machines: Machines) -> str:
    return "cpu" if machines.key == CPU else "cuda"


def verdict(peak: int, machines: Machines, hardware: Hardware) -> Verdict:
    """Never `fits` within the margin."""
    free = machines.device.gib - peak / GIB
    if free < 0:
        return "no"
    return "fits" if free >= hardware.reserve.margin * machines.device.gib else "tight"


def heaviest(recipe: Recipe, rows: RowFacts) -> HeaviestBatch:
    """Returns the largest micro-batch: the fullest row, as often as a forward has rows."""
    if (most := recipe.batch.tokens_per_device) is not None:
        times = max(1, most // sum(rows.heaviest))
    else:
        times = 1 if recipe.batch.rows_per_device == "auto" else recipe.batch.rows_per_device
    images = (rows.images,) * times if rows.images else ()
    return HeaviestBatch(rows.heaviest * times, max(1, rows.most_targets * times), images)


def cheapest(prices: Prices, machines: Machines, spot: bool) -> tuple[Price, Amount] | None:
    """Returns the line of the cheapest provider of a device, and the price of one for an hour."""
    of_device = [
        (price, price.spot if spot else price.on_demand) for price in prices.prices if price.device == machines.key
    ]
    known = [(price, amount) for price, amount in of_device if amount is not None]
    return min(known, key=lambda one: one[1][0]) if known else None


def hourly(prices: Prices, machines: Machines, spot: bool) -> tuple[float, str] | None:
    """Returns the price of all devices for an hour of training, what is lost with spot machines included."""
    if (found := cheapest(prices, machines, spot)) is None:
        return None
    price, (amount, currency) = found
    lost = spot_loss(prices, price, machines)[1] if spot else 0.0
    return amount * machines.count * (1 + lost), currency


SAVE_S, RESUME_S = 60.0, 600.0  # assumed: of a checkpoint that the step waits for; of a new machine until it trains


def spot_loss(prices: Prices, price: Price, machines: Machines) -> tuple[float, float]:
    """Returns (hours between checkpoints that lose least, share of the time that is lost).

    Young's interval sqrt(2 save / rate), https://doi.org/10.1145/361147.361115; a loss costs half an interval and the
    resumption.
    """
    rate = (price.losses_per_hour or prices.losses_per_hour) * machines.machines
    interval = (2 * SAVE_S / 3600 / rate) ** 0.5
    return interval, rate * (interval / 2 + RESUME_S / 3600) + SAVE_S / 3600 / interval
