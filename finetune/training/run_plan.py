"""Plan that follows from recipe, data and launch: printed before step 1, written to plan.json."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from finetune import __version__
from finetune.data.dataset import Dataset, on_disk
from finetune.data.packing import pack
from finetune.data.row_source import EpochSize, RowSource
from finetune.errors import UserError
from finetune.recipe import Recipe
from finetune.recipe.schema import Train
from finetune.utils import write_atomically

_GIB = 2**30
STATE = {"weights": "weights", "gradients": "gradients", "optimizer_state": "optimizer state"}  # metrics, formulas
_PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "deepspeed", "bitsandbytes")


@dataclass(frozen=True)
class Plan:
    where: str  # name of the accelerate config
    world_size: int
    device: str
    steps: int  # optimizer steps in the run
    micro_batches: int  # per step and process; with batch.tokens_per_device the maximum
    rows_per_device: int | None  # packed sequences of a micro-batch; None with batch.tokens_per_device
    rows_per_device_reason: str
    rows_per_epoch: int | None  # packed sequences; None for a stream, like the other numbers per epoch
    total_rows: int  # total of the run; the last step may be short
    examples: int | None
    tokens_per_epoch: int | None
    supervised_tokens_per_epoch: int | None
    packing_efficiency: float | None  # tokens / (rows * max_length)
    parameters: int
    trainable_parameters: int
    attention: str  # with the reason
    cross_entropy: str  # with the reason
    shared_prompts: str | None  # whether a pair's common prompt is computed once, with the reason; None: no pairs
    shared_token_share: float | None  # share of an epoch's tokens that are then not recomputed
    reference: str | None  # source of the reference's log-probabilities; None if not needed
    precision: str
    launch: dict[str, Any]  # kind, accelerate config, processes per machine: with the recipe, these decide memory
    division: dict[str, Any]  # the backend's division of the model, such as pipeline stages
    versions: dict[str, str]
    git_commit: str | None
    kernels: str = "plain"  # of norms, gates and rotations, with the reason
    graphs: str = "off"  # CUDA graphs, or why there are none
    parts: dict[str, tuple[int, int]] = field(default_factory=dict)  # for a model with its tower: (all, trained)
    processor: str = ""  # model of the first rank's processors
    predicted: dict[str, Any] = field(default_factory=dict)  # calculated before the run (plan/comparison.py)
    measured: dict[str, Any] | None = None  # from this launch's steps, after its end

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self), indent=1) + "\n")


def run_length(
    train: Train, rows_per_step: int, rows_per_epoch: int | None, run_rows: int | None = None
) -> tuple[int, int]:
    """Returns (optimizer steps, packed sequences) of the run, by `epochs` and `max_steps`, whichever ends first.

    100 sequences per epoch, 64 per step, 2 epochs: 200 sequences, 4 steps, the last one with 8.
    rows_per_step: `batch.rows`; run_rows: total of all epochs, if they differ.
    """
    epochs = train.epochs if rows_per_epoch is not None else None  # a stream is limited by steps only
    rows = run_rows or (math.inf if epochs is None else math.ceil(epochs * (rows_per_epoch or 0)))
    if train.max_steps is not None:
        rows = min(rows, train.max_steps * rows_per_step)
    return math.ceil(rows / rows_per_step), int(rows)


def training_length(train: Train, rows_per_step: int, size: EpochSize | None) -> tuple[int, int]:
    """Returns `run_length` on data of a size. size: None if unknown before the run."""
    sizes = (size.rows, size.run_rows) if size else (None, None)
    return run_length(train, rows_per_step, *sizes)


def versions() -> dict[str, str]:
    """Returns the versions of Python and of installed packages that can change numbers."""
    installed = {"python": platform.python_version(), "finetune": __version__}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


def processor() -> str:
    """Returns the model of this machine's processors."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if match := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return match[1]
    return platform.processor() or platform.machine()


def git_commit() -> str | None:
    """Returns the commit of the current directory, with `+` if files differ from it; None outside a repository."""
    git = ("git", "--no-optional-locks")  # else `status` could hold up a commit that someone makes meanwhile
    try:
        commit, changes = (
            subprocess.run([*git, *words], capture_output=True, text=True, check=True, timeout=10).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "-uno"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changes else "")


FEW_STEPS = 50  # shorter runs hardly learn: they are mostly warm-up and decay


def length_notes(recipe: Recipe, data: RowSource, processes: int = 1) -> list[str]:
    """Returns notes on a run of few steps. processes: number that divides a step's sequences.

    Raises UserError if the data end before the warm-up; with `train.max_steps` (a smoke test) this is a note.
    """
    size = data.size(recipe.data.max_length)
    steps, total_rows = training_length(recipe.train, recipe.batch.rows, size)
    warmup, notes = recipe.schedule.warmup(steps), []
    more = _more_steps(recipe, on_disk(data), steps, total_rows, processes) if size else ""
    if warmup >= steps > 0:
        highest = f"the rate reaches {steps / (warmup + 1):.0%} of optimizer.lr at most"
        if steps != recipe.train.max_steps:
            longer = f"set {more.removeprefix('More steps: ')}" if more else "train more epochs"
            raise UserError(
                f"schedule.warmup_steps: the data give {steps} step{'s' * (steps > 1)}, fewer than the {warmup} of "
                f"warm-up; {highest}. Fix: {longer}, or set schedule.warmup_ratio: 0.1 instead"
            )
        notes.append(f"the warm-up ({warmup} steps) does not end within train.max_steps: {steps}; {highest}")
    if steps < FEW_STEPS and steps != recipe.train.max_steps:
        notes.append(f"only {steps} steps, and below about {FEW_STEPS} a run learns little. {more or 'More data help'}")
    return notes


def _more_steps(recipe: Recipe, data: Dataset, steps: int, total_rows: int, processes: int) -> str:
    """Suggests `batch.rows` or `data.max_length` for `FEW_STEPS`, or the nearest; empty if none gives more."""
    choices, batch, longest = [], recipe.batch.rows, int(data.examples.lengths.max())
    rows = processes * 2 ** max(0, int(math.log2(max(1, total_rows // FEW_STEPS / processes))))
    if rows < batch:
        each = recipe.batch.rows_per_device
        smaller = f" and batch.rows_per_device: {rows // processes}" if each != "auto" and rows % each else ""
        choices.append(f"batch.rows: {rows}{smaller} ({math.ceil(total_rows / rows)} steps)")
    length = recipe.data.max_length
    while recipe.data.packing and length // 2 >= longest and length * FEW_STEPS > recipe.data.max_length * steps:
        length //= 2
    if length < recipe.data.max_length:
        shorter = run_length(recipe.train, batch, len(pack(data.epoch_sizes.tokens, length)))[0]
        choices += [f"data.max_length: {length} ({shorter} steps)"] if shorter > steps else []
    return f"More steps: {' or '.join(choices)}" if choices else ""


def measure_run(lines: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns medians over the steps of one launch, without its first, which warms up; None if there are none.

    lines: of metrics.jsonl.
    """
    steps = [line for line in lines if "step_s" in line]
    if not steps:
        return None
    counted, last = steps[1:] or steps, steps[-1]
    times = [name for name in last if name.startswith("time/")]
    memory = {name: round(last[f"memory/{name}_gib"] * _GIB) for name in STATE if f"memory/{name}_gib" in last}
    if "memory_peak_gib" in last:
        memory["peak"] = round(max(line["memory_peak_gib"] for line in steps) * _GIB)
    return {
        "steps": len(counted),
        "step_s": statistics.median(line["step_s"] for line in counted),
        "tokens_per_s": statistics.median(line["tokens_per_s"] for line in counted),
        "parts_s": {
            name.removeprefix("time/"): statistics.median(line[name] for line in counted if name in line)
            for name in times
        },
        "memory_bytes": memory,
    }
