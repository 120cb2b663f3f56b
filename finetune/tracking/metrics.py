"""Files of a run that grow while it trains (metrics.jsonl, generations.jsonl, samples/rank-*.jsonl, status.json), and
sums over its steps.

JSON lines are in the order of steps, each step once, also after a resume.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from finetune.tracking.headline import HEADLINES
from finetune.utils import naming, no_constant, write_atomically

Entry = dict[str, Any]
EXAMPLES = "examples.json"  # the first training examples, as text with their masks
GENERATIONS = "generations.jsonl"  # answers to held-out prompts, of each evaluation
PICTURES = "pictures"  # folder: the images of those prompts, small
_LARGEST = 1e100  # of a metric: sums of larger numbers would overflow
_LARGEST_STEP = 2**53

log = logging.getLogger(__name__)


def is_shown(key: str) -> bool:
    """Returns whether pages and trackers show a metric: those follow from others that are a share of the time, or a
    speed over the number of devices."""
    return not key.startswith("share/") and not key.endswith("tokens_per_s_per_device")


class StepLog:
    """Appends JSON lines; drops those of steps that a resumed run repeats."""

    def __init__(self, path: Path, first_step: int):
        """first_step: the next step to be logged (1-based); 1 empties the file."""
        keep_before(path, first_step)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, entry: Entry) -> None:
        with naming(self._file.name):
            self._file.write(_line(entry))

    def flush(self) -> None:
        """Flushes to the disk, before a checkpoint records these steps as done."""
        with naming(self._file.name):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with naming(self._file.name):
            self._file.close()


def keep_before(path: Path, first_step: int) -> None:
    """Drops the lines from `first_step` on, and an incomplete last one of a killed run; creates the file if absent.

    A file with lines that are damaged is kept as `*.damaged`: damage to a log stops no run.
    """
    if first_step > 1 and (damaged := num_damaged(path)):
        kept_as = path.with_name(f"{path.name}.damaged")
        shutil.copyfile(path, kept_as)
        log.warning("%s: %d lines cannot be read and are left out; the file is kept as %s", path, damaged, kept_as.name)
    kept = [entry for entry in read_steps(path) if entry["step"] < first_step] if first_step > 1 else []
    write_atomically(path, "".join(map(_line, kept)))


def read_steps(path: Path) -> list[Entry]:
    """Returns every line that can be read; the incomplete last line of a killed run is skipped."""
    return [entry for entry in map(_parsed, _complete_lines(path)) if entry is not None]


def add_to_step(path: Path, step: int, values: Entry) -> None:
    """Adds values to the last line of a step, atomically; other lines stay as they are. No run may be writing."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for i, line in reversed([*enumerate(lines)]):
        if (entry := _parsed(line.encode())) is not None and entry["step"] == step:
            lines[i] = _line({**entry, **values}).rstrip("\n")
            break
    write_atomically(path, "\n".join(lines))


def num_damaged(path: Path) -> int:
    return sum(_parsed(line) is None for line in _complete_lines(path))


class MetricsLog(NamedTuple):
    """A metrics.jsonl as it can be read."""

    lines: list[Entry]
    damage: str  # what is wrong with the file, "" if nothing is


def read_metrics(path: Path) -> MetricsLog:
    """Returns the lines whose values are numbers, and what is left out. A file that is absent has none."""
    try:
        read = [(number, _parsed(line)) for number, line in enumerate(_lines(path), start=1) if line]
    except OSError as error:
        return MetricsLog([], f"{path.name} cannot be read: {error.strerror}")
    lines = [entry for _, entry in read if entry is not None and _is_numbers(entry)]
    damaged = [number for number, entry in read if entry is None or not _is_numbers(entry)]
    if not damaged:
        return MetricsLog(lines, "")
    count = "1 line is" if len(damaged) == 1 else f"{len(damaged)} lines are"
    return MetricsLog(lines, f"{path.name}: {count} damaged and left out, the first is line {damaged[0]}")


def _is_numbers(entry: Entry) -> bool:
    """Returns whether all values are finite numbers. null: an evaluation that overflowed, and the gradient's norm of a
    step that fp16 skipped."""
    return all(
        (value is None and ("loss" not in entry or name == "grad_norm"))
        or (isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST)
        for name, value in entry.items()
    )


def _complete_lines(path: Path) -> list[bytes]:
    return [line for line in _lines(path) if line]


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def _parsed(line: bytes) -> Entry | None:
    try:
        entry = json.loads(line.decode("utf-8"), parse_constant=no_constant)
    except (ValueError, RecursionError):
        return None
    has_step = isinstance(entry, dict) and type(entry.get("step")) is int and 0 <= entry["step"] < _LARGEST_STEP
    return entry if has_step else None


def missing_steps(path: Path, first_step: int) -> str:
    """Returns the steps before `first_step` that have no line with a loss, as `1 to 3, 7`; "" if there are none."""
    logged = {entry["step"] for entry in read_metrics(path).lines if "loss" in entry}
    missing = [step for step in range(1, first_step) if step not in logged]
    begins = [step for i, step in enumerate(missing) if not i or missing[i - 1] != step - 1]
    ends = [step for i, step in enumerate(missing, 1) if i == len(missing) or missing[i] != step + 1]
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in zip(begins, ends, strict=True))


def sample_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.jsonl"


def prepare_samples(folder: Path, first_step: int) -> None:
    """Trims the files of all ranks, also of a former, larger world; on the main process, before ranks open theirs."""
    folder.mkdir(exist_ok=True)
    for path in folder.glob("rank-*.jsonl"):
        keep_before(path, first_step)


def _line(entry: Entry) -> str:
    return json.dumps(entry, allow_nan=False, ensure_ascii=False) + "\n"


Line = dict[str, float]  # by key of metrics.jsonl
RATES = ("tokens_per_s", "supervised_tokens_per_s", "tflops_per_device", "mfu", "hfu")


class Totals:
    """Sums a run's meters over its steps. The first step of a launch is warm-up: it counts only if it is alone."""

    def __init__(self) -> None:
        self._lines = 0
        self._sums = defaultdict[str, float](float)
        self._stragglers = Counter[int]()
        self._spreads: list[float] = []
        self._headlines = defaultdict[str, list[float]](list)  # of every step
        self.last: Line = {}

    def add(self, line: Line) -> None:
        if self._lines == 1:
            self._sums.clear()
            self._stragglers.clear()
            self._spreads.clear()
        self._lines += 1
        self.last = line
        for key in HEADLINES:
            if key in line:
                self._headlines[key].append(line[key])
        self._sums["step_s"] += line["step_s"]
        for key, value in line.items():
            if key.startswith("time/"):
                self._sums[key] += value
            elif key in RATES:
                self._sums[key] += value * line["step_s"]
        if "straggler" in line:
            self._stragglers[int(line["straggler"])] += 1
            self._spreads.append(line["rank_spread"])

    @property
    def steps(self) -> int:
        """Number of steps that are summed."""
        return max(self._lines - 1, min(self._lines, 1))

    def mean(self, key: str) -> float | None:
        """Returns the time-weighted mean of a rate."""
        return self._sums[key] / self._sums["step_s"] if key in self._sums else None

    def shares(self) -> dict[str, float]:
        """Returns the share of all time, stalls included, by category."""
        times = {key.removeprefix("time/"): value for key, value in self._sums.items() if key.startswith("time/")}
        total = sum(times.values())
        return {name: seconds / total for name, seconds in times.items()} if total else {}

    def headlines(self) -> dict[str, str]:
        """Returns the means of the objective's numbers, of the first and the last ten steps if there are so many."""
        texts: dict[str, str] = {}
        for key, values in self._headlines.items():
            name, form = HEADLINES[key]
            ends = [statistics.fmean(part) for part in (values[:10], values[-10:])]
            texts[name] = (
                f"{ends[0]:{form}} in the first 10 steps, {ends[1]:{form}} in the last 10"
                if len(values) >= 20
                else f"{statistics.fmean(values):{form}}"
            )
        if all(value == 1.0 for value in self._headlines.get("zero_variance", [0.0])):
            texts[HEADLINES["zero_variance"].name] += " of the prompts in every step: nothing was learnt"
        return texts

    def straggler(self) -> tuple[int, float, float] | None:
        """Returns (rank, share of steps in which it was the slowest, median spread); None if ranks are not compared."""
        if not self._stragglers:
            return None
        rank, times = self._stragglers.most_common(1)[0]
        return rank, times / len(self._spreads), statistics.median(self._spreads)


Status = Literal["running", "stopped", "failed", "finished"]  # one that was killed stays `running`


def write_status(run_dir: Path, status: Status, step: int, steps: int) -> None:
    """Writes status.json, for scripts that decide whether to launch a run again. step: done, of `steps`."""
    path, text = run_dir / "status.json", json.dumps({"status": status, "step": step, "steps": steps}) + "\n"
    try:
        write_atomically(path, text)
    except OSError:
        if status != "failed" or not path.exists():
            raise
        with path.open("r+") as file:  # a full disk has room for the existing content
            file.write(text.strip().ljust(path.stat().st_size - 1) + "\n")


def read_status(run_dir: Path) -> Status | None:
    """Returns the status of the last launch; None if there was none, or it cannot be read."""
    try:
        status = json.loads((run_dir / "status.json").read_bytes())["status"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return status if status in get_args(Status) else None


_MAX_PENDING = 1000  # calls; beyond them the loop waits for a disk or a server that does not keep up


class Background:
    """Makes calls in one thread, in order. An exception is raised by a later `do`, `flush` or `close`, once; calls
    after it are dropped."""

    def __init__(self, name: str):
        self._pool = ThreadPoolExecutor(1, name)
        self._pending: deque[Future[None]] = deque()
        self._failed = False

    def do(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._wait(down_to=_MAX_PENDING)
        self._pending.append(self._pool.submit(self._run, call, *arguments))

    def flush(self) -> None:
        """Waits for every call."""
        self._wait(down_to=0)

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._pool.shutdown()

    def _wait(self, down_to: int) -> None:
        while self._pending and (self._pending[0].done() or len(self._pending) > down_to):
            self._pending.popleft().result()

    def _run(self, call: Callable[..., Any], *arguments: Any) -> None:
        if self._failed:
            return
        self._failed = True  # until the call returns
        call(*arguments)
        self._failed = False
