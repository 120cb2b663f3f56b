"""`runs`: what each run below a folder is doing, from the files that it writes; works on a shared folder.

A run that is killed cannot say so: its status stays `running`, and its silence is shown.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from finetune.engine.hardware import CPU, read_hardware
from finetune.errors import UserError
from finetune.plan.finished_runs import device_key, read_plan
from finetune.plan.search import hourly
from finetune.plan.tables import Prices, parse_machines, read_prices
from finetune.tracking.headline import EVALUATIONS, Headline, headlines
from finetune.tracking.metrics import read_metrics, read_status
from finetune.utils import print_line, readable_hours

_RECENT = 20  # steps whose median time predicts the rest
_MOST = 10**9  # steps or devices of a run
_SILENT_S = 600.0  # and twenty of its own steps: longer without a line, a run is perhaps dead


@dataclass(frozen=True)
class RunInfo:
    """State of one run. Times are in hours of training, of this launch and those before it."""

    folder: str
    status: str | None  # None: it has none, as its set-up has not finished
    step: int
    steps: int | None
    loss: float | None
    evaluation: dict[str, float]  # the last one, without parts
    tokens_per_s: float | None
    hours: float
    hours_left: float | None  # None: it does not run, or has made no step
    silent_s: float | None  # since its last line; None: not running
    price: float | None  # so far; None: its device has no price
    currency: str | None
    devices: str
    measure: str = ""  # what the objective is about, of the last step: "reward 0.1250"
    problems: tuple[str, ...] = ()  # damage of its files


def list_runs(folder: Path) -> list[RunInfo]:
    """Returns the runs below a folder, the last that wrote first. Raises UserError if there are none."""
    names = ("status.json", "plan.json", "metrics.jsonl")
    folders = {file.parent for name in names for pattern in (name, f"*/{name}") for file in folder.glob(pattern)}
    if not folders:
        raise UserError(f"{folder}: no runs here. Fix: give the folder that `run.dir` names, or a run")
    prices = read_prices()
    return [read_run(run, prices) for run in sorted(folders, key=_last_written, reverse=True)]


def price_so_far(run: Path) -> str | None:
    """Returns the price of a run so far, with its currency; None if its device has no price."""
    info = read_run(run, read_prices())
    return None if info.price is None else f"{info.price:.4g} {info.currency}"


def _last_written(run: Path) -> float:
    files = (run / name for name in ("metrics.jsonl", "status.json", "plan.json"))
    return max(file.stat().st_mtime for file in files if file.exists())


def read_run(run: Path, prices: Prices) -> RunInfo:
    """Returns what the files of a run say; numbers that are missing or damaged are left out."""
    plan, status, (lines, damage) = read_plan(run / "plan.json"), read_status(run), read_metrics(run / "metrics.jsonl")
    read = {"plan.json": plan, "status.json": status}
    unread = [f"{name} cannot be read" for name, content in read.items() if not content and (run / name).exists()]
    trained = [line for line in lines if "loss" in line]
    seconds: list[float] = []  # of each step with its evaluation and checkpoint
    for line in trained:
        parts = [value for name, value in line.items() if name.startswith("time/")]
        seconds.append(sum(parts) or line.get("step_s") or 0.0)
    step, steps = trained[-1]["step"] if trained else 0, _count(plan.get("steps"))
    recent = statistics.median(seconds[-_RECENT:]) if seconds else None
    runs, hours = status == "running", sum(seconds) / 3600
    silent = time.time() - _last_written(run) if runs else None
    # Of an hour of the run's devices, with its currency; None for processors and unknown devices.
    if plan.get("device") in (None, CPU) or not _count(plan.get("world_size")):
        rate = None
    else:
        hardware = read_hardware()
        if (key := device_key(plan, hardware)) is None:
            rate = None
        else:
            rate = hourly(prices, parse_machines(f"{plan['world_size']}x{key}", 1, hardware))
    evaluations = [line for line in lines if any(name.startswith("eval_") for name in line)]
    last = evaluations[-1] if evaluations else {}
    return RunInfo(
        str(run),
        status,
        step,
        steps,
        trained[-1]["loss"] if trained else None,
        {name: value for name, value in last.items() if "/" not in name and name != "step" and value is not None},
        trained[-1].get("tokens_per_s") if trained else None,
        hours,
        recent * (steps - step) / 3600 if runs and recent is not None and steps is not None else None,
        silent if silent is not None and silent > max(_SILENT_S, 20 * (recent or 0)) else None,
        rate[0] * hours if rate else None,
        rate[1] if rate else None,
        f"{plan.get('world_size', '?')!s:.20} x {plan.get('device', '?')!s:.80}",
        next(iter(headlines(trained[-1])), "") if trained else "",
        (*([damage] if damage else []), *unread),
    )


def _count(value: object) -> int | None:
    """Returns a number of a plan that may be damaged."""
    return value if type(value) is int and 0 <= value < _MOST else None


_COLOURS = {"finished": "green", "failed": "red", "stopped": "yellow"}  # by status


def show_runs(console: Console, folder: Path, runs: list[RunInfo]) -> None:
    """Prints a table, without columns that are empty, and below it the runs that are silent."""
    names = ["running?" if run.silent_s is not None else run.status or "starting" for run in runs]
    columns = {
        "run": [escape(_printable(Path(run.folder).name)) for run in runs],
        "status": [f"[{_COLOURS[name]}]{name}[/]" if name in _COLOURS else name for name in names],
        "step": [f"{run.step:,}/{'?' if run.steps is None else f'{run.steps:,}'}" for run in runs],
        "loss": [_number(run.loss) for run in runs],
        "measure": [run.measure for run in runs],
        "eval": [evaluation(run) for run in runs],
        "tok/s": ["" if run.tokens_per_s is None else f"{run.tokens_per_s:,.0f}" for run in runs],
        "time": [readable_hours(run.hours) for run in runs],
        "left": ["" if run.hours_left is None else readable_hours(run.hours_left) for run in runs],
        "price": ["" if run.price is None else f"{run.price:,.2f} {run.currency}" for run in runs],
    }
    table = Table(title=str(folder), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    for name in shown:
        folds = name in ("run", "price")
        justify = "left" if name in ("run", "status") else "right"
        width = 12 if name == "run" else None
        table.add_column(name, overflow="fold", justify=justify, no_wrap=not folds, min_width=width)
    for cells in zip(*shown.values(), strict=True):
        table.add_row(*cells)
    console.print(table)

    def say(text: str) -> None:
        print_line(console, escape(_printable(text)))

    for run in runs:
        if run.silent_s is not None:
            since = readable_hours(run.silent_s / 3600)
            say(f"{run.folder}: has written nothing for {since}: if it was killed, launch it again")
        for problem in run.problems:
            say(f"{run.folder}: {problem}")


def evaluation(run: RunInfo) -> str:
    """Returns the last evaluation's main number: the share of exact answers, the reward, the accuracy or the loss."""
    return next((_in_form(run.evaluation[key], form) for key, (_, form) in _evaluations(run)), "")


def evaluation_name(run: RunInfo) -> str:
    """Returns what `evaluation` is, "loss" if there is none."""
    return next((name for _, (name, _) in _evaluations(run)), "loss")


def _evaluations(run: RunInfo) -> list[tuple[str, Headline]]:
    return [(key, headline) for key, headline in EVALUATIONS.items() if key in run.evaluation]


def _in_form(value: float, form: str) -> str:
    return f"{value:{form}}" if abs(value) < 1e6 else f"{value:.4g}"


def _number(value: float | None) -> str:
    return "" if value is None else _in_form(value, ".4f")


def _printable(name: str) -> str:
    return name.encode(errors="replace").decode()  # of a file, whose bytes may be no text


def runs_as_json(runs: list[RunInfo]) -> str:
    return json.dumps([asdict(run) for run in runs], indent=1)
