"""`plan`: whether a recipe fits, how fast it would be and what it would cost, on devices that need not be here."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from transformers import PretrainedConfig

from finetune.engine.hardware import CPU, GIB, read_hardware
from finetune.errors import UserError
from finetune.models.base_config import base_config
from finetune.models.config import training_config
from finetune.plan.answer import as_dicts, price_lines, rests_on, show
from finetune.plan.finished_runs import speeds_here
from finetune.plan.lengths import Lengths, RowFacts, read_lengths, widest
from finetune.plan.memory_page import write_page
from finetune.plan.search import (
    Choice,
    Found,
    PlanRequest,
    as_lines,
    drops,
    search,
    value_of,
)
from finetune.plan.shapes import shapes_of as weights_of
from finetune.plan.speed import Shape
from finetune.plan.tables import Machines, parse_machines, read_prices, shapes_source, shipped_config
from finetune.plan.what_if import sweep, to_fit, values_of
from finetune.recipe import Recipe, load_recipe
from finetune.utils import print_line, write_atomically


@dataclass(frozen=True)
class PlanOptions:
    on: tuple[str, ...]
    nodes: int = 1
    budget: float | None = None
    deadline: str | None = None
    by: str = "time"
    spot: bool = False
    write: bool = False
    html: Path | None = None
    sweep: str | None = None
    memory: str | None = None
    hardware: Path | None = None
    prices: Path | None = None
    as_json: bool = False


def run(path: Path, overrides: Sequence[str], options: PlanOptions, console: Console) -> list[Choice]:
    """The command; returns the places, the best one first; none where values were tried. Raises UserError."""
    if not options.on:
        raise UserError("plan: on what? Give --on, such as --on 8xH100-80, or --on 2xcpu for this machine")
    if options.by not in ("time", "price"):
        raise UserError(f"--by {options.by}: expected time or price")
    if options.budget is not None and options.budget <= 0:
        raise UserError(f"--budget {options.budget}: expected a price above 0")
    if options.deadline:
        hours_of(options.deadline)
    if options.sweep or options.memory:
        what_if(path, overrides, options, console)
        return []
    request, choices, founds = plan(path, overrides, options)
    if options.as_json:
        print(json.dumps(as_dicts(request, choices), indent=1))
    else:
        show(console, request, choices, founds)
    if options.html:
        unknown = rests_on(request, choices)
        lines = [f"lengths: {request.rows.source}", *price_lines(request, choices[0]), *unknown]
        write_page(options.html, request, choices, lines)
        print(f"wrote {options.html}", file=sys.stderr if options.as_json else sys.stdout)
    if options.write:
        for line in write_config(request, choices[0], Path()):
            print(line, file=sys.stderr if options.as_json else sys.stdout)
    return choices


def plan(path: Path, overrides: Sequence[str], options: PlanOptions) -> tuple[PlanRequest, list[Choice], list[Found]]:
    """Returns what was asked, the choices in order of rank, and per kind of devices all that was found. Raises
    UserError."""
    recipe = load_recipe(path, overrides)
    machines = machines_of(options)
    request = ask(recipe, str(path), options, machines)
    founds = [search(request, one, speeds_here(request.recipe, one, request.hardware)) for one in machines]
    choices = ranked([choice for found in founds for choice in found.choices], options)
    if not choices:
        rules = "\n".join(f"  {name}: {rule}" for found in founds for name, rule in found.illegal.items())
        raise UserError(f"{path}: no config can run it on {', '.join(options.on)}:\n{rules}")
    return request, choices, founds


def what_if(path: Path, overrides: Sequence[str], options: PlanOptions, console: Console) -> None:
    """--sweep and --memory."""
    recipe, machines = load_recipe(path, overrides), machines_of(options)
    lines: list[dict[str, Any]] = []
    if options.sweep:
        key, values = values_of(options.sweep)
        for value in values:
            other = load_recipe(path, [*overrides, f"{key}={value}"])
            request = ask(other, str(path), options, machines)
            reached = [speeds_here(request.recipe, one, request.hardware) for one in machines]
            chosen = sweep(request, machines, reached, key, value)
            made = {"why": chosen} if isinstance(chosen, str) else as_dicts(request, [chosen])[0]
            lines.append({key: value, **made})
        fitting = [line[key] for line in lines if line.get("verdict") == "fits"]
        last = f"largest {key} that fits, of these: {max(fitting) if fitting else 'none'}"
    else:
        assert options.memory
        gib = memory_of(options.memory)
        smaller = [replace(one, device=one.device.model_copy(update={"memory_gib": gib})) for one in machines]
        request = ask(recipe, str(path), options, machines)
        for one in smaller:
            for change, chosen in to_fit(request, one, speeds_here(request.recipe, one, request.hardware)):
                lines.append({"change": change, **as_dicts(request, [chosen])[0]})
        last = (
            "" if lines else f"nothing known here makes it fit into {options.memory}: fewer parameters, or more devices"
        )
    if options.as_json:
        print(json.dumps(lines, indent=1))
        return
    table = Table(box=None, pad_edge=False)
    first = next(iter(lines[0])) if lines else ""
    for title in (first, "config", "verdict", "peak GiB", "step s", "price"):
        table.add_column(title)
    for line in lines:
        names = (first, "config", "verdict", "peak_gib", "step_s", "price")
        table.add_row(*(_short(line.get(name)) for name in names))
    console.print(table)
    print_line(console, last, highlight=False)


def _short(value: Any) -> str:
    return "?" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def memory_of(text: str) -> float:
    """Returns GiB; GB are 10^9 bytes. Raises UserError.

    >>> memory_of("24GiB"), round(memory_of("24GB"), 2)
    (24.0, 22.35)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(GB|GiB)", text.strip())
    if match is None or not float(match[1]):
        raise UserError(f"--memory {text}: expected a size with its unit, such as 24GB or 22.5GiB")
    return float(match[1]) * (1e9 / GIB if match[2] == "GB" else 1.0)


def machines_of(options: PlanOptions) -> list[Machines]:
    hardware = read_hardware(options.hardware)
    return [parse_machines(text, options.nodes, hardware) for text in options.on]


def ask(recipe: Recipe, path: str, options: PlanOptions, machines: Sequence[Machines]) -> PlanRequest:
    """Reads all that does not depend on the place: shapes, lengths, tables. Raises UserError."""
    config, shapes_from = config_and_source(recipe)
    found = read_lengths(recipe)

    def repack(recipe: Recipe) -> RowFacts:
        return found.rows(recipe, config) if isinstance(found, Lengths) else widest(recipe, found, config)

    shapes = shapes_of(recipe, config, all(one.key == CPU for one in machines))
    tables = read_hardware(options.hardware), read_prices(options.prices)
    return PlanRequest(recipe, path, config, shapes, repack(recipe), *tables, shapes_from, options.spot, repack)


def shapes_of(recipe: Recipe, config: PretrainedConfig, on_cpu: bool) -> dict[bool, Shape]:
    weights = weights_of(recipe, config).weights
    both = (False, True)
    return {recomputes: Shape.of(weights, recipe, config, on_cpu, recomputes) for recomputes in both}


def config_of(recipe: Recipe) -> PretrainedConfig:
    return config_and_source(recipe)[0]


def config_and_source(recipe: Recipe) -> tuple[PretrainedConfig, str]:
    """Returns the config of the recipe's model: of its folder or the hub's cache, else of the shipped table; and which
    of these it is of. Raises UserError."""
    try:
        base_config(recipe.model)
    except UserError as error:
        name, sees_images = recipe.model.name or "", recipe.model.train is not None
        config = shipped_config(name, sees_images)
        if config is None:
            raise UserError(
                f"{error}\nNothing is downloaded for a plan, and the shipped table does not have it: give a folder "
                "with its config.json, or download it once"
            ) from None
        from finetune.models.config import without_dropout

        config = without_dropout(config) if recipe.objective.drops_nothing else config
        return config, shapes_source(name, sees_images)
    return training_config(recipe), "its config.json"


def ranked(choices: Sequence[Choice], options: PlanOptions) -> list[Choice]:
    """Best first: by verdict, then within budget and deadline, then by time or price."""
    most_hours = hours_of(options.deadline) if options.deadline else None

    def key(one: Choice) -> tuple[Any, ...]:
        too_late = most_hours is not None and (one.hours is None or one.hours > most_hours)
        too_dear = options.budget is not None and (one.price is None or one.price > options.budget)
        seconds = one.step.seconds if one.step else 0.0
        cost = one.per_million or 0.0
        order = (cost, seconds) if options.by == "price" else (seconds, cost)
        return *one.place_in_order, too_late or too_dear, *order, one.peak

    return sorted(choices, key=key)


def hours_of(text: str) -> float:
    """Raises UserError.

    >>> hours_of("90m"), hours_of("2d")
    (1.5, 48.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([mhd])", text.strip())
    if match is None:
        raise UserError(f"--deadline {text}: expected a number with its unit, such as 12h, 90m or 2d")
    return float(match[1]) * {"m": 1 / 60, "h": 1.0, "d": 24.0}[match[2]]


# --- --write


def write_config(request: PlanRequest, one: Choice, folder: Path) -> list[str]:
    """Writes the accelerate config of a choice; returns lines for people: the file, the launch, what may change."""
    path = folder / f"plan-{one.config}-{one.launch.processes}.yaml"
    text = yaml.safe_dump(accelerate_config(one), sort_keys=False)
    write_atomically(path, f"# Written by `finetune plan {request.path} --on {one.machines.name}`.\n{text}")
    lines = [f"wrote {path}", f"accelerate launch --config_file {path} -m finetune train {request.path}"]
    lines[1] += "".join(f" {line.replace(': ', '=')}" for line in as_lines(one.changes))
    free = ["train.activation_checkpointing", "train.activation_offload"]
    if not drops(request.recipe, request.config):
        free.insert(0, "batch.rows_per_device")
    now = as_lines({key: one.changes.get(key, value_of(request.recipe, key)) for key in free})
    return [*lines, f"lines of the recipe that may change without changing its result: {', '.join(now)}"]


def accelerate_config(one: Choice) -> dict[str, Any]:
    return {**one.launch.config, "num_processes": one.launch.processes, "num_machines": one.machines.machines}
