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

from finetune.errors import UserError
from finetune.models.config import base_config, training_config
from finetune.planning.estimate.finished_runs import speeds_here
from finetune.planning.estimate.lengths import ROWS_KEPT, Lengths, RowFacts, read_lengths, widest
from finetune.planning.estimate.memory_page import write_page
from finetune.planning.estimate.probe import probe
from finetune.planning.estimate.search import (
    RESUME_S,
    SAVE_S,
    Choice,
    Found,
    PlanRequest,
    as_lines,
    cheapest,
    drops,
    search,
    spot_loss,
    value_of,
)
from finetune.planning.estimate.shapes import shapes_of as weights_of
from finetune.planning.estimate.speed import HIDES, Shape, Speeds
from finetune.planning.estimate.tables import (
    CPU,
    GIB,
    Machines,
    parse_machines,
    read_hardware,
    read_prices,
    shapes_source,
    shipped_config,
)
from finetune.planning.estimate.what_if import sweep, to_fit, values_of
from finetune.planning.plan import FEW_STEPS, run_length
from finetune.recipe import Recipe, load_recipe
from finetune.utils import write_atomically

SHOWN = 12  # places in the table for people


@dataclass(frozen=True)
class PlanOptions:
    on: tuple[str, ...]
    nodes: int = 1
    budget: float | None = None
    deadline: str | None = None
    by: str = "time"
    spot: bool = False
    measure: bool = False  # --probe
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
        show(console, request, choices, founds, options)
    if options.html:
        unknown = _unknown(request, choices)
        lines = [f"lengths: {request.rows.source}", *_money(request, choices[0]), *unknown]
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
    founds = [search(request, one, speeds_for(request, one, options)) for one in machines]
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
            reached = [speeds_for(request, one, options) for one in machines]
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
            for change, chosen in to_fit(request, one, speeds_for(request, one, options)):
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
    console.print(last, highlight=False)


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


def speeds_for(request: PlanRequest, machines: Machines, options: PlanOptions) -> Speeds | None:
    if options.measure:
        shape = request.shapes[request.recipe.train.activation_checkpointing is True]
        return probe(request.recipe, request.config, shape, request.rows, machines.per_machine)
    return speeds_here(request.recipe, machines, request.hardware)


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


# --- for machines


def as_dicts(request: PlanRequest, choices: Sequence[Choice]) -> list[dict[str, Any]]:
    return [
        {
            "config": one.config,
            "on": one.machines.name,
            "sizes": one.sizes,
            "processes": one.launch.processes,
            "verdict": one.verdict,
            "peak_gib": round(one.peak / GIB, 3),
            "tensors_gib": round(one.memory.tensors / GIB, 3),
            "at_least": one.memory.at_least,
            "phases_gib": {name: round(size / GIB, 3) for name, size in one.memory.phases.items()},
            "rank": one.memory.rank,
            "host_gib": round(one.memory.host / GIB, 3),
            "disk_gib": round(one.memory.disk / GIB, 3),
            "host_after_gib": {name: round(size / GIB, 3) for name, size in one.memory.after.items()},
            "step_s": one.step and one.step.seconds,
            "step_parts_s": one.step and one.step.parts,
            "speeds": one.step and one.step.source,
            "tokens_per_s": one.tokens_per_s,
            "hours": one.hours,
            "price": one.price,
            "price_per_million_tokens": one.per_million,
            "currency": one.currency,
            "changes": one.changes,
            "why": why(request, one),
            "assumed": assumptions(request, one),
        }
        for one in choices
    ]


def why(request: PlanRequest, one: Choice) -> str:
    """Returns what decides about a choice, in a line."""
    phase = max(one.memory.phases, key=lambda name: one.memory.phases[name])
    device = one.machines.device.gib
    if one.memory.at_least:
        return (
            f"what is kept {phase} alone is {-one.free:.1f} GiB more than the {device:.1f} of a device: no step weighed"
        )
    if one.verdict == "no":
        room = f"{-one.free:.1f} GiB more than the {device:.1f} of a device, in {phase}"
    else:
        margin = request.hardware.reserve.margin * device
        room = f"{one.free:.1f} of {device:.1f} GiB free, least in {phase}"
        room += f"; fewer than the margin of {margin:.1f}" if one.verdict == "tight" else ""
    if one.step is None:
        return f"{room}; time not known: --probe measures this machine"
    share = one.step.parts[one.step.limit] / one.step.seconds
    return f"{room}; limited by {one.step.limit} ({share:.0%} of a step)"


def assumptions(request: PlanRequest, one: Choice) -> list[str]:
    """Returns what the numbers of a choice take to be so, and nothing has shown; the reserve, the speeds, offload and
    prices have lines of their own."""
    sizes, machines, batch, hardware = one.launch.parallelism, one.machines, request.recipe.batch, request.hardware
    lines = []
    if batch.rows_per_device == "auto":
        lines.append("batch.rows_per_device: auto is 1; the run finds how many rows fit")
    if batch.tokens_per_device is not None:
        lines.append("a micro-batch is the fullest row, as often as batch.tokens_per_device has room for it")
    if request.rows.images and request.rows.rows is not None:
        lines.append(f"the fullest row has as many images as any of {ROWS_KEPT} rows that were looked at")
    if sizes.expert > 1:
        lines.append("ep: all experts get equally many tokens")
    if sizes.pipeline > 1:
        lines.append("pipelines: each stage takes its share of the layers' time, and keeps what its schedule says")
    if machines.key == CPU:
        return lines
    if machines.device.memory_gib is None:
        lines.append(f"{machines.key} has the memory of its data sheet; what torch reports differs by a little")
    if (machines.device.capability or (0, 0)) < (8, 0):
        lines.append(f"attention keeps on {machines.key} what FlashAttention's kernels keep, which it may not have")
    if one.step is not None and one.launch.processes > 1:
        names = [machines.device.link, *([machines.device.network] if machines.machines > 1 else [])]
        links = ((name, hardware.links[name]) for name in names)
        lines += [f"collectives reach {x.share:.0%} of {name}'s {x.gb_s:g} GB/s ({x.source})" for name, x in links]
        lines.append(f"{one.launch.kind}: communication is hidden by up to {HIDES[one.launch.kind]:.0%} of compute")
    return lines


# --- for people


def show(
    console: Console, request: PlanRequest, choices: Sequence[Choice], founds: Sequence[Found], options: PlanOptions
) -> None:
    recipe, rows = request.recipe, request.rows
    shape = request.shapes[False]
    console.print(f"{request.path}: {shape.parameters:,} parameters, {shape.trained:,} trained")
    console.print(f"shapes: {request.shapes_from}", highlight=False)
    console.print(f"lengths: {rows.source}", highlight=False)
    share = f"{rows.supervised_share:.0%} supervised"
    console.print(
        f"a step: {recipe.batch.rows} rows, {rows.tokens_per_row * recipe.batch.rows:,.0f} tokens, {share}; longest "
        f"row {sum(rows.heaviest):,} tokens",
        highlight=False,
    )
    for line in _run_lines(request):
        console.print(line, highlight=False)
    for line in _shared_by(choices[:SHOWN]):
        console.print(line, highlight=False)
    console.print(_table(choices[:SHOWN]))
    if len(choices) > SHOWN:
        console.print(f"{len(choices) - SHOWN} more with --json")
    console.print(f"[bold]{choices[0].name}[/bold]: {why(request, choices[0])}", highlight=False)
    for line in (
        *_against(choices),
        *_steps_of(choices[0]),
        *_money(request, choices[0]),
        *_unknown(request, choices),
    ):
        console.print(line, highlight=False)
    illegal = {name: rule for found in founds for name, rule in found.illegal.items()}
    if illegal:
        console.print("not possible:")
        for name, rule in illegal.items():
            console.print(f"  {name}: {rule}", highlight=False, markup=False)


def _run_lines(request: PlanRequest) -> list[str]:
    recipe, rows = request.recipe, request.rows
    if rows.rows is None and recipe.train.max_steps is None:
        return ["steps: not known without the data; hours and price of the run neither"]
    steps = run_length(recipe, rows.rows)[0]
    warmup = recipe.schedule.warmup(steps)
    lines = [f"steps: {steps:,}, of which {warmup:,} ({warmup / max(1, steps):.0%}) warm up"]
    if steps < FEW_STEPS:
        lines.append(f"note: only {steps} steps, and below about {FEW_STEPS} a run learns little: a smaller batch.rows")
    return lines


def _shared_by(choices: Sequence[Choice]) -> list[str]:
    """Returns what is said above the table and not in its lines: devices and changed keys that all of them have."""
    devices = {one.machines.name for one in choices}
    shared = {key: value for key, value in choices[0].changes.items() if _all_have(choices, key)}
    return [*(f"on {name}" for name in devices if len(devices) == 1), *(f"all with {x}" for x in as_lines(shared))]


def _all_have(choices: Sequence[Choice], key: str) -> bool:
    return all(one.changes.get(key) == choices[0].changes.get(key) for one in choices)


def _table(choices: Sequence[Choice]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("config", "verdict", "peak GiB", "free", "step s", "tokens/s", "hours", "price", ""):
        left = title in ("config", "verdict", "")
        table.add_column(title, justify="left" if left else "right", no_wrap=title == "config")
    several = len({one.machines.name for one in choices}) > 1
    for one in choices:
        own = {key: value for key, value in one.changes.items() if not _all_have(choices, key)}
        notes = [*([one.sizes] if one.sizes else []), *as_lines(own)]
        table.add_row(
            f"{one.config} on {one.machines.name}" if several else one.config,
            one.verdict,
            f"{'> ' if one.memory.at_least else ''}{one.peak / GIB:.1f}",
            f"{one.free:+.1f}",
            f"{one.step.seconds:.3g}" if one.step else "?",
            f"{one.tokens_per_s:,.0f}" if one.tokens_per_s else "?",
            f"{one.hours:.2f}" if one.hours else "?",
            f"{one.price:,.2f} {one.currency}" if one.price is not None else "?",
            ", ".join(notes),
        )
    return table


def _against(choices: Sequence[Choice]) -> list[str]:
    """Says why the first is not the second."""
    if len(choices) < 2:
        return []
    first, second = choices[:2]
    if first.verdict != second.verdict:
        return [f"before {second.name}, which is `{second.verdict}` ({second.free:+.1f} GiB free)"]
    if first.step is None or second.step is None:
        return [f"before {second.name}: {(second.peak - first.peak) / GIB:.1f} GiB less on a device"]
    gains = {
        name: second.step.parts.get(name, 0) - first.step.parts.get(name, 0)
        for name in {*first.step.parts, *second.step.parts}
    }
    part = max(gains, key=lambda name: gains[name])
    if second.step.seconds < 1.005 * first.step.seconds:
        return [f"before {second.name}: as fast by the formula, {(second.peak - first.peak) / GIB:+.1f} GiB there"]
    faster = second.step.seconds / first.step.seconds - 1
    return [f"before {second.name}: {faster:.0%} faster, most of it by {part} ({gains[part]:.3g} s a step)"]


def _steps_of(one: Choice) -> list[str]:
    phases = ", ".join(f"{name} {size / GIB:.2f}" for name, size in one.memory.phases.items())
    lines = [f"peak of tensors on rank {one.memory.rank}, GiB: {phases}"]
    if one.step:
        lines.append("a step, s: " + ", ".join(f"{name} {seconds:.3g}" for name, seconds in one.step.parts.items()))
    if one.memory.host or one.memory.disk:
        lines.append(
            f"of each machine: {one.memory.host / GIB:.1f} GiB of host memory, {one.memory.disk / GIB:.1f} of disk"
        )
    after = ", ".join(f"{name} {size / GIB:.2f}" for name, size in one.memory.after.items())
    lines.append(f"in host memory after the steps, GiB of tensors of one process: {after}")
    return lines


def _money(request: PlanRequest, one: Choice) -> list[str]:
    if (found := cheapest(request.prices, one.machines, request.spot)) is None:
        return [f"price: no line for {one.machines.key}: add one to prices.yaml (docs/plan.md)"]
    price, (amount, currency) = found
    each = f"{amount} {currency}/hour and device, {price.provider}, {price.date}: {price.source}"
    lines = [f"price: {each}"]
    if one.per_million is not None:
        lines.append(f"{one.per_million:.2f} {currency} per million supervised tokens")
    if request.spot:
        interval, lost = spot_loss(request.prices, price, one.machines)
        rate = price.losses_per_hour or request.prices.losses_per_hour
        assumed = "" if price.losses_per_hour else ", an assumption"
        lines.append(
            f"spot: {rate} losses an hour and machine{assumed}; least is lost with checkpoint.every_minutes: "
            f"{interval * 60:.0f}, {lost:.1%} of the time, which the price includes, where a checkpoint takes "
            f"{SAVE_S:.0f} s and a new machine {RESUME_S / 60:.0f} minutes, as assumed"
        )
    return lines


def _unknown(request: PlanRequest, choices: Sequence[Choice]) -> list[str]:
    """Returns what the numbers rest on, and what they leave out."""
    reserve = request.hardware.reserve
    lines = []
    if any(one.machines.key != CPU for one in choices):
        lines.append(
            f"on top of tensors: {reserve.context_gib} GiB of context, {reserve.collectives_gib} of communicators, "
            f"{reserve.gaps:.0%} of gaps ({reserve.source}, {reserve.date})"
        )
    lines += [f"speeds: {source}" for source in dict.fromkeys(one.step.source for one in choices if one.step)]
    if any(one.launch.offloads_optimizer and one.step and one.machines.key != CPU for one in choices[:SHOWN]):
        host = request.hardware.host
        lines.append(
            f"offload: AdamW on {host.cores_per_device:g} cores a device, {host.disk_gb_s:g} GB/s of disk: "
            f"{host.source} ({host.date})"
        )
    waits = all(one.step and one.step.knows_data_wait for one in choices)
    unknown = [
        f"{'' if waits else 'data wait, '}evaluations, checkpoints, the start",
        *([request.rows.unknown] if request.rows.unknown else []),
    ]
    lines.append(f"not known: {'; '.join(unknown)}")
    assumed = dict.fromkeys(line for one in choices[:SHOWN] for line in assumptions(request, one))
    return [*lines, *(f"assumed: {line}" for line in assumed)]


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
