"""`plan`: whether a recipe fits, its speed and its price, on devices that this machine need not have."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from transformers import PretrainedConfig

from finetune.engine.hardware import CPU, GIB, read_hardware
from finetune.errors import UserError
from finetune.models.dropout import drops
from finetune.plan.answer import as_dicts, refused, show
from finetune.plan.finished_runs import speeds_here
from finetune.plan.lengths import Lengths, RowFacts, read_lengths, widest
from finetune.plan.search import (
    Choice,
    PlanRequest,
    SearchResult,
    answers,
    as_lines,
    best,
    changed,
    search,
    value_of,
    with_faster,
)
from finetune.plan.shapes import shapes_of as weights_of
from finetune.plan.speed import Shape
from finetune.plan.tables import Machines, config_and_source, parse_machines, read_prices
from finetune.recipe import Recipe
from finetune.recipe.load import LoadRecipe
from finetune.utils import print_line, write_atomically

# Changes with which a recipe may fit, the cheapest first: those that keep the result, then those that do not.
_SAME = {"batch.rows_per_device": 1, "train.activation_checkpointing": True, "train.activation_offload": True}
_CHANGES: tuple[tuple[dict[str, Any], str], ...] = (
    *(({key: value}, "same result") for key, value in _SAME.items()),
    ({key: _SAME[key] for key in ("batch.rows_per_device", "train.activation_checkpointing")}, "same result"),
    (_SAME, "same result"),
    ({"optimizer.name": "adamw_8bit"}, "another result: optimizer state in 8 bits"),
    ({"train.precision": "bf16_true"}, "another result: weights and optimizer state in bf16"),
    ({"mode": "qlora", "quantization": "{type: nf4}"}, "another result: frozen weights in 4 bits"),
    ({"data.max_length": 0.5}, "another result: longer examples follow data.overlong"),
    ({"data.max_length": 0.25}, "another result: longer examples follow data.overlong"),
)
_SAVING = 0.01  # of the peak: less is no saving


WritePage = Callable[[Path, PlanRequest, Sequence[Choice], Sequence[SearchResult]], None]


@dataclass(frozen=True)
class PlanOptions:
    on: tuple[str, ...]
    nodes: int = 1
    by: str = "time"
    write: bool = False
    html: Path | None = None
    memory: str | None = None
    hardware: Path | None = None
    prices: Path | None = None
    as_json: bool = False
    verbose: bool = False
    host_memory: str | None = None


def run(
    path: Path,
    overrides: Sequence[str],
    options: PlanOptions,
    console: Console,
    load: LoadRecipe,
    write_page: WritePage,
) -> list[Choice]:
    """The command; returns the choices, the best first; [] for --memory. load: with the rules of all features;
    write_page: for --html. Raises UserError."""
    if not options.on:
        raise UserError("plan: --on is required. Fix: add --on 8xH100-80, or --on 2xcpu for this machine")
    if options.by not in ("time", "price"):
        raise UserError(f"--by {options.by}: no such order. Fix: use time or price")
    if options.host_memory and all(one.key == CPU for one in machines_of(options)):
        raise UserError("--host-memory: on processors memory is this machine's. Fix: remove it")
    if options.verbose and (options.as_json or options.memory):
        raise UserError("-v: --json has all places anyway, and --memory shows the best alone. Fix: leave it out")
    if options.memory:
        show_changes_to_fit(path, overrides, options, options.memory, console, load)
        return []
    request, choices, results = plan(path, overrides, options, load)
    if options.as_json:
        print(json.dumps([*as_dicts(request, choices), *refused(results)], indent=1))
    else:
        show(console, request, choices, results, options.verbose)
    devices = {one.key: one.device for one in machines_of(options) if one.key != CPU}
    found = [one.faster_precision(request.recipe.train.precision) for one in devices.values()]
    notes = [note for note in found if note]
    if options.html:
        write_page(options.html, request, choices, results)
        notes.append(f"wrote {options.html}")
    if options.write:
        notes += write_config(request, choices[0], Path())
    for line in notes:
        print(line, file=sys.stderr if options.as_json else sys.stdout)
    return choices


def plan(
    path: Path, overrides: Sequence[str], options: PlanOptions, load: LoadRecipe
) -> tuple[PlanRequest, list[Choice], list[SearchResult]]:
    """Returns the request, the choices, and the result of the search on each kind of devices. Raises UserError.

    Choices are in order of rank, but the best of each kind of devices comes before all others.
    """
    machines = machines_of(options)
    request = ask(load(path, overrides), str(path), options, machines)
    results = [search(request, one, speeds_here(request.recipe, one, request.hardware)) for one in machines]
    found = [choice for result in results for choice in result.choices]
    if not found:
        rules = "\n".join(f"  {name}: {rule}" for result in results for name, rule in result.illegal.items())
        fix = "Fix: change what the rules name, or choose other devices"
        raise UserError(f"{path}: no config can run it on {', '.join(options.on)}:\n{rules}\n{fix}")
    ones = [best(result.choices) for result in results if result.choices]
    alone = [result.alone for result in results if result.alone is not None]
    choices = ranked(with_faster(found, [*ones, *alone]), options)
    first = answers(choices)
    return request, [*first, *(one for one in choices if all(one is not other for other in first))], results


def machines_of(options: PlanOptions) -> list[Machines]:
    hardware = read_hardware(options.hardware)
    machines = [parse_machines(text, options.nodes, hardware) for text in options.on]
    return list({one.name: one for one in machines}.values())


def ask(recipe: Recipe, path: str, options: PlanOptions, machines: Sequence[Machines]) -> PlanRequest:
    """Reads all that does not depend on the devices: shapes, lengths, tables. Raises UserError."""
    config, shapes_from = config_and_source(recipe)
    lengths = read_lengths(recipe)

    def repack(recipe: Recipe) -> RowFacts:
        return lengths.rows(recipe, config) if isinstance(lengths, Lengths) else widest(recipe, lengths, config)

    shapes = shapes_of(recipe, config, all(one.key == CPU for one in machines))
    tables = read_hardware(options.hardware), read_prices(options.prices)
    host = size_of("--host-memory", options.host_memory) if options.host_memory else None
    return PlanRequest(recipe, path, config, shapes, repack(recipe), *tables, shapes_from, repack, host)


def shapes_of(recipe: Recipe, config: PretrainedConfig, on_cpu: bool) -> dict[bool, Shape]:
    """Returns the shape without and with full activation checkpointing."""
    weights = weights_of(recipe, config).weights
    return {recomputes: Shape.of(weights, recipe, config, on_cpu, recomputes) for recomputes in (False, True)}


def ranked(choices: Sequence[Choice], options: PlanOptions) -> list[Choice]:
    """Best first: by verdict, then by time or price."""

    def key(one: Choice) -> tuple[Any, ...]:
        seconds = one.step.seconds if one.step else math.inf
        cost = math.inf if one.per_million is None else one.per_million
        order = (cost, seconds) if options.by == "price" else (seconds, cost)
        return *one.place_in_order, *order, one.peak

    return sorted(choices, key=key)


def write_config(request: PlanRequest, one: Choice, folder: Path) -> list[str]:
    """Writes the accelerate config of a choice; returns notes: the file, the launch, keys that may change."""
    path = folder / f"plan-{one.config}-{one.launch.processes}.yaml"
    config = {**one.launch.config, "num_processes": one.launch.processes, "num_machines": one.machines.machines}
    text = yaml.safe_dump(config, sort_keys=False)
    write_atomically(path, f"# Written by `finetune plan {request.path} --on {one.machines.name}`.\n{text}")
    overrides = "".join(f" {line.replace(': ', '=')}" for line in as_lines(one.changes))
    free = [] if drops(request.recipe.lora, request.config) else ["batch.rows_per_device"]
    free += ["train.activation_checkpointing", "train.activation_offload"]
    now = as_lines({key: one.changes.get(key, value_of(request.recipe, key)) for key in free})
    return [
        f"wrote {path}",
        f"accelerate launch --config_file {path} -m finetune train {request.path}{overrides}",
        f"lines of the recipe that may change without changing its result: {', '.join(now)}",
    ]


# --- --memory


def show_changes_to_fit(
    path: Path, overrides: Sequence[str], options: PlanOptions, size: str, console: Console, load: LoadRecipe
) -> None:
    """Prints the changes with which the recipe fits into less memory of a device."""
    machines, lines = machines_of(options), list[dict[str, Any]]()
    gib = size_of("--memory", size)

    def remake(changes: dict[str, Any]) -> PlanRequest:
        texts = [f"{key}={value}" for key, value in changes.items()]
        return ask(load(path, [*overrides, *texts]), str(path), options, machines)

    request = remake({})
    for one in machines:
        smaller = replace(one, device=one.device.model_copy(update={"memory_gib": gib}))
        for change, saved, choice in to_fit(request, smaller, remake):
            facts = {"change": change, "saves_gib": saved, **as_dicts(request, [choice])[0]}
            lines.append({**facts, "config": f"{choice.config} {choice.sizes}".strip()})
    if options.as_json:
        print(json.dumps(lines, indent=1))
        return
    several = ("on",) if len(machines) > 1 else ()
    titles = ("change", *several, "config", "verdict", "peak_gib", "saves_gib", "step_s", "price")
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title.replace("_gib", " GiB").replace("_s", " s"))
    for line in lines:
        values = [line.get(name) for name in titles]
        table.add_row(*("?" if x is None else f"{x:.3g}" if isinstance(x, float) else str(x) for x in values))
    console.print(table)
    if not any(line["verdict"] != "no" for line in lines):
        none = f"no setting makes this fit in {size}; use a smaller model or more devices"
        print_line(console, none, highlight=False)


def size_of(option: str, text: str) -> float:
    """Returns GiB; GB are 10^9 bytes. Raises UserError.

    >>> size_of("--memory", "24GiB"), round(size_of("--memory", "24GB"), 2)
    (24.0, 22.35)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(GB|GiB)", text.strip())
    if match is None or not float(match[1]):
        raise UserError(f"{option} {text}: not a size with its unit. Fix: write it like 24GB or 22.5GiB")
    return float(match[1]) * (1e9 / GIB if match[2] == "GB" else 1.0)


def to_fit(
    request: PlanRequest, machines: Machines, remake: Callable[[dict[str, Any]], PlanRequest]
) -> list[tuple[str, float | None, Choice]]:
    """Returns (change, GiB that it saves on a device, its best place): the recipe as it is, then what saves anything.

    If something fits, those that do not are left out. remake: reads the recipe with other values.
    """
    speeds = speeds_here(request.recipe, machines, request.hardware)
    before = {(one.config, one.sizes): one for one in search(request, machines, speeds, widely=False).choices}
    if not before:
        return []
    found: list[tuple[dict[str, Any], str, float | None, Choice]] = []
    for changes, cost in _CHANGES:
        if not (effective := _effective(request.recipe, changes)):
            continue
        with contextlib.suppress(UserError):  # a rule forbids it
            if "mode" in effective:  # another model
                other = remake(effective)
            else:
                other = replace(request, recipe=changed(request.recipe, effective))
                if "data.max_length" in effective and other.repack is not None:
                    other = replace(other, rows=other.repack(other.recipe))
            saving: list[tuple[float | None, Choice]] = []  # GiB; None if the peak of one of them is not known
            for one in search(other, machines, speeds, widely=False).choices:
                was = before.get((one.config, one.sizes))
                is_known = was is not None and not was.memory.at_least and not one.memory.at_least
                saved = (was.peak - one.peak) / GIB if was is not None and is_known else None
                if one.verdict != "no" if saved is None else saved > _SAVING * one.peak / GIB:
                    saving.append((saved, one))
            if not saving:
                continue
            chosen = best([one for _, one in saving])
            # Fewer of these changes, or the same ones, may save as much.
            fewer = [other for less, _, _, other in found if less.items() <= effective.items()]
            if not any(one.config == chosen.config and one.peak <= (1 + _SAVING) * chosen.peak for one in fewer):
                found.append((effective, cost, next(saved for saved, one in saving if one is chosen), chosen))
    lines = [(f"{', '.join(as_lines(changes))} ({cost})", saved, one) for changes, cost, saved, one in found]
    lines.insert(0, ("no change", 0.0, best(list(before.values()))))
    fitting = [line for line in lines if line[2].verdict != "no"]
    return fitting or lines


def _effective(recipe: Recipe, changes: dict[str, Any]) -> dict[str, Any]:
    """Returns the changes that change this recipe; {} if they do not apply to it."""
    if "mode" in changes:
        return changes if recipe.mode == "lora" else {}
    if "optimizer.name" in changes and recipe.optimizer.name != "adamw":
        return {}
    if "train.precision" in changes and (recipe.mode != "full" or recipe.train.precision != "bf16"):
        return {}
    if length := changes.get("data.max_length"):
        changes = {"data.max_length": int(recipe.data.max_length * length)}
    return {key: value for key, value in changes.items() if value_of(recipe, key) != value}
