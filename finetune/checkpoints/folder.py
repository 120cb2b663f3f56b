"""Checkpoint folders: written atomically, verified by checksums, deleted by age and metric.

    checkpoints/step-00000200/
      manifest.json              size and SHA-256 of every other file; written last
      state.json                 step, counts, loss scale, optimizer's scalars, metrics, data, versions, writer
      recipe.yaml                the resolved recipe
      rank-00000-of-00002.safetensors

A checkpoint is written under another name, flushed to disk and renamed, so a folder named `step-*` is complete; the
checksums detect faulty disks. It loses that name before it is deleted, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from finetune.checkpoints.reading import alone, hold
from finetune.errors import UserError
from finetune.recipe.schema import Checkpoint, is_better
from finetune.utils import fsync, print_line, readable_bytes, sha256_file

VERSION = 1
Metrics = dict[str, float]
_NAMES = {"state.json", "recipe.yaml"}  # in every checkpoint, next to the ranks' files
_PARTIAL = ".partial-"  # being written, or left by an interrupted save
_REMOVED = ".removed-"  # being deleted
_ASIDE = "aside-"  # a checkpoint that a run did not resume from; never deleted by us


@dataclass(frozen=True)
class FileEntry:
    """Entry of a file in the manifest."""

    name: str
    bytes: int
    sha256: str


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def partial_folder(root: Path, step: int) -> Path:
    return root / f"{_PARTIAL}step-{step:08d}"


def step_of(path: Path) -> int:
    """Returns the step that ends the name of a checkpoint or of a step's file: `step-00000200`, `eval-00000200.jsonl`.

    Raises ValueError if there is none.
    """
    return int(path.stem.rpartition("-")[2])


def list_checkpoints(root: Path) -> list[Path]:
    """Returns complete checkpoints, newest first; not yet verified."""
    return sorted((path for path in root.glob("step-*") if path.is_dir()), reverse=True)


def list_set_aside(root: Path) -> list[Path]:
    """Returns the checkpoints that were set aside, newest first."""
    return sorted((path for path in root.glob(f"{_ASIDE}step-*") if path.is_dir()), reverse=True)


def start_partial(partial: Path) -> None:
    """Creates an empty folder to write to; deletes the remains of an interrupted save of this step."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def seal(partial: Path, final: Path, written: list[FileEntry]) -> None:
    """Checksums the files that are not in `written`, flushes and renames: on return, `final` survives a power cut."""
    names = {entry.name for entry in written}
    others = sorted(path for path in partial.iterdir() if path.name not in names)
    entries = [*written, *(FileEntry(path.name, path.stat().st_size, sha256_file(path)) for path in others)]
    files = {entry.name: {k: v for k, v in asdict(entry).items() if k != "name"} for entry in entries}
    manifest = partial / "manifest.json"
    manifest.write_text(json.dumps({"version": VERSION, "files": files}, indent=1), encoding="utf-8")
    for path in (*others, manifest, partial):
        fsync(path)
    replaced = _renamed_for_removal(final) if final.exists() else None
    partial.rename(final)
    fsync(final.parent)
    if replaced is not None:
        _delete(replaced)


def find_problem(folder: Path, read: bool = True) -> str | None:
    """Returns why a checkpoint cannot be trusted; None if every byte is intact.

    read: False checks names and sizes only.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        version, entries = manifest["version"], [FileEntry(name, **entry) for name, entry in manifest["files"].items()]
    except FileNotFoundError:
        return "it has no manifest.json"
    except (OSError, ValueError) as error:
        return f"its manifest.json cannot be read: {error}"
    except (LookupError, TypeError, AttributeError):
        return "its manifest.json is damaged: it is not a list of files"
    if version != VERSION:
        return f"it is of format {version}, this program writes {VERSION} (use the program that wrote it)"
    if absent := _NAMES - {entry.name for entry in entries}:
        return f"its manifest.json is damaged: it does not list {', '.join(sorted(absent))}"
    for entry in entries:
        name, path = entry.name, folder / entry.name
        if "/" in name or not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry.bytes:
            return f"{name} has {path.stat().st_size} bytes instead of {entry.bytes}"
        try:
            if read and sha256_file(path) != entry.sha256:
                return f"{name} is damaged: its checksum differs"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def remove(folder: Path) -> bool:
    """Deletes a checkpoint, unless it is being read; a kill in between leaves no folder that looks like one.

    Returns whether it was deleted.
    """
    with alone(folder) as free:
        if not free:
            return False
        doomed = _renamed_for_removal(folder)
    _delete(doomed)
    return True


def _renamed_for_removal(folder: Path) -> Path:
    """Renames a checkpoint to a name that `list_checkpoints` ignores."""
    doomed = folder.with_name(_REMOVED + folder.name)
    if os.path.lexists(doomed):
        _delete(doomed)
    return folder.rename(doomed)


def _delete(folder: Path) -> None:
    """Deletes a folder, or the link to one, but never the link's target."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def set_aside(folder: Path) -> Path:
    """Renames a checkpoint that the run does not resume from, to an unused name: `aside-step-00000200`, `...-2`.

    Raises UserError if the parent folder is not writable.
    """
    moved, copies = folder.with_name(_ASIDE + folder.name), 1
    while os.path.lexists(moved):
        copies += 1
        moved = folder.with_name(f"{_ASIDE}{folder.name}-{copies}")
    try:
        return folder.rename(moved)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be set aside as {moved.name}: {error.strerror}. Fix: make the folder above it writable, "
            "or move it yourself"
        ) from None


def best_checkpoint(root: Path, metric: str | None) -> Path | None:
    """Returns the checkpoint that is best by a metric of its evaluation; None if none has it."""
    return _best(root, metric, lambda _: True)[1]


def _best(root: Path, metric: str | None, is_good: Callable[[Path], bool]) -> tuple[float, Path] | tuple[None, None]:
    """Returns (value, checkpoint) of the best that measured a metric; of equally good ones the first."""
    value, best = None, None
    if metric is None:
        return None, None
    for folder in reversed(list_checkpoints(root)):
        with contextlib.suppress(OSError, ValueError, KeyError):  # damaged
            measured = json.loads((folder / "state.json").read_text(encoding="utf-8"))["metrics"][metric]
            if (value is None or is_better(metric, measured, value)) and is_good(folder):
                value, best = measured, folder
    return (None, None) if value is None or best is None else (value, best)


class Retention:
    """Keeps the newest checkpoints and the best by a metric. Only verified ones count, so that a good one remains. One
    that an export is reading is deleted afterwards."""

    def __init__(self, root: Path, settings: Checkpoint):
        self._root, self._settings = root, settings
        self._verified: set[Path] = set()  # written or read by this process

    def trust(self, folder: Path) -> None:
        """Counts a checkpoint as verified without reading it."""
        self._verified.add(folder)

    def prune(self) -> None:
        """Deletes all but the `keep` newest and the best, and the remains of interrupted saves and deletions."""
        folders = list_checkpoints(self._root)
        kept = list(islice(filter(self._verify, folders), self._settings.keep))
        if not kept:
            return
        _, best = _best(self._root, self._settings.best, self._verify)
        for folder in folders:
            if folder < kept[-1] and folder != best and remove(folder):
                self._verified.discard(folder)
        for pattern in (_PARTIAL, _REMOVED):
            for path in self._root.glob(f"{pattern}*"):
                _delete(path)

    def best_value(self) -> float | None:
        """Returns the metric of the best existing checkpoint; None if there is none, or no `checkpoint.best`."""
        return _best(self._root, self._settings.best, self._verify)[0]

    def _verify(self, folder: Path) -> bool:
        if folder not in self._verified and find_problem(folder) is None:
            self._verified.add(folder)
        return folder in self._verified


# --- `checkpoints`: lists a run's checkpoints, as a table or as JSON


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint; step to written are None if its state.json cannot be read."""

    path: str
    bytes: int
    set_aside: bool  # a run did not resume from it
    verified: bool  # every byte was read
    problem: str | None
    step: int | None = None
    steps: int | None = None  # length of the run
    metrics: dict[str, float] | None = None
    written: dict[str, Any] | None = None  # keys: where, world_size, host, at (UTC)
    best: bool = False  # among those measured, by the run's `checkpoint.best`

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe_checkpoints(run_dir: Path, verify: bool) -> list[CheckpointInfo]:
    """Returns a run's checkpoints, newest first, those set aside last; without those that a run deletes
    meanwhile. Raises UserError without a folder."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such run directory. Fix: check the path")
    root, metric = run_dir / "checkpoints", None
    with contextlib.suppress(FileNotFoundError):
        recipe = yaml.safe_load((run_dir / "recipe.yaml").read_text(encoding="utf-8"))
        metric = ((recipe or {}).get("checkpoint") or {}).get("best")
    folders = [*list_checkpoints(root), *list_set_aside(root)]
    best = best_checkpoint(root, metric)
    described = []
    for folder in track(folders, "reading", transient=True, console=Console(stderr=True), disable=not verify):
        if (held := hold(folder)) is None:
            continue
        try:
            problem = find_problem(folder, read=verify)
            fields: dict[str, Any] = {}
            try:
                state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
                fields = {name: state[name] for name in ("step", "steps", "metrics", "written")}
            except (OSError, ValueError, KeyError) as error:
                problem = problem or f"its state.json cannot be read: {error}"
            size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
            info = CheckpointInfo(
                str(folder), size, folder.name.startswith(_ASIDE), verify, problem, best=(folder == best), **fields
            )
        except FileNotFoundError:  # deleted while it was read, because files cannot be locked here
            continue
        finally:
            held.release()
        if folder.is_dir():
            described.append(info)
    return described


def show_checkpoints(console: Console, run_dir: Path, checkpoints: list[CheckpointInfo]) -> None:
    """Prints a table, and below it the problems."""
    if not checkpoints:
        print_line(console, f"{run_dir} has no checkpoints")
        return
    title = f"{run_dir}/checkpoints"
    table = Table("step", "metrics", "size", "written (UTC)", "by", "state", title=title, title_justify="left")
    for entry in checkpoints:
        by = entry.written or {}
        state = ["[green]verified[/green]" if entry.verified else "complete"]
        state += ["set aside"] * entry.set_aside + ["[bold]best[/bold]"] * entry.best
        table.add_row(
            f"{entry.step:,} of {entry.steps:,}" if entry.step is not None else Path(entry.path).name,
            "\n".join(f"{name} {value:.4f}" for name, value in (entry.metrics or {}).items()),
            readable_bytes(entry.bytes),
            f"{datetime.fromisoformat(by['at']):%Y-%m-%d\n%H:%M}" if by else "?",
            f"{by['where']} x {by['world_size']}\n{by['host']}" if by else "?",
            "[red]damaged[/red]" if entry.problem else "\n".join(state),
        )
    console.print(table)
    for entry in checkpoints:
        if entry.problem:
            console.print(f"[red]{escape(entry.path)}: {escape(entry.problem)}[/red]", soft_wrap=True, highlight=False)
