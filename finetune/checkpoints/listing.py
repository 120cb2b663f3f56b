"""`checkpoints`: lists a run's checkpoints, as a table or as JSON."""

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

from finetune.checkpoints.folder import find_problem, list_checkpoints, list_set_aside
from finetune.errors import UserError
from finetune.utils import readable_bytes


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint; the last four fields are None where its state.json cannot be read."""

    path: str
    bytes: int
    set_aside: bool  # a run did not resume from it
    verified: bool  # every byte was read
    problem: str | None
    step: int | None = None
    steps: int | None = None  # of the whole run
    metrics: dict[str, float] | None = None
    written: dict[str, Any] | None = None  # where, world_size, host, at (UTC)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe_checkpoints(run_dir: Path, verify: bool) -> list[CheckpointInfo]:
    """Returns a run's checkpoints, newest first, those that were set aside last. Raises UserError without a folder."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such run directory")
    root = run_dir / "checkpoints"
    folders = [*list_checkpoints(root), *list_set_aside(root)]
    tracked = track(folders, "reading", transient=True, console=Console(stderr=True), disable=not verify)
    return [_describe(folder, verify) for folder in tracked]


def _describe(folder: Path, verify: bool) -> CheckpointInfo:
    problem = find_problem(folder, read=verify)
    fields: dict[str, Any] = {}
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        fields = {name: state[name] for name in ("step", "steps", "metrics", "written")}
    except (OSError, ValueError, KeyError) as error:
        problem = problem or f"its state.json cannot be read: {error}"
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return CheckpointInfo(str(folder), size, folder.name.startswith("aside"), verify, problem, **fields)


def show_checkpoints(console: Console, run_dir: Path, checkpoints: list[CheckpointInfo]) -> None:
    """Print a table, and below it the problems."""
    if not checkpoints:
        console.print(f"{run_dir} has no checkpoints")
        return
    title = f"{run_dir}/checkpoints"
    table = Table("step", "metrics", "size", "written (UTC)", "by", "", title=title, title_justify="left")
    for entry in checkpoints:
        table.add_row(*_row(entry))
    console.print(table)
    for entry in checkpoints:
        if entry.problem:
            console.print(f"[red]{escape(entry.path)}: {escape(entry.problem)}[/red]", soft_wrap=True, highlight=False)


def _row(entry: CheckpointInfo) -> Iterator[str]:
    by = entry.written or {}
    yield f"{entry.step:,} of {entry.steps:,}" if entry.step is not None else Path(entry.path).name
    yield "\n".join(f"{name} {value:.4f}" for name, value in (entry.metrics or {}).items())
    yield readable_bytes(entry.bytes)
    yield f"{datetime.fromisoformat(by['at']):%Y-%m-%d\n%H:%M}" if by else "?"
    yield f"{by['where']} x {by['world_size']}\n{by['host']}" if by else "?"
    if entry.problem:
        yield "[red]damaged[/red]"
    else:
        state = "[green]verified[/green]" if entry.verified else "complete"
        yield f"{state}\nset aside" if entry.set_aside else state
