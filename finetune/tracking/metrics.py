"""Files of a run that grow while it trains: metrics.jsonl, samples/rank-*.jsonl, status.json; and sums over its steps.

JSON lines are in the order of steps, each step once, also after a resume.
"""

from __future__ import annotations

import json
import os
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from finetune.utils import write_atomically

Entry = dict[str, Any]


class StepLog:
    """Appends JSON lines; drops those of steps that a resumed run repeats."""

    def __init__(self, path: Path, first_step: int):
        """first_step: the next step to be logged (1-based); 1 empties the file."""
        keep_before(path, first_step)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, entry: Entry) -> None:
        self._file.write(_line(entry))

    def flush(self) -> None:
        """Flush to the disk, before a checkpoint records these steps as done."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def keep_before(path: Path, first_step: int) -> None:
    """Drop the lines from `first_step` on, and an incomplete last one of a killed run; creates the file if absent."""
    kept = [entry for entry in read_steps(path) if entry["step"] < first_step] if first_step > 1 else []
    write_atomically(path, "".join(map(_line, kept)))


def read_steps(path: Path) -> list[Entry]:
    """Returns every complete line; skips an incomplete last one of a killed run."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def sample_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.jsonl"


def prepare_samples(folder: Path, first_step: int) -> None:
    """Trim the files of all ranks, also of a former, larger world; on the main process, before ranks open theirs."""
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
        self.last: Line = {}

    def add(self, line: Line) -> None:
        if self._lines == 1:
            self._sums.clear()
            self._stragglers.clear()
            self._spreads.clear()
        self._lines += 1
        self.last = line
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

    def straggler(self) -> tuple[int, float, float] | None:
        """Returns (rank, share of steps in which it was the slowest, median spread); None if ranks are not compared."""
        if not self._stragglers:
            return None
        rank, times = self._stragglers.most_common(1)[0]
        return rank, times / len(self._spreads), statistics.median(self._spreads)


Status = Literal["running", "stopped", "finished"]  # one that was killed stays `running`


def write_status(run_dir: Path, status: Status, step: int, steps: int) -> None:
    """Write status.json, for scripts that decide whether to launch a run again. step: done, of `steps`."""
    write_atomically(run_dir / "status.json", json.dumps({"status": status, "step": step, "steps": steps}) + "\n")


def read_status(run_dir: Path) -> Status | None:
    """Returns the status of the last launch; None if there was none."""
    file = run_dir / "status.json"
    return json.loads(file.read_text(encoding="utf-8"))["status"] if file.exists() else None


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
        """Wait for every call."""
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
