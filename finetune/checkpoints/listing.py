"""What lies in a run's checkpoints folder, for people and programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from finetune.checkpoints.folder import aside, complete, problem, size
from finetune.errors import UserError


@dataclass(frozen=True)
class Found:
    """One checkpoint. Facts are missing where its state.json cannot be read."""

    path: str
    bytes: int
    set_aside: bool  # a run went on without it
    verified: bool  # every byte was read
    problem: str | None
    step: int | None = None
    steps: int | None = None  # of the whole run
    metrics: dict[str, float] | None = None
    written: dict[str, Any] | None = None  # where, world_size, host, at (UTC)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def found_checkpoints(run_dir: Path, verify: bool) -> list[Found]:
    """Newest first, those that were set aside last. Raises UserError where the folder is no run's."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such run directory")
    root = run_dir / "checkpoints"
    folders = [*complete(root), *aside(root)]
    watched = track(folders, "reading", transient=True, console=Console(stderr=True), disable=not verify)
    return [_found(folder, verify) for folder in watched]


def _found(folder: Path, verify: bool) -> Found:
    wrong = problem(folder, read=verify)
    facts: dict[str, Any] = {}
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        facts = {name: state[name] for name in ("step", "steps", "metrics", "written")}
    except (OSError, ValueError, KeyError) as error:
        wrong = wrong or f"its state.json cannot be read: {error}"
    return Found(str(folder), size(folder), folder.name.startswith("aside"), verify, wrong, **facts)


def show_checkpoints(console: Console, run_dir: Path, found: list[Found]) -> None:
    """A table, and below it what is wrong with which."""
    if not found:
        console.print(f"{run_dir} has no checkpoints")
        return
    title = f"{run_dir}/checkpoints"
    table = Table("step", "metrics", "size", "written (UTC)", "by", "", title=title, title_justify="left")
    for entry in found:
        table.add_row(*_row(entry))
    console.print(table)
    for entry in found:
        if entry.problem:
            console.print(f"[red]{escape(entry.path)}: {escape(entry.problem)}[/red]", soft_wrap=True, highlight=False)


def _row(entry: Found) -> Iterator[str]:
    by = entry.written or {}
    yield f"{entry.step:,} of {entry.steps:,}" if entry.step is not None else Path(entry.path).name
    yield "\n".join(f"{name} {value:.4f}" for name, value in (entry.metrics or {}).items())
    yield _bytes(entry.bytes)
    yield f"{datetime.fromisoformat(by['at']):%Y-%m-%d\n%H:%M}" if by else "?"
    yield f"{by['where']} x {by['world_size']}\n{by['host']}" if by else "?"
    yield _standing(entry)


def _standing(entry: Found) -> str:
    if entry.problem:
        return "[red]damaged[/red]"
    standing = "[green]verified[/green]" if entry.verified else "complete"
    return f"{standing}\nset aside" if entry.set_aside else standing


def _bytes(count: int) -> str:
    """
    >>> _bytes(3_500_000)
    '3.3 MiB'
    """
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.1f} {units[0]}" if units[0] != "B" else f"{count} B"
