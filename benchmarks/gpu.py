"""Llama shapes on a GPU: tokens/s, MFU and peak memory of ours, the bare loop, and TRL and Unsloth at their best: with
flash-attn and Liger where they are installed.

    python benchmarks/gpu.py                                # every cell
    python benchmarks/gpu.py --only 8b-lora --budget-s 500  # one; what is there already is not measured again
    python benchmarks/gpu.py --shape tiny --device cpu      # the same code end to end, on any machine

Random weights, the real vocabulary of 128,256, packed rows of 4,096 tokens, bf16; `8b-lora-rows` has rows of one
document each, all of it trained, as others publish their speed. Before its figures count, each contender trains a step
of short documents on a tiny model, whose loss says whether they see each other. The FLOPs are those that the step
needs (our `tflops_per_device`: real document lengths, LoRA's smaller backward, no recomputation counted); MFU is their
share of what a large bf16 product reaches on this device, which is measured first. The same FLOPs count for everyone.

Each contender of each cell is a process of its own, and its figures are written before the next one starts: a run that
is cut off resumes where it was, if all that takes part has the same version. On the disk, in --folder: 2.5 GB for the
weights of 1b, 16 GB for those of 8b.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from finetune.utils import write_atomically

sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

import contenders
import products
import workload
from workload import SHAPES, Work

ROOT = Path(__file__).resolve().parent.parent
Cell = dict[str, Any]
WARM_UP = 7  # steps that are not measured: kernels are chosen, caches filled
ROW_TOKENS = {"tiny": 256}  # 4,096 elsewhere
# Activations are recomputed only where they would not fit into 80 GB.
CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "1b-full": ("1b", {"mode": "full", "precision": "bf16", "rows_per_step": 4}),
    "8b-lora": ("8b", {"mode": "lora", "precision": "bf16", "rows_per_step": 1}),
    "8b-lora-rows": ("8b", {"mode": "lora", "precision": "bf16", "rows_per_step": 2, "documents": "whole"}),
    "8b-qlora": ("8b", {"mode": "qlora", "precision": "bf16", "rows_per_step": 2, "checkpointing": True}),
    "8b-full-8bit": (
        "8b",
        {
            "mode": "full",
            "precision": "bf16_true",
            "optimizer": "adamw_8bit",
            "rows_per_step": 1,
            "checkpointing": True,
        },
    ),
}
DEFAULT = ("ours", "ours_graphs", "bare", "trl", "unsloth")
EXTREMES = ("tokens_per_s_slowest", "tokens_per_s_fastest")
SAME_LOSS = 2.0**-6  # relative; roundings of bf16, in other places for each
# Of the check: weights so large that attention decides much of the loss, which moves by 0.9 % if documents see each
# other, and by 0.03 % in bf16.
LARGE_WEIGHTS = {**SHAPES["tiny"], "initializer_range": 0.2}


def main() -> None:
    arguments = parse_arguments()
    os.environ["HF_HUB_OFFLINE"] = "1"
    started = time.monotonic()
    result = measured_before(arguments.json, arguments.device) or about(arguments.device)
    for name in arguments.only:
        for who in arguments.contenders:
            if any((cell["cell"], cell["contender"]) == (name, who) for cell in result["cells"]):
                continue
            if why := contenders.missing(who, arguments.device):
                print(f"{contenders.LABELS[who]}: not installed ({why})", file=sys.stderr)
                continue
            left = arguments.budget_s - (time.monotonic() - started)
            if left <= 0:
                print(f"{name}, {who}: no time left; the same command resumes from here", file=sys.stderr)
                continue
            # Packed weights are others than those of the check, so qlora's is that of lora.
            mode = "full" if CELLS[name][1]["mode"] == "full" else "lora"
            if not any((check["contender"], check["mode"]) == (who, mode) for check in result["checks"]):
                result["checks"].append(check_documents(mode, who, arguments))
                write(arguments.json, result)
            result["cells"].append(measure(name, who, arguments, left))
            write(arguments.json, result)
    Console(width=140).print(table(result))
    for line in equipment(result["cells"]):
        print(line)
    differences = [*problems(result["cells"]), *documents_problems(result["checks"])]
    for problem in differences:
        print(f"NOT THE SAME WORK: {problem}", file=sys.stderr)
    raise SystemExit(1 if differences else 0)


def parse_arguments() -> argparse.Namespace:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CELLS), default=list(CELLS), help="these cells")
    parser.add_argument("--contenders", nargs="+", choices=list(contenders.CONTENDERS), default=list(DEFAULT))
    parser.add_argument("--shape", choices=list(SHAPES), help="of all cells, instead of their own")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=10, help="measured steps")
    parser.add_argument("--rows-per-step", type=int, help="packed rows in a step, all in one forward")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="seconds after which nothing is started")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of our recipe alone")
    parser.add_argument("--threads", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gpu-benchmark", help="for models and rows")
    parser.add_argument("--json", type=Path, help="where the figures are and go")
    arguments = parser.parse_args()
    if arguments.json is None:
        arguments.json = ROOT / "benchmarks" / "results" / f"gpu_{short_name(arguments.device)}.json"
    return arguments


# --- measuring


def measure(name: str, who: str, arguments: argparse.Namespace, left: float) -> Cell:
    """A contender on a cell; where it fails, or takes longer than is left, that is its result."""
    shape, settings = CELLS[name]
    shape = arguments.shape or shape
    work = Work(
        shape=SHAPES[shape],
        row_tokens=ROW_TOKENS.get(shape, 4096),
        steps=WARM_UP + arguments.steps,
        device=arguments.device,
        threads=arguments.threads,
        overrides=tuple(arguments.set),
        **{**settings, **({"rows_per_step": arguments.rows_per_step} if arguments.rows_per_step else {})},
    )
    folder = arguments.folder / shape
    prepare(folder, work)
    cell: Cell = {"cell": name, "shape": shape, "contender": who, "work": asdict(work)}
    try:
        measured = contenders.run(who, folder, work, timeout=None if left == float("inf") else max(60.0, left))
    except subprocess.TimeoutExpired:
        return {**cell, "failed": "no time left"}
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return {**cell, "failed": last_line(str(error))}
    rows = workload.read_steps(folder)
    periods = range(WARM_UP - 1, work.steps - 1)
    for key, counted in (("tokens_per_s", "tokens"), ("supervised_tokens_per_s", "supervised")):
        speeds = [getattr(rows[i + 1], counted) / measured["step_s"][i] for i in periods]
        cell |= {key: statistics.median(speeds), f"{key}_slowest": min(speeds), f"{key}_fastest": max(speeds)}
    print(f"{name}, {contenders.LABELS[who]}: {cell['tokens_per_s']:,.0f} tokens/s", file=sys.stderr, flush=True)
    return {**cell, "expected_supervised": [step.supervised for step in rows], **measured}


def check_documents(mode: Literal["full", "lora"], who: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The first loss of a step of short documents, and what it is if they see each other or not."""
    work = Work(
        shape=LARGE_WEIGHTS,
        mode=mode,
        precision="bf16",
        row_tokens=256,
        documents="short",
        steps=1,
        device=arguments.device,
        threads=arguments.threads,
        overrides=tuple(arguments.set),
    )
    folder = arguments.folder / "documents"
    prepare(folder, work)
    alone, together = workload.first_losses(folder)
    check = {"contender": who, "mode": mode, "alone": alone, "together": together}
    try:
        return {**check, "loss": contenders.run(who, folder, work, timeout=300.0)["losses"][0]}
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return {**check, "failed": last_line(str(error))}


def documents_problems(checks: list[dict[str, Any]]) -> list[str]:
    """Who lets documents see each other, in words: whose loss is more than a quarter of the way from theirs alone."""
    differences = []
    for check in checks:
        who = f"{check['mode']}, {contenders.LABELS[check['contender']]}"
        if "failed" in check:
            differences.append(f"{who}: short documents: {check['failed']}")
        elif not abs(check["loss"] - check["alone"]) < abs(check["together"] - check["alone"]) / 4:
            numbers = (f"{check[key]:.4f}" for key in ("loss", "alone", "together"))
            differences.append("{}: loss {} of short documents; alone {}, together {}".format(who, *numbers))
    return differences


def prepare(folder: Path, work: Work) -> None:
    """Weights and tokenizer once; rows, recipe and steps for each."""
    if not (folder / "model" / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        workload.save_padded_tokenizer(folder / "model", work.shape["vocab_size"])
        large = work.shape["vocab_size"] > 100_000
        print(f"{shutil.disk_usage(folder).free / 1e9:,.0f} GB free in {folder}", file=sys.stderr)
        workload.save_weights(work.shape, folder / "model", "bfloat16" if large else "float32", work.device)
    count = 64 + work.steps * work.rows_per_step * work.row_tokens // 150
    rows = workload.random_documents(count, work.shape["vocab_size"], work.row_tokens, work.documents)
    workload.write_rows(folder / "rows.jsonl", rows)
    workload.write_recipe(folder, work, "tokens")
    os.environ["FINETUNE_CACHE"] = str(folder / "cache")
    workload.write_steps(folder, work)


def about(device: str) -> dict[str, Any]:
    return {
        "device": device_name(device),
        "versions": contenders.versions(),
        "matmul_tflops": products.measured_apart(device, "bf16"),
        "checks": [],
        "cells": [],
    }


def measured_before(path: Path, device: str) -> dict[str, Any] | None:
    """What failed is tried again. Figures of another device or of other versions are not added to."""
    if not path.exists():
        return None
    saved = json.loads(path.read_text(encoding="utf-8"))
    here = {"device": device_name(device), "versions": contenders.versions()}
    if other := {key: saved[key] for key, value in here.items() if saved[key] != value}:
        raise SystemExit(f"{path} was measured with {other}; here it is {here}. Write to another file: --json FILE")
    return {**saved, **{key: [one for one in saved.get(key, ()) if "failed" not in one] for key in ("checks", "cells")}}


def write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(result, indent=1) + "\n")


def problems(cells: list[Cell]) -> list[str]:
    """What was not the same work, in words."""
    differences = []
    for cell in (cell for cell in cells if "failed" not in cell):
        who = f"{cell['cell']}, {contenders.LABELS[cell['contender']]}"
        if cell["supervised"] != cell["expected_supervised"]:
            differences.append(f"{who}: {cell['supervised']} supervised tokens, expected {cell['expected_supervised']}")
        for ours in (one for one in cells if _is_ours(one, cell["cell"])):
            differences += [f"{who}: {difference}" for difference in unlike(cell, ours)]
    return differences


def unlike(cell: Cell, ours: Cell) -> list[str]:
    """The losses and the number of trained parameters that are not those of ours, in words."""
    found = []
    for name, own, other in zip(("first loss", "mean of the later losses"), losses(cell), losses(ours), strict=True):
        if own is not None and other is not None and not abs(own - other) <= SAME_LOSS * other:
            found.append(f"{name} {own}, ours {other}")
    trained, of_ours = (one.get("about", {}).get("trainable_parameters") for one in (cell, ours))
    if None not in (trained, of_ours) and trained != of_ours:
        found.append(f"{trained:,} trained parameters, ours {of_ours:,}")
    return found


def losses(cell: Cell) -> tuple[float | None, float | None]:
    """The first one, and the mean of the others where it is known: peers log it once, at the end."""
    first, *later = cell["losses"]
    return first, statistics.fmean(later) if later else cell.get("later_loss")


# --- showing


def table(result: dict[str, Any]) -> Table:
    shown = Table(title=f"{result['device']}: bf16 products reach {result['matmul_tflops']:,.1f} TFLOP/s")
    for i, heading in enumerate(
        ("cell", "", "tokens/s", "slowest, fastest", "MFU", "peak GiB", "ours/it: speed", "peak")
    ):
        shown.add_column(heading, justify="left" if i < 2 else "right")
    for cell in result["cells"]:
        if "failed" in cell:
            shown.add_row(cell["cell"], contenders.LABELS[cell["contender"]], cell["failed"][:60])
            continue
        ours = next((one for one in result["cells"] if _is_ours(one, cell["cell"])), None)
        shown.add_row(
            cell["cell"],
            contenders.LABELS[cell["contender"]],
            f"{cell['tokens_per_s']:,.0f}",
            ", ".join(f"{cell[key]:,.0f}" for key in EXTREMES if key in cell) or "-",  # figures of before have none
            _percent(products.share(cell, ours, result["matmul_tflops"])),
            f"{peak(cell) / 2**30:.2f}",
            f"{ours['tokens_per_s'] / cell['tokens_per_s']:.2f}" if ours else "-",
            f"{peak(ours) / peak(cell):.2f}" if ours else "-",
        )
    return shown


def equipment(cells: list[Cell]) -> list[str]:
    """What each contender computed with, as it says itself: a line for each."""
    kept = {
        f"{cell['cell']}, {contenders.LABELS[cell['contender']]}": {
            key: value for key, value in cell["about"].items() if "parameters" not in key
        }
        for cell in cells
        if cell.get("about")
    }
    return [f"{who}: {'; '.join(f'{key} {value}' for key, value in about.items())}" for who, about in kept.items()]


def peak(cell: Cell) -> int:
    return cell["peak_device"] or cell["peak_rss"]


def _is_ours(cell: Cell, name: str) -> bool:
    return (cell["cell"], cell["contender"]) == (name, "ours") and "failed" not in cell


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def last_line(text: str) -> str:
    return [line for line in text.splitlines() if line.strip()][-1]


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def short_name(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", device_name(device).lower()).strip("_")


if __name__ == "__main__":
    main()
