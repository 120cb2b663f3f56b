"""Speeds of a device from finished runs: their predicted and measured times, both in plan.json."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.engine.hardware import CPU, Hardware
from finetune.engine.launch import Launch
from finetune.plan.speed import Level, Speeds, processor_speeds, table_speeds
from finetune.plan.tables import Machines
from finetune.recipe import Recipe
from finetune.tracking.metrics import read_status
from finetune.training.run_plan import processor

_FEWEST, _MOST = 5, 20  # measured steps of a run that counts; runs
_OTHERS = (
    "optimizer",
    "communication",
    "host transfers",
    "bubble",
    "data",
    "generation",
)  # parts of a predicted step that are not compute


def speeds_here(recipe: Recipe, machines: Machines, hardware: Hardware, without: Path | None = None) -> Speeds | None:
    """Returns the shipped speeds, corrected by the median of the runs in `run.dir` that finished on the same device in
    the same precision. None without shipped speeds; for processors without such runs, either.

    without: a run's folder to leave out.
    """
    base = processor_speeds(hardware) if machines.key == CPU else table_speeds(recipe, machines, hardware)
    folder = Path(recipe.run.dir)
    if base is None or (level := level_of(folder, machines.key, recipe.train.precision, hardware, without)) is None:
        return None if machines.key == CPU else base
    runs = f"{level.runs} finished runs" if level.runs > 1 else "a finished run"
    times = f"compute x {level.compute:.2f}, optimizer x {level.optimizer:.2f}"
    return replace(base, level=level, source=f"{runs} in {folder} ({times}) over {base.source}")


def level_of(folder: Path, key: str, precision: str, hardware: Hardware, without: Path | None = None) -> Level | None:
    """Returns the medians of the newest runs below a folder; None without any. key: of their device."""
    runs = sorted((file.parent for file in folder.glob("*/status.json")), key=lambda run: -run.stat().st_mtime)
    every = (_level(run, key, precision, hardware) for run in runs if run != without)
    levels = list(islice((level for level in every if level is not None), _MOST))
    if not levels:
        return None
    names = ("compute", "optimizer", "wait_token_s")
    return Level(len(levels), *(statistics.median(getattr(level, name) for level in levels) for name in names))


def read_plan(file: Path) -> dict[str, Any]:
    """Returns {} if the file cannot be read."""
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return plan if isinstance(plan, dict) else {}


def device_key(plan: dict[str, Any], hardware: Hardware) -> str | None:
    """Returns the key of a run's device; None for an unknown one, and for processors of another machine."""
    name = plan.get("device")
    if name == CPU:
        return CPU if plan.get("processor") == processor() else None
    return hardware.key_of(name) if isinstance(name, str) else None


def _level(run: Path, key: str, precision: str, hardware: Hardware) -> Level | None:
    """Returns the speeds of a run over the shipped ones; None if it has not finished on such a device in this
    precision, or has too few numbers."""
    plan = read_plan(run / "plan.json") if read_status(run) == "finished" else {}
    predicted, measured = plan.get("predicted") or {}, plan.get("measured") or {}
    if "generation" in predicted.get("parts_s", {}):  # which is measured as a wait for rows
        return None
    if "parts_s" not in predicted or measured.get("steps", 0) < _FEWEST or device_key(plan, hardware) != key:
        return None
    if plan["precision"].replace(",", " ").split()[0] != precision:  # `fp32 (TF32 is off ...)`
        return None
    phases, at = phases_of_time(predicted["parts_s"], measured["parts_s"]), predicted["level"]
    (compute, took), (optimizer, stepped) = phases["compute"], phases["optimizer"]
    launch = Launch(plan["launch"]["kind"], plan["world_size"], None, plan["launch"]["config"])
    tokens = measured["tokens_per_s"] * measured["step_s"] / launch.parallelism.data
    if not all((compute, took, optimizer, stepped, tokens)):
        return None
    wait = measured["parts_s"].get("data", 0.0) / tokens
    return Level(1, at["compute"] * compute / took, at["optimizer"] * optimizer / stepped, wait)


def phases_of_time(predicted: dict[str, float], measured: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Returns (predicted, measured) seconds of the phases that both can tell apart.

    A backend that hides its waits has them in forward and backward, so predicted waits are added to compute.
    """
    compute = sum(seconds for name, seconds in predicted.items() if name not in _OTHERS)
    waits = sum(predicted.get(name, 0.0) for name in ("communication", "host transfers", "bubble"))
    took = sum(measured.get(name, 0.0) for name in ("forward", "backward", "other"))
    phases = {"optimizer": (predicted.get("optimizer", 0.0), measured.get("optimizer", 0.0))}
    if "communication" in measured:
        phases |= {"compute": (compute, took), "communication": (waits, measured["communication"])}
    else:
        phases["compute"] = (compute + waits, took)
    if "data" in predicted or "generation" in predicted:
        waits = predicted.get("data", 0.0) + predicted.get("generation", 0.0)
        phases["data wait"] = (waits, measured.get("data", 0.0))
    return phases
