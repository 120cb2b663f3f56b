"""Kill a training run hundreds of times at random moments, and show that nothing is lost.

    python scripts/proofs/crash_test.py                    # 200 SIGKILLs: ddp, fsdp2 and zero3, two processes each
    python scripts/proofs/crash_test.py --only zero3 --kills 30
    python scripts/proofs/crash_test.py --only pp_fsdp2_tp --kills 10    # stages x shards x tensors, eight processes

A trial is one run: it is killed, started again by the same command, killed again, until it is complete. Then its folder
must be that of the same run never killed: weights and optimizer state bitwise, every line of metrics.jsonl once with
the same numbers, the same rows in each step (tests/support/bitwise.py). Half of the kills hit while a checkpoint was
being written: those that did are counted, not those that were meant to. Each config's first trial is killed under
`accelerate launch`, the others are forks (tests/support/killable.py). The seed fixes what is drawn; where a kill
lands is up to the machine as well. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import bitwise
import forks
import killable
import parity
from killable import Failed

from finetune.checkpoints.folder import step_of

CONFIGS = ("ddp", "fsdp2", "zero3")  # by default
STEPS = 16
RECIPE = (
    f"train.max_steps={STEPS}",
    "batch.rows_per_device=2",
    "evaluate.every_steps=4",
    "checkpoint.keep=2",
    "tracking.samples=true",
)
_FULL, _LORA = (next(c.overrides for c in parity.CASES if c.name == name) for name in ("full", "lora dropout rslora"))
_BESIDE = ("checkpoint.every_steps=1", "checkpoint.asynchronous=true")
_BETWEEN = ("checkpoint.every_steps=2", "checkpoint.asynchronous=false")
CASES = (
    ("full, saved during steps", (*_FULL, *_BESIDE)),
    ("lora, saved between steps", (*_LORA, *_BETWEEN)),
    ("full, saved between steps", (*_FULL, *_BETWEEN)),
    ("lora, saved during steps", (*_LORA, *_BESIDE)),
)
POLL_S = 0.001
HANGS_S = 300.0
FAILED_TRIALS = 3  # before a config is given up


@dataclass(frozen=True)
class Moment:
    """`delay_s` after the `count`-th of what a start shows."""

    after: Literal["start", "loaded", "step", "save", "last save", "result"]
    count: int
    delay_s: float


@dataclass(frozen=True)
class Kill:
    how: str
    after: str  # what it was aimed at
    step: int  # the last one in metrics.jsonl
    during_save: bool
    during_result: bool  # while the final model was written


@dataclass
class Trial:
    config: str
    case: str
    launched: bool
    kills: list[Kill] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def kills_of(trials: list[Trial]) -> list[Kill]:
    return [kill for trial in trials for kill in trial.kills]


# --- a start of a run, seen from outside


class View:
    """What a start does, as its run's folder shows it; what an earlier start left there does not count."""

    def __init__(self, run: Path):
        self.run, self.checkpoints, self._metrics = run, run / "checkpoints", run / "metrics.jsonl"
        self.done = max(map(step_of, self.checkpoints.glob("step-*")), default=0)
        self._left = {_identity(path) for path in (self._metrics, *self.checkpoints.glob(".partial-*"))}
        self._seen: set[str] = set()

    def saving(self) -> set[str]:
        """Checkpoints that are being written now."""
        now = {path.name for path in self.checkpoints.glob(".partial-*") if self._is_new(path)}
        self._seen |= now
        return now

    def writes_result(self) -> bool:
        return self._is_new(self.run / "model.partial")

    def last_step(self) -> int:
        """Of metrics.jsonl; 0 until this start has opened it."""
        lines = self._metrics.read_bytes().split(b"\n")[:-1] if self._is_new(self._metrics) else []
        return json.loads(lines[-1])["step"] if lines else 0

    def count(self, what: str) -> int:
        """How often this start has shown it."""
        if what == "save":
            self.saving()
            return len(self._seen)
        if what == "step":
            return self.last_step() - self.done
        if what == "last save":
            return int((self.checkpoints / f"step-{STEPS:08d}").is_dir())
        if what == "result":
            return int(self.writes_result())
        return int(what == "start" or self._is_new(self._metrics))

    def _is_new(self, path: Path) -> bool:
        identity = _identity(path)
        return identity[1] is not None and identity not in self._left


def _identity(path: Path) -> tuple[str, tuple[int, int] | None]:
    """Changes whenever the file or folder does; None if it is absent."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return path.name, None
    return path.name, (status.st_ino, status.st_ctime_ns)


@dataclass(frozen=True)
class Job:
    """A run to start again and again by the same command."""

    folder: Path
    config: str
    name: str
    overrides: tuple[str, ...]
    environments: list[killable.Environment]
    launched: bool = False

    @property
    def run(self) -> Path:
        return self.folder / "runs" / self.name

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def start(self) -> killable.Killable:
        cache = {"FINETUNE_CACHE": str(self.folder / "cache" / self.name)}  # its own: kills hit its making, too
        arguments = ["train", str(self.folder / "recipe.yaml"), *RECIPE, *self.overrides, f"run.name={self.name}"]
        if self.launched:
            return killable.Launched(self.config, cache, arguments, self.log)
        if self.config in killable.EIGHT:  # stages are in no environment, and forks have no launcher to read them from
            arguments += ["--config-file", killable.config_file(self.config)]
        return killable.Forked([{**e, **cache} for e in self.environments], arguments, self.log)

    def wait(self, ranks: killable.Killable, happened: Callable[[], bool]) -> bool:
        """Returns False if the run was complete before it happened. Raises Failed."""
        give_up = time.monotonic() + HANGS_S
        while not happened():
            status = ranks.status()
            if status == 0:
                return False
            if status is not None or time.monotonic() > give_up:
                why = f"exit status {status}" if status else f"no end after {HANGS_S:.0f} s"
                raise Failed(f"{why}: {self.log}\n{self.log.read_text(encoding='utf-8', errors='replace')[-3000:]}")
            time.sleep(POLL_S)
        return True


@dataclass(frozen=True)
class Pace:
    """Of the run never killed. Seconds."""

    start_s: float  # until the first step
    step_s: float  # with its checkpoint
    save_s: float
    end_s: float  # from the last checkpoint to the exit
    result_s: float  # of it, writing the final model


def uninterrupted(job: Job) -> Pace:
    """Run through without a kill; how long what took. Raises Failed."""
    view, began = View(job.run), time.monotonic()
    steps: dict[int, float] = {}
    saves: dict[str, list[float]] = {}
    result: list[float] = []

    def look() -> bool:
        now = time.monotonic() - began
        steps.setdefault(view.last_step(), now)
        for name in view.saving():
            saves.setdefault(name, []).append(now)
        if view.writes_result():
            result.append(now)
        return False

    with closing(job.start()) as ranks:
        job.wait(ranks, look)
    ended, first, last = time.monotonic() - began, min(filter(None, steps)), max(steps)
    lives = [times[-1] - times[0] for times in saves.values()]
    step_s = (steps[last] - steps[first]) / (last - first)
    end_s, result_s = ended - max(map(max, saves.values())), max(result, default=0.0) - min(result, default=0.0)
    return Pace(steps[first], step_s, statistics.median(lives), end_s, result_s)


# --- kills


def draw(rng: random.Random, pace: Pace, left: int, aim_at_save: bool, launched: bool) -> Moment | None:
    """When to kill a start that has `left` steps to go; None: not at all."""
    at_the_end = rng.uniform(0, pace.end_s)
    during_result = Moment("result", 1, rng.uniform(0, pace.result_s))
    if left == 0:  # what remains is the final model; half of the time it may
        return rng.choice((None, None, Moment("loaded", 1, at_the_end), during_result))
    few = rng.randint(1, min(3, left))
    if aim_at_save:
        return Moment("save", few, rng.uniform(0, pace.save_s))
    if rng.random() < 0.15 and not launched:
        return Moment("start", 1, rng.uniform(0, pace.start_s))
    if left <= 3 and rng.random() < 0.5:
        return rng.choice((Moment("last save", 1, at_the_end), during_result))
    return Moment("step", few, rng.uniform(0, pace.step_s))


def attempt(job: Job, moment: Moment | None, rng: random.Random) -> Kill | None:
    """One start, killed at a moment; None if it was complete before. Raises Failed."""
    view = View(job.run)
    with closing(job.start()) as ranks:
        if moment is None or not _reached(job, ranks, view, moment):
            job.wait(ranks, lambda: False)
            return None
        step, result, saving = view.last_step(), view.writes_result(), view.saving()
        how = ranks.strike(rng)
        # One that was there just before the kill and is there after it.
        during_save = bool(saving & view.saving()) and how != killable.LAUNCHER_ALONE
        ranks.finish(rng)
        return Kill(how, moment.after, step or view.done, during_save, result)


def _reached(job: Job, ranks: killable.Killable, view: View, moment: Moment) -> bool:
    """Wait for the moment; False if the run was complete before."""
    if not job.wait(ranks, lambda: view.count(moment.after) >= moment.count):
        return False
    then = time.monotonic() + moment.delay_s
    return job.wait(ranks, lambda: time.monotonic() >= then)


def trial(job: Job, case: str, pace: Pace, rng: random.Random, earlier: list[Trial], quota: int, most: int) -> Trial:
    """Kill and start until the run is complete; left in peace after `most` kills, or once there are enough."""
    this, began = Trial(job.config, case, job.launched), time.monotonic()
    try:
        while True:
            kills = kills_of([*earlier, this])
            left, behind = STEPS - View(job.run).done, 2 * _saves(kills) < len(kills)
            spare = len(this.kills) >= most or _enough(kills, quota)
            kill = attempt(job, None if spare else draw(rng, pace, left, behind, job.launched), rng)
            if kill is None:
                break
            this.kills.append(kill)
    except Failed as error:
        this.problems.append(str(error))
    this.seconds = time.monotonic() - began
    return this


def trials(folder: Path, config: str, quota: int, launched_kills: int, seed: int) -> Iterator[Trial]:
    """Until `quota` kills have hit this config, half of them during a save."""
    environments = killable.launcher_environments(config, folder / f"environment-{config}")

    @functools.cache
    def reference(which: int) -> tuple[Path, Pace]:
        never = Job(folder, config, f"{config}-never-killed-{which}", CASES[which][1], environments)
        return never.run, uninterrupted(never)

    done: list[Trial] = []
    while not (_enough(kills_of(done), quota) or _given_up(done, quota)):
        number, launched = len(done), not done and launched_kills > 0
        which = number % len(CASES)
        case, overrides = CASES[which]
        same, pace = reference(which)
        job = Job(folder, config, f"{config}-trial-{number + 1:03d}", overrides, environments, launched)
        most = launched_kills if launched else 4 * STEPS
        this = trial(job, case, pace, random.Random(f"{seed} {config} {number}"), done, quota, most)
        this.problems = this.problems or bitwise.differences(same, job.run)
        done.append(this)
        yield this


def _saves(kills: list[Kill]) -> int:
    return sum(kill.during_save for kill in kills)


def _enough(kills: list[Kill], quota: int) -> bool:
    return len(kills) >= quota and 2 * _saves(kills) >= quota


def _given_up(done: list[Trial], quota: int) -> bool:
    """Nothing works, or kills do not hit saves."""
    return sum(bool(t.problems) for t in done) >= FAILED_TRIALS or len(kills_of(done)) >= 4 * quota + 20


# --- what is shown


class Display:
    """A bar for each config on a terminal, elsewhere a line for each trial."""

    def __init__(self, configs: list[str], quota: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.console = Console(stderr=True)
        name, state = TextColumn("{task.description:6}"), TextColumn("kills, {task.fields[state]}")
        # Drawn by hand: forks would lack the thread that does it; nor may what they print go through it.
        self.bars = Progress(
            *(name, BarColumn(), MofNCompleteColumn(), state),
            console=self.console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not self.console.is_terminal,
        )
        self._task = {config: self.bars.add_task(config, total=quota, state="not begun") for config in configs}

    def begin(self, config: str) -> None:
        self._show(config, "the run never killed", [])

    def trial(self, done: list[Trial]) -> None:
        """Show the last one, and the sum."""
        kills, last = kills_of(done), done[-1]
        self._show(last.config, f"{_saves(kills)} during a save, {len(done)} trials", kills)
        if last.problems or self.bars.disable:
            how, mark = ("launched" if last.launched else "forked"), ("; ".join(last.problems) or "as if never killed")
            counts = f"{len(last.kills)} kills, {_saves(last.kills)} during a save"
            line = f"{last.config} trial {len(done)} ({last.case}, {how}): {counts}, {last.seconds:.0f} s: {mark}"
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _show(self, config: str, state: str, kills: list[Kill]) -> None:
        self.bars.update(self._task[config], completed=len(kills), state=state)
        self.bars.refresh()


def show(done: list[Trial]) -> None:
    from rich.console import Console
    from rich.table import Table

    console, heads = Console(width=120), ("config", "kills", "during a save", "during the final model")
    table = Table(*heads, "trials", "as if never killed", "seconds per kill")
    for config in dict.fromkeys(t.config for t in done):
        _row(table, config, [t for t in done if t.config == config])
    _row(table, "all", done)
    console.print(table)
    ways = sorted(Counter(kill.how for kill in kills_of(done)).items())
    console.print("Killed: " + "; ".join(f"{way} {count} times" for way, count in ways))


def _row(table: Any, name: str, done: list[Trial]) -> None:
    kills, passed = kills_of(done), sum(not t.problems for t in done)
    counts = (len(kills), _saves(kills), sum(kill.during_result for kill in kills), len(done))
    mark = f"[{'green' if passed == len(done) else 'red'}]{passed}[/]"
    table.add_row(name, *map(str, counts), mark, f"{sum(t.seconds for t in done) / max(1, len(kills)):.1f}")


def run(folder: Path, configs: list[str], kills: int, launched_kills: int, seed: int) -> list[Trial]:
    """All trials of all configs, one after another."""
    quota, everything = -(-kills // len(configs)), []
    display = Display(configs, quota)
    with display.bars:
        for config in configs:
            display.begin(config)
            done: list[Trial] = []
            for this in trials(folder, config, quota, launched_kills, seed):
                done.append(this)
                display.trial(done)
            everything += done
    return everything


def passed(done: list[Trial], kills: int) -> bool:
    """Nothing was lost, and there were kills as many as requested, half of them during a save."""
    return not any(t.problems for t in done) and _enough(kills_of(done), kills)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="at least so many, over all configs (200)")
    parser.add_argument("--launched-kills", type=int, default=4, help="of each config's first trial, launched (4)")
    parser.add_argument(
        "--only", nargs="+", choices=[*CONFIGS, *killable.EIGHT], default=list(CONFIGS), help="these configs"
    )
    parser.add_argument("--seed", type=int, help="of what is drawn; without it another one each time")
    parser.add_argument("--json", type=Path, help="write every trial and kill there")
    parser.add_argument("--folder", type=Path, help="work there and keep everything")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    folder = (arguments.folder or Path(tempfile.mkdtemp(prefix="finetune-crash-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    # On CPUs, where sums come out the same every time; with one thread each, as forks would lack the others.
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    forks.import_everything()
    killable.in_fork(parity.prepare, folder)
    done = run(folder, arguments.only, arguments.kills, arguments.launched_kills, seed)
    show(done)
    if arguments.json:
        cells = [{**asdict(t), "passed": not t.problems, "seed": seed} for t in done]
        parity.write_json(arguments.json, "scripts/proofs/crash_test.py", cells)
    if not passed(done, arguments.kills):
        print(f"everything is kept in {folder}")
        return 1
    if not arguments.folder:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
