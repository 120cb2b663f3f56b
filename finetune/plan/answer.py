"""Output of `plan`: choices as objects for machines, as a table with its reasons for people."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from finetune.engine.hardware import CPU, GIB
from finetune.engine.parallelism_rules import Architecture
from finetune.models.attention import attention_for
from finetune.models.stored_config import stored_notes
from finetune.plan.lengths import ROWS_KEPT
from finetune.plan.micro_batch import kernels_at
from finetune.plan.search import (
    Choice,
    PlanRequest,
    SearchResult,
    answers,
    as_lines,
    cheapest,
)
from finetune.plan.speed import StepTime
from finetune.training.run_plan import FEW_STEPS, run_length
from finetune.utils import print_line

SHOWN = 12  # choices in the table for people
_MOST_IN_ONE = 16  # devices that machines for rent have
_BAR = 14  # characters of the longest
_COLOURS = {"fits": "green", "tight": "yellow", "no": "red"}


def as_dicts(request: PlanRequest, choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """Returns an object for each choice, see docs/reference/plan.md; None for numbers that are not known."""
    first = answers(choices)
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
            "host_need_gib": round(one.host_need, 3),
            "host_has_gib": one.host_has,
            "disk_gib": round(one.memory.disk / GIB, 3),
            "host_after_gib": {name: round(size / GIB, 3) for name, size in one.memory.after.items()},
            "step_s": one.step and one.step.seconds,
            "step_parts_s": one.step and one.step.parts,
            "speeds": one.step and one.step.source,
            **(
                {
                    "rollouts": {
                        "cohorts": sampled.cohorts,
                        "cohorts_of_a_rank": sampled.each,
                        "cache_gib": round(sampled.cache / GIB, 3),
                        "cohort_gib": round(sampled.peak / GIB, 3),
                        "teacher_gib": round(sampled.teacher / GIB, 3),
                        "initial_weights_gib": round(sampled.initial / GIB, 3),
                        "largest_cohort": sampled.largest,
                    }
                }
                if (sampled := one.sampled)
                else {}
            ),
            "tokens_per_s": one.tokens_per_s,
            "hours": one.hours,
            "price": one.price,
            "price_per_million_tokens": one.per_million,
            "currency": one.currency,
            "changes": one.changes,
            "config_changes": one.config_changes,
            "why": why(request, one),
            "is_answer": any(one is other for other in first),
            "assumed": assumptions(request, one),
        }
        for one in choices
    ]


def why(request: PlanRequest, one: Choice) -> str:
    """Returns the reason for a choice's verdict and speed, in a line."""
    phase = max(one.memory.phases, key=lambda name: one.memory.phases[name])
    device = one.machines.device.gib
    if one.memory.at_least:
        return (
            f"the state kept {phase} alone is {-one.free:.1f} GiB more than the {device:.1f} of a device: no step "
            "weighed"
        )
    if one.host_missing:
        room = f"needs {one.host_need:.0f} GiB of host memory on each machine, which has {one.host_has:.0f}"
        room += f", and {-one.free:.1f} GiB more than the {device:.1f} of a device" if one.free < 0 else ""
    elif one.verdict == "no":
        room = f"{-one.free:.1f} GiB more than the {device:.1f} of a device, in {phase}"
    else:
        margin = request.hardware.reserve.margin * device
        room = f"{one.free:.1f} of {device:.1f} GiB free, least in {phase}"
        room += f"; fewer than the margin of {margin:.1f}" if one.free < margin else ""
        has = "not known to be there" if one.host_has is None else f"of {one.host_has:.0f}"
        needs = one.memory.host > 0 or (one.verdict == "tight" and one.free >= margin)
        room += f"; needs {one.host_need:.0f} GiB of host memory on each machine, {has}" if needs else ""
    if one.step is None:
        key, precision = one.machines.key, request.recipe.train.precision
        reason = "no finished run on such a device" if key == CPU else f"the table has no speed of {key} in {precision}"
        return f"{room}; time not known: {reason}"
    share = one.step.parts[one.step.limit] / one.step.seconds
    if one.faster is None or one.faster.step is None or one.step is None:
        not_faster = ""
    else:
        part, more = _difference(one.faster.step, one.step)
        fewer = f"{one.faster.config} on {one.faster.machines.name}"
        not_faster = f"; not faster than {fewer} ({one.faster.step.seconds:.3g} s a step): {more:.3g} s more of {part}"
    return f"{room}; limited by {one.step.limit} ({share:.0%} of a step){not_faster}"


def _difference(one: StepTime, other: StepTime) -> tuple[str, float]:
    """Returns the part of a step that the other has most of in addition, and its seconds."""
    gains = {name: other.parts.get(name, 0.0) - one.parts.get(name, 0.0) for name in (*one.parts, *other.parts)}
    part = max(gains, key=lambda name: gains[name])
    return part, gains[part]


def refused(results: Sequence[SearchResult]) -> list[dict[str, Any]]:
    """Returns an object for each kind of machines on which no config can run, with the rules."""
    none = [result for result in results if not result.choices]
    return [
        {
            "config": None,
            "on": result.machines.name,
            "verdict": "no",
            "why": "; ".join(dict.fromkeys(result.illegal.values())),
        }
        for result in none
    ]


def assumptions(request: PlanRequest, one: Choice) -> list[str]:
    """Returns the assumptions behind the numbers of a choice; the reserve, the speeds, offload and prices have lines of
    their own."""
    sizes, machines, batch, hardware = one.launch.parallelism, one.machines, request.recipe.batch, request.hardware
    lines = []
    if batch.rows_per_device == "auto":
        lines.append("batch.rows_per_device: auto is 1; the run finds how many rows fit")
    if batch.tokens_per_device is not None:
        lines.append("a micro-batch is the fullest row, as often as batch.tokens_per_device has room for it")
    if request.recipe.rollouts is not None:
        lines.append(
            "rollouts: each sample has max_new_tokens after the longest prompt, weights stay gathered while sampling, "
            "and rewards take no time"
        )
    if request.rows.images and request.rows.rows is not None:
        lines.append(f"the fullest row has as many images as any of {ROWS_KEPT} rows that were looked at")
    if sizes.expert > 1 or (sizes.tensor > 1 and Architecture.of(request.config).experts):
        lines.append("ep, tp: all experts get equally many tokens")
    if sizes.pipeline > 1:
        lines.append("pipelines: each stage takes its share of the layers' time, and keeps what its schedule says")
    if machines.key == CPU:
        return lines
    if machines.device.memory_gib is None:
        lines.append(f"{machines.key} has the memory of its data sheet; what torch reports differs by a little")
    device, efficiency = machines.device, hardware.efficiency
    if not device.has_flash_kernels:
        choice = attention_for(
            request.recipe, request.config, "cuda", kernels_at("cuda", device.kernels, request.recipe.model.attention)
        )
        speed = f"{efficiency.flex:.0%} of a flash kernel's speed ({efficiency.flex_source})"
        lines.append(f"attention on {machines.key} ({choice.reason}) has {speed} and keeps as many bytes")
    elif device.capability is None:
        lines.append(f"{machines.key} has the attention kernels of a card of capability 9.0")
    if one.step is not None and one.launch.processes > 1:
        names = [machines.device.link, *([machines.device.network] if machines.machines > 1 else [])]
        links = ((name, hardware.links[name]) for name in names)
        lines += [f"collectives reach {x.share:.0%} of {name}'s {x.gb_s:g} GB/s ({x.source})" for name, x in links]
        lines.append(f"{one.launch.kind}: communication is hidden by up to {one.step.hides:.0%} of compute")
    return lines


# --- for people


def show(
    console: Console,
    request: PlanRequest,
    choices: Sequence[Choice],
    results: Sequence[SearchResult],
    verbose: bool = False,
) -> None:
    """Prints a table that begins with the best choice of each kind of machines, their reasons, and the sources of the
    numbers. verbose: with places that do not fit, and the rules that forbid others."""
    first, shown = answers(choices), in_table(choices, verbose)
    # The letter that stands in the table for each changed key that not all choices have.
    changed = dict.fromkeys(line for one in shown for line in _own_changes(one, shown))
    letters = dict(zip(changed, string.ascii_lowercase, strict=False))
    for line in facts(request, shown, results):
        print_line(console, line, highlight=False, markup=False)
    console.print(_table(shown, letters, results))
    sizes = {one.config: re.sub(r" \d+", "", one.sizes) for one in shown if one.sizes}
    notes = [f"sizes: {', '.join(f'{config} {names}' for config, names in sizes.items())}"] if sizes else []
    notes += [f"with {letter}: {line}" for line, letter in letters.items()]
    for line in [*notes, *([] if verbose else _hidden(choices, shown, results))]:
        print_line(console, line, highlight=False, markup=False, style="dim")
    console.print()
    for one in first:
        print_line(console, f"[bold]{one.name}[/bold]: {escape(why(request, one))}", highlight=False)
        second = next((other for other in choices if other.machines == one.machines and other is not one), None)
        if one is first[0] and second is not None:
            print_line(console, _against(one, second), highlight=False, markup=False)
        if one.sampled is not None:
            sampled, settings = one.sampled, request.recipe.rollouts
            assert settings is not None
            fits = f"rollouts.cohort up to {sampled.largest:,} fits" if sampled.largest else "not even one sample fits"
            seconds = one.step.parts.get("generation") if one.step else None
            took = f", at most {seconds:.3g} s" if seconds else ""
            kept = f"; on each device the teacher, {sampled.teacher / GIB:.2f} GiB" if sampled.teacher else ""
            if sampled.initial:
                kept += f"; in host memory of each process the initial weights, {sampled.initial / GIB:.2f} GiB"
            line = (
                f"rollouts: {sampled.cohorts:,} cohorts of {settings.cohort:,} samples, {sampled.each:,} on a rank one "
                f"after another{took}; a cohort takes {sampled.peak / GIB:.2f} GiB, {sampled.cache / GIB:.2f} of it "
                f"cache; {fits}{kept}"
            )
            print_line(console, line, highlight=False, markup=False)
    for line in refused(results):
        print_line(console, f"[bold]{line['on']}[/bold]: {escape(line['why'])}", highlight=False)
    console.print()
    console.print(_pictures(first[0]))
    console.print()
    notes, memory = [], first[0].memory
    if memory.host or memory.disk:
        host, disk = memory.host / GIB, memory.disk / GIB
        notes.append(f"of each machine: {host:.1f} GiB of host memory, {disk:.1f} of disk")
    after = ", ".join(f"{name} {size / GIB:.2f}" for name, size in memory.after.items())
    notes.append(f"in host memory after the steps, GiB of tensors of one process: {after}")
    notes += [*price_lines(request, first[0]), *rests_on(request, shown)]
    for line in [*notes, *(_forbidden(results) if verbose else ())]:
        print_line(console, line, highlight=False, markup=False, style="dim")


def in_table(choices: Sequence[Choice], verbose: bool = False) -> Sequence[Choice]:
    """Returns the choices of the table: the answers, then what fits, up to a number of lines."""
    if verbose:
        return choices
    first = answers(choices)
    others = [one for one in choices[len(first) :] if one.verdict != "no"]
    return [*first, *others[: max(0, SHOWN - len(first))]]


def _hidden(choices: Sequence[Choice], shown: Sequence[Choice], results: Sequence[SearchResult]) -> list[str]:
    """Returns a line that counts what the table leaves out; none if it leaves out nothing."""
    left = [one for one in choices if all(one is not other for other in shown)]
    fit, names = sum(one.verdict != "no" for one in left), {name for result in results for name in result.illegal}
    counts = {"more": fit, "that do not fit": len(left) - fit, "not possible": len(names)}
    parts = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return [f"-v shows {parts}"] if parts else []


def _pictures(one: Choice) -> Table:
    """Returns bars of memory by phase and, if it is known, of a step's time by part."""
    phases = {name: (f"{size / GIB:.2f}", size / GIB) for name, size in one.memory.phases.items()}
    pictures = [_bars(f"GiB of tensors, rank {one.memory.rank}", phases)]
    if step := one.step:
        scale, unit = (1000, "ms") if step.seconds < 10 else (1, "s")
        times = {
            name: (f"{scale * seconds:,.1f} {unit} {seconds / step.seconds:4.0%}", seconds)
            for name, seconds in step.parts.items()
        }
        pictures.append(_bars(f"a step, {step.seconds:.3g} s", times))
    grid = Table.grid(padding=(0, 3, 0, 0))
    grid.add_row(*pictures)
    return grid


def facts(request: PlanRequest, choices: Sequence[Choice], results: Sequence[SearchResult]) -> list[str]:
    """Returns facts of the run, then devices and changed keys that all choices have."""
    recipe, rows, shape = request.recipe, request.rows, request.shapes[False]
    lines = [
        f"{request.path}: {shape.parameters:,} parameters, {shape.trained:,} trained",
        f"shapes: {request.shapes_from}",
        f"lengths: {rows.source}",
        f"a step: {recipe.batch.rows} rows, {rows.tokens_per_row * recipe.batch.rows:,.0f} tokens, "
        f"{rows.supervised_share:.0%} supervised; longest row {sum(rows.heaviest):,} tokens",
        *(f"note: {one}" for one in stored_notes(recipe, request.config)),
    ]
    if rows.rows is None and recipe.train.max_steps is None:
        lines.append("steps: not known without the data; hours and price of the run neither")
    else:
        steps = run_length(recipe.train, recipe.batch.rows, rows.rows)[0]
        warmup = recipe.schedule.warmup(steps)
        lines.append(f"steps: {steps:,}, of which {warmup:,} ({warmup / max(1, steps):.0%}) warm up")
        if steps < FEW_STEPS:
            few = f"only {steps} steps, and below about {FEW_STEPS} a run learns little"
            lines.append(f"note: {few}: a smaller batch.rows")
    for machines in (result.machines for result in results):
        lines += [f"on {machines.name}"] if len(results) == 1 else []
        each, more = divmod(machines.per_machine, machines.machines)
        if machines.machines > 1 and machines.per_machine > _MOST_IN_ONE and not more:
            lines.append(
                f"note: {machines.count:,} devices: --on says what each machine has; {machines.per_machine} in all are "
                f"--on {each}x{machines.key} --nodes {machines.machines}"
            )
    shared = {key: value for key, value in choices[0].changes.items() if _all_have(choices, key)}
    return [*lines, *(f"all with {line}" for line in as_lines(shared))]


def _forbidden(results: Sequence[SearchResult]) -> list[str]:
    """Returns a line for each rule, with the configs that it forbids; they may differ in their sizes."""
    lines: dict[str, tuple[list[str], str]] = {}
    for name, rule in {name: rule for result in results for name, rule in result.illegal.items()}.items():
        alike = name.split()[0] + re.sub(r"\d+", "", rule)
        lines.setdefault(alike, ([], rule))[0].append(name)
    return [f"not possible: {', '.join(names)}: {rule}" for names, rule in lines.values()]


def _all_have(choices: Sequence[Choice], key: str) -> bool:
    return all(one.changes.get(key) == choices[0].changes.get(key) for one in choices)


def _own_changes(one: Choice, choices: Sequence[Choice]) -> list[str]:
    own = {key: value for key, value in one.changes.items() if not _all_have(choices, key)}
    return as_lines({**own, **one.config_changes})


def _table(choices: Sequence[Choice], letters: dict[str, str], results: Sequence[SearchResult]) -> Table:
    """Returns a line for each choice, and for each kind of machines without one. Columns without any number are left
    out."""
    several = len(results) > 1
    narrow = several or any(one.memory.host for one in choices)  # 80 columns
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0 if narrow else 1))
    currencies = {one.currency for one in choices if one.price is not None}
    currency = currencies.pop() if len(currencies) == 1 else None
    sizes = ["x".join(re.findall(r"\d+", one.sizes)) for one in choices]  # `4x2`
    columns: dict[str, list[str]] = {
        "config": [f"{one.config} {numbers}".strip() for one, numbers in zip(choices, sizes, strict=True)],
        "on": [one.machines.name if several else "" for one in choices],
        "verdict": [f"[{_COLOURS[one.verdict]}]{one.verdict}[/]" for one in choices],
        "peak GiB": [f"{'> ' if one.memory.at_least else ''}{one.peak / GIB:.1f}" for one in choices],
        "free": ["" if several else f"{one.free:+.1f}" for one in choices],
        "host": [f"{one.host_need:.0f}" if one.memory.host or one.host_missing else "" for one in choices],
        "step s": [f"{one.step.seconds:.3g}" if one.step else "?" for one in choices],
        "tok/s": [f"{one.tokens_per_s:,.0f}" if one.tokens_per_s else "?" for one in choices],
        "hours": [f"{one.hours:.2f}" if one.hours else "?" for one in choices],
        f"price {currency}" if currency else "price": [
            "?" if one.price is None else f"{one.price:,.2f}" if currency else f"{one.price:,.2f} {one.currency}"
            for one in choices
        ],
        "with": [" ".join(letters[line] for line in _own_changes(one, choices)) for one in choices],
    }
    shown = {title: cells for title, cells in columns.items() if set(cells) - {"?", ""}}
    for title in shown:
        is_text = title in ("config", "on", "verdict", "with")
        table.add_column(title, justify="left" if is_text else "right", no_wrap=is_text)
    rows, first = list(zip(*shown.values(), strict=True)), len(answers(choices))
    cells = {"config": "-", "on": "", "verdict": f"[{_COLOURS['no']}]no[/]"}
    without = [{**cells, "on": line["on"]} for line in refused(results)]
    for row in rows[:first]:
        table.add_row(*row)
    for line in without:
        table.add_row(*(line.get(title, "") for title in shown))
    if several and rows[first:]:
        table.add_row()
    for row in rows[first:]:
        table.add_row(*row)
    return table


def _against(first: Choice, second: Choice) -> str:
    """Returns the reason why the first choice is not the second."""
    less = (second.peak - first.peak) / GIB
    if first.verdict != second.verdict:
        reason = f"which is `{second.verdict}` ({second.free:+.1f} GiB free)"
        return f"before {second.name}, {reason}"
    if first.verdict == "no":
        return f"before {second.name}: of memory less is missing ({less:+.1f} GiB on a device)"
    if first.step is None or second.step is None:
        return f"before {second.name}: {less:.1f} GiB less on a device"
    if second.step.seconds < 1.005 * first.step.seconds:
        return f"before {second.name}: as fast by the formula, {less:+.1f} GiB there"
    part, gain = _difference(first.step, second.step)
    faster = second.step.seconds / first.step.seconds - 1
    return f"before {second.name}: {faster:.0%} faster, most of it by {part} ({gain:.3g} s a step)"


def _bars(title: str, values: dict[str, tuple[str, float]]) -> Table:
    """Returns a line for each name: its text, and a bar as long as its number."""
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True, style="cyan")
    largest = max(number for _, number in values.values()) or 1.0
    for name, (text, number) in values.items():
        table.add_row(name, text, "\N{FULL BLOCK}" * round(_BAR * number / largest))
    return table


def price_lines(request: PlanRequest, one: Choice) -> list[str]:
    """Returns the price of a device with its source, and the price of a million tokens."""
    if (price := cheapest(request.prices, one.machines)) is None:
        return [f"price: no line for {one.machines.key}: add one to prices.yaml (docs/reference/plan.md)"]
    amount, currency = price.on_demand
    lines = [f"price: {amount} {currency}/hour and device, {price.provider}, {price.date}: {price.source}"]
    if one.per_million is not None:
        lines.append(f"{one.per_million:.2f} {currency} per million supervised tokens")
    return lines


def rests_on(request: PlanRequest, choices: Sequence[Choice]) -> list[str]:
    """Returns the sources of the numbers, the parts that they leave out, and the assumptions."""
    reserve = request.hardware.reserve
    lines = []
    if any(one.machines.key != CPU for one in choices):
        lines.append(
            f"on top of tensors: {reserve.context_gib} GiB of context, {reserve.collectives_gib} of communicators, "
            f"{reserve.gaps:.0%} of gaps ({reserve.source}, {reserve.date})"
        )
    if any(one.memory.host for one in choices):
        has = {one.machines.name: one.host_has for one in choices}
        known = [f"{name} {gib:.0f} GiB" for name, gib in has.items() if gib is not None]
        unknown = [name for name, gib in has.items() if gib is None]
        lines.append(
            f"host memory of each machine: {', '.join([*known, *(f'{name} not known' for name in unknown)])}"
            f"{' (--host-memory)' if unknown else ''}; {request.hardware.host.process_gib:g} GiB of it for each "
            "process beside its tensors, an assumption"
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
