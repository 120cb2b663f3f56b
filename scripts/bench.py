"""How fast and how small: ours, the bare loop and the peers, in turns, on the same model and the same documents.

    python scripts/bench.py                                      # rows made on the spot
    python scripts/bench.py --rows gsm8k_train.jsonl --json benchmarks/results/speed_cpu.json
    python scripts/bench.py --shape 1b --precision bf16 --row-tokens 4096 --rows-per-step 4      # on a GPU

The bare loop is the limit: the same forward, backward and optimizer on the same packed batches, lying in memory, and
nothing around it. Each measurement is a process of its own; the contenders take turns, from round to round in another
order, and ratios are taken within a round, because other work may load the machine: the median over rounds is shown,
and the lowest and highest.

    tokens/s            median over the steps after the first two, from the end of one optimizer step to the next
    supervised          the same of the tokens that are trained: assistant turns
    of products         the share of what matrix products alone reach on this device (products.py) that its steps make
                        use of, by the FLOPs that ours counts for the same tokens: nothing can be over 100 %
    peak                highest memory of the process up to the last step: resident, or allocated on the GPU
    above loaded        the same less what it had before its first forward
    where it goes       the same in parts: libraries and data (resident before the first forward, less the weights),
                        weights, gradients, optimizer state, and the rest: activations, logits, what is made on the way
                        and what the allocator keeps of it
    first step          from the launch of the process, its imports and the load of the model included; the rows are
                        tokens already for the peers and the bare loop, prepared and cached for ours

Before any figure is shown it is checked that all trained as many supervised tokens in each step, that ours and the bare
loop had the same loss in every step, and the others in the first. Exit status 1 if they did not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

import contenders
import products
import workload
from workload import SHAPES, Work

Cell = dict[str, Any]
WARM_UP = 2  # steps that are not measured: optimizer state, allocator and caches grow in them
DEFAULT = ("ours", "ours_frugal", "bare", "trl", "trl_default", "trainer")
EVERY_STEP = ("ours", "ours_frugal", "bare")  # their losses are compared in each
# Relative differences of a loss. fp32: sums in another order; 16 bit: one rounding of it.
SAME_LOSS = {"fp32": 1e-5, "bf16": 2.0**-8, "bf16_true": 2.0**-7}
SAME_FIRST_LOSS = {"fp32": 1e-4, "bf16": 2.0**-7, "bf16_true": 2.0**-6}
GB = 1e9


def main() -> None:
    arguments = parse_arguments()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory(prefix="finetune-bench-") as name:
        result = measure(arguments, Path(name))
    problems = [problem for mode in result["modes"] for problem in mode["problems"]]
    for mode in result["modes"]:
        Console(width=190).print(table(mode, result))
        print(markdown(mode))
    for absent in result["not_installed"]:
        print(f"not installed: {absent}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for problem in problems:
        print(f"NOT THE SAME WORK: {problem}", file=sys.stderr)
    raise SystemExit(1 if problems else 0)


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, help="jsonl with `question` and `answer`, or `messages`; none: made here")
    parser.add_argument("--limit", type=int, default=1500, help="rows taken from the start of the file")
    parser.add_argument("--shape", choices=list(SHAPES), default="25m", help="of the Llama")
    parser.add_argument("--modes", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--only", nargs="+", choices=list(contenders.CONTENDERS), help="these contenders")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of ours and the bare loop")
    parser.add_argument("--peer-steps", type=int, default=4, help="measured steps of the others, which are slower")
    parser.add_argument("--row-tokens", type=int, default=2048, help="of a packed row")
    parser.add_argument("--rows-per-step", type=int, default=1, help="packed rows, in one forward")
    parser.add_argument("--precision", choices=["fp32", "bf16", "bf16_true"], default="fp32")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--threads", type=int, default=2, help="of each process")
    parser.add_argument("--keep-freed-memory", action="store_true", help="all contenders: contenders.KEPT")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of our recipe alone")
    parser.add_argument("--quick", action="store_true", help="tiny model, two steps, one round, ours and the bare loop")
    parser.add_argument("--json", type=Path, help="where the figures go")
    arguments = parser.parse_args(given)
    if arguments.quick:
        arguments.shape, arguments.rounds, arguments.steps, arguments.peer_steps = "tiny", 1, 2, 2
        arguments.row_tokens, arguments.limit = 512, 200
        arguments.only = arguments.only or ["ours", "bare"]
    return arguments


# --- measuring


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """folder: for everything that is made on the way."""
    wanted = arguments.only or DEFAULT
    device = which_device(arguments.device)
    absent = {name: package for name in wanted if (package := contenders.missing(name, device))}
    work = Work(
        shape=SHAPES[arguments.shape],
        precision=arguments.precision,
        row_tokens=arguments.row_tokens,
        rows_per_step=arguments.rows_per_step,
        steps=WARM_UP + arguments.steps,
        device=device,
        threads=arguments.threads,
        keeps_freed_memory=arguments.keep_freed_memory,
        overrides=tuple(arguments.set),
    )
    parameters = prepare(folder, work, arguments.rows, arguments.limit)
    names = [name for name in wanted if name not in absent]
    tflops = products.measured_apart(device, work.precision, work.threads)
    return {
        "command": "python scripts/bench.py " + shlex.join(sys.argv[1:]),
        "device": device_name(device),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": contenders.versions(),
        "parameters": parameters,
        "work": asdict(work),
        "warm_up_steps": WARM_UP,
        "not_installed": [f"{contenders.LABELS[name]} ({package})" for name, package in absent.items()],
        "products_tflops": tflops,
        "modes": [compare(folder, replace(work, mode=mode), names, arguments, tflops) for mode in arguments.modes],
    }


def prepare(folder: Path, work: Work, rows: Path | None, limit: int) -> int:
    """Model, tokenizer and rows; returns the number of parameters."""
    os.environ["FINETUNE_CACHE"] = str(folder / "cache")  # as in the contenders' processes
    count = 200 + 60 * work.steps * work.rows_per_step * work.row_tokens // 2048
    conversations = workload.conversations_of(rows) if rows else workload.synthetic_conversations(count)
    workload.save_tokenizer(conversations, folder / "model", min(work.shape["vocab_size"], 32768))
    workload.write_rows(folder / "rows.jsonl", conversations[:limit] if rows else conversations)
    return workload.save_weights(work.shape, folder / "model", device=work.device)


def compare(folder: Path, work: Work, names: list[str], arguments: argparse.Namespace, tflops: float) -> dict[str, Any]:
    """All rounds of a mode."""
    workload.write_recipe(folder, work, "messages")
    workload.write_steps(folder, work)
    rows = workload.read_steps(folder)
    cells: list[Cell] = []
    for number in range(arguments.rounds):
        for name in turns(names, number):
            measured = arguments.steps if name in EVERY_STEP else arguments.peer_steps
            result = contenders.run(name, folder, replace(work, steps=WARM_UP + measured))
            cells.append({"round": number, "contender": name, **result, **speed(result, rows)})
            print(
                f"{work.mode}, round {number + 1}, {contenders.LABELS[name]}: "
                f"{cells[-1]['supervised_tokens_per_s']:,.0f} supervised tokens/s, {peak(cells[-1]) / GB:.2f} GB",
                file=sys.stderr,
                flush=True,
            )
    return {
        "mode": work.mode,
        "supervised_per_step": [step.supervised for step in rows],
        "tokens_per_step": [step.tokens for step in rows],
        "problems": problems(work, rows, cells),
        "contenders": {name: summary(name, cells, tflops) for name in names},
        "cells": cells,
    }


def turns(names: list[str], number: int) -> list[str]:
    """Forth in one round and back in the next: what drifts with time meets all alike."""
    return list(names) if number % 2 == 0 else list(reversed(names))


def speed(result: Cell, rows: list[workload.StepRows]) -> dict[str, float]:
    """Medians over the measured steps. `step_s[i]` is the period of step i + 2, counted from 1."""
    measured = range(WARM_UP - 1, len(result["step_s"]))

    def median(count: Callable[[workload.StepRows], int]) -> float:
        return statistics.median(count(rows[i + 1]) / result["step_s"][i] for i in measured)

    return {
        "tokens_per_s": median(lambda step: step.tokens),
        "supervised_tokens_per_s": median(lambda step: step.supervised),
        "supervised_tokens_per_cpu_s": statistics.median(
            rows[i + 1].supervised / result["step_cpu_s"][i] for i in measured
        ),
    }


def peak(cell: Cell) -> int:
    """Bytes of the device that trains."""
    return cell["peak_device"] or cell["peak_rss"]


def above_loaded(cell: Cell) -> int:
    return peak(cell) - loaded(cell)


def summary(name: str, cells: list[Cell], tflops: float) -> dict[str, Any]:
    """Medians over rounds, and ours next to it in the same round, as it comes and recomputing. tflops: of products."""
    mine, ours, frugal = (by_round(who, cells) for who in (name, "ours", "ours_frugal"))

    def ratio(of: Callable[[Cell], float], one: dict[int, Cell] = ours) -> dict[str, float] | None:
        ratios = [of(one[number]) / of(mine[number]) for number in mine if number in one]
        return spread(ratios) if ratios and one != mine else None

    def middle(of: Callable[[Cell], float]) -> float:
        return statistics.median(map(of, mine.values()))

    shares = [products.share(cell, ours.get(number), tflops) for number, cell in mine.items()]
    return {
        "tokens_per_s": middle(lambda cell: cell["tokens_per_s"]),
        "supervised_tokens_per_s": middle(lambda cell: cell["supervised_tokens_per_s"]),
        "of_products": spread(known) if (known := list(filter(None, shares))) else None,
        "peak_gb": middle(lambda cell: peak(cell) / GB),
        "above_loaded_gb": middle(lambda cell: above_loaded(cell) / GB),
        "first_step_s": middle(lambda cell: cell["first_step_s"]),
        "ours_over_it": {
            "speed": ratio(lambda cell: cell["supervised_tokens_per_s"]),
            "speed_by_cpu_time": ratio(lambda cell: cell["supervised_tokens_per_cpu_s"]),
            "peak": ratio(peak),
            "above_loaded": ratio(above_loaded),
            "first_step": ratio(lambda cell: cell["first_step_s"]),
        },
        "recomputing_over_it": {
            "speed": ratio(lambda cell: cell["supervised_tokens_per_s"], frugal),
            "peak": ratio(peak, frugal),
        },
        "memory_gb": {part: middle(lambda cell, of=of: of(cell) / GB) for part, of in PARTS.items()},
    }


def by_round(name: str, cells: list[Cell]) -> dict[int, Cell]:
    return {cell["round"]: cell for cell in cells if cell["contender"] == name}


def loaded(cell: Cell) -> int:
    return cell["loaded_device"] if cell["peak_device"] else cell["loaded_rss"]


# Of the peak; they add up to it.
PARTS: dict[str, Callable[[Cell], int]] = {
    "libraries and data": lambda cell: loaded(cell) - cell["weights_bytes"],
    "weights": lambda cell: cell["weights_bytes"],
    "gradients": lambda cell: cell["gradient_bytes"],
    "optimizer state": lambda cell: cell["state_bytes"],
    "the rest": lambda cell: above_loaded(cell) - cell["gradient_bytes"] - cell["state_bytes"],
}


def spread(values: Iterable[float]) -> dict[str, float]:
    numbers = list(values)
    return {"median": statistics.median(numbers), "lowest": min(numbers), "highest": max(numbers)}


def problems(work: Work, rows: list[workload.StepRows], cells: list[Cell]) -> list[str]:
    """What was not the same work, in words."""
    expected = [step.supervised for step in rows]
    reference = {cell["round"]: cell["losses"] for cell in cells if cell["contender"] == "bare"}
    differences = []
    for cell in cells:
        who = f"{work.mode}, round {cell['round'] + 1}, {contenders.LABELS[cell['contender']]}"
        if cell["supervised"] != expected[: len(cell["supervised"])]:
            differences.append(f"{who}: {cell['supervised']} supervised tokens, expected {expected}")
        losses = reference.get(cell["round"], [])
        every = cell["contender"] in EVERY_STEP
        if every and losses and len(cell["losses"]) != len(losses):
            differences.append(f"{who}: {len(cell['losses'])} losses, expected {len(losses)}")
        allowed = (SAME_LOSS if every else SAME_FIRST_LOSS)[work.precision]
        for step, (loss, other) in enumerate(zip(cell["losses"], losses, strict=False), 1):
            if not abs(loss - other) <= allowed * other:
                differences.append(f"{who}: loss {loss} at step {step}, the bare loop's is {other}")
    return differences


# --- the machine


def which_device(requested: str) -> Any:
    import torch

    return requested if requested != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.backends.cpu.get_cpu_capability()}"


# --- showing


def table(mode: dict[str, Any], result: dict[str, Any]) -> Table:
    work = result["work"]
    tokens, supervised = (statistics.mean(mode[key]) for key in ("tokens_per_step", "supervised_per_step"))
    shown = Table(
        title=f"{mode['mode']}: Llama of {result['parameters'] / 1e6:,.1f} M parameters, {work['precision']}, "
        f"{tokens:,.0f} tokens a step, {supervised:,.0f} of them supervised; {result['device']}, "
        f"{work['threads']} threads; products alone reach {result['products_tflops']:.3f} TFLOP/s"
    )
    for i, heading in enumerate(HEADINGS):
        shown.add_column(heading, justify="right" if i else "left")
    for line in lines(mode):
        shown.add_row(*line)
    return shown


HEADINGS = (
    "",
    "tokens/s",
    "supervised",
    "of products",
    "peak GB",
    "above loaded",
    "first step s",
    "ours/it: speed",
    "peak",
    "above loaded",
    "first step",
    "recomputing/it: speed",
    "peak",
)


def lines(mode: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, one in mode["contenders"].items():
        ratios, recomputing = one["ours_over_it"], one["recomputing_over_it"]
        rows.append(
            [
                contenders.LABELS[name],
                f"{one['tokens_per_s']:,.0f}",
                f"{one['supervised_tokens_per_s']:,.0f}",
                f"{one['of_products']['median']:.0%}" if one["of_products"] else "-",
                f"{one['peak_gb']:.2f}",
                f"{one['above_loaded_gb']:.2f}",
                f"{one['first_step_s']:.1f}",
                *(with_spread(ratios[key]) for key in ("speed", "peak", "above_loaded", "first_step")),
                *(with_spread(recomputing[key]) for key in ("speed", "peak")),
            ]
        )
    return rows


def with_spread(ratio: dict[str, float] | None) -> str:
    return "" if ratio is None else f"{ratio['median']:.2f} ({ratio['lowest']:.2f}-{ratio['highest']:.2f})"


def markdown(mode: dict[str, Any]) -> str:
    """For the README."""
    speeds = markdown_table([mode["mode"], *HEADINGS[1:]], lines(mode))
    memory = [
        [contenders.LABELS[name], *(f"{gb:.2f}" for gb in one["memory_gb"].values()), f"{one['peak_gb']:.2f}"]
        for name, one in mode["contenders"].items()
    ]
    return speeds + "\n" + markdown_table([f"{mode['mode']}: where GB go", *PARTS, "peak"], memory)


def markdown_table(headings: list[str], rows: list[list[str]]) -> str:
    shown = [headings, ["---"] * len(headings), *rows]
    return "".join("| " + " | ".join(row) + " |\n" for row in shown)


if __name__ == "__main__":
    main()
