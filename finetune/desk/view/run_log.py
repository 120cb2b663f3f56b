"""`logs`: the steps and evaluations of a run as lines, also while it goes on, here or on another machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.tracking.headline import headlines
from finetune.tracking.metrics import read_metrics, read_status

_POLL_S = 1.0


def follow(run: Path, last: int | None, goes_on: bool, wait: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """Yields the lines of a run's log, then those that it adds until it has ended.

    last: number of lines to begin with; None: all. goes_on: whether to wait for more. Raises UserError if there is no
    run.
    """
    file = run / "metrics.jsonl"
    if not file.exists() and read_status(run) is None:
        raise UserError(
            f"{run}: no run here (no metrics.jsonl). Fix: give a run directory, such as runs/quickstart-full"
        )
    lines, damage = read_metrics(file)
    seen = len(lines)
    if damage:
        yield f"{run}: {damage}"
    yield from map(log_line, lines[-last:] if last else lines if last is None else [])
    while goes_on and read_status(run) in ("running", None):
        wait(_POLL_S)
        lines = read_metrics(file).lines
        if len(lines) < seen:  # the run was started again: its later lines have been removed
            seen = 0
        yield from map(log_line, lines[seen:])
        seen = len(lines)
    if goes_on:
        yield from map(log_line, read_metrics(file).lines[seen:])  # written before the status
        yield f"{run}: {read_status(run)}"


def log_line(entry: dict[str, Any]) -> str:
    """Returns a line of metrics.jsonl as the terminal shows it: a step in short, an evaluation in full."""
    if "loss" not in entry:
        numbers = [f"{name} {_number(value)}" for name, value in entry.items() if name != "step"]
        return "  ".join([f"step {entry['step']}:", *numbers])
    parts = [f"step {entry['step']}", f"loss {_number(entry['loss'])}", *headlines(entry)]
    parts += [f"{name} {_number(entry[name])}" for name in ("lr", "grad_norm") if name in entry]
    if isinstance(speed := entry.get("tokens_per_s"), int | float):
        parts.append(f"{speed:,.0f} tok/s")
    return "  ".join(parts)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
