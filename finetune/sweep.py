"""Searches values of recipe keys with Optuna: each trial is a run of its own, started by `finetune launch`.

    python -m finetune.sweep SWEEP.yaml --trials N [KEY=VALUE]...

While a trial trains, each evaluation in its metrics.jsonl is reported to Optuna. If the pruner gives the trial up, its
run gets SIGTERM: it saves and exits with 75. Everything about the study is in SWEEP.db, an SQLite file next to
SWEEP.yaml: the same command continues, and a run that was stopped resumes. Exit status as of every command: 0, 2 for
errors that the user can fix, 75 if stopped by a signal.

Another sampler or pruner is a few lines of Python:

    sweep = read_sweep("sweep.yaml")
    study = optuna.create_study(sampler=..., pruner=..., direction="minimize")
    study.optimize(lambda trial: run_trial(sweep, trial), n_trials=6, catch=RunFailure)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from rich.console import Console
from rich.table import Table

from finetune.errors import STOPPED_STATUS, RunFailure, UserError
from finetune.features import load_recipe
from finetune.recipe.load import key_is_known
from finetune.recipe.schema import metric_direction
from finetune.recipe.yaml_tree import read
from finetune.tracking.metrics import read_metrics

if TYPE_CHECKING:
    import optuna

POLL_S = 0.5  # between two looks at a run's metrics.jsonl
STARTUP_TRIALS = 4  # drawn at random, and never pruned: before them neither sampler nor pruner has much to compare with
_KEYS = ("recipe", "metric", "parameters", "overrides")
_RANGE = ("low", "high", "log", "step")
_INSTEAD = (
    "neither a list of values nor a range. Fix: write [1e-5, 1e-4], or {low: 1e-5, high: 1e-3, log: true} (`step` in "
    "place of `log` for even steps)"
)


@dataclass(frozen=True)
class Sweep:
    """What a study tries: a recipe with other values of some keys, compared by one metric of its evaluations."""

    recipe: str
    metric: str  # as checkpoint.best takes it
    parameters: dict[str, list[Any] | dict[str, Any]]  # by key of the recipe: choices, or low, high, log, step
    overrides: tuple[str, ...] = ()  # of every trial


def read_sweep(path: str | Path, *overrides: str) -> Sweep:
    """Reads a file with `recipe`, `metric`, `parameters` and, if wanted, `overrides`; others are added to these.

    Raises UserError with file and line.
    """
    tree = read(Path(path))
    for key in tree.values:
        if key not in _KEYS:
            raise UserError(f"{tree.place((key,))}: {key}: not a key of a sweep. Fix: use {', '.join(_KEYS)}")
    for key, kind in zip(_KEYS, (str, str, dict, list), strict=True):
        if not isinstance(tree.values.get(key, [] if key == "overrides" else None), kind):
            names = {str: "text", dict: "keys of the recipe, each with its values", list: "a list of `key=value`"}
            raise UserError(f"{tree.place((key,))}: {key}: is missing or of another type. Fix: give {names[kind]}")
    try:
        metric_direction(tree.values["metric"])
    except ValueError as error:
        raise UserError(f"{tree.place(('metric',))}: metric: {error}") from None
    for name, space in tree.values["parameters"].items():
        place = f"{tree.place(('parameters', name))}: {name}"
        if not key_is_known(name):
            raise UserError(f"{place}: not a key of a recipe. Fix: use one of docs/reference/recipe-keys.md")
        if isinstance(space, list) and space and not any(isinstance(choice, list | dict) for choice in space):
            continue
        if not isinstance(space, dict) or set(space) - set(_RANGE) or type(space.get("log", False)) is not bool:
            raise UserError(f"{place}: {_INSTEAD}")
        low, high = space.get("low", math.nan), space.get("high", math.nan)
        if any(type(end) not in (int, float) or not math.isfinite(end) for end in (low, high, space.get("step", 1))):
            raise UserError(f"{place}: {_INSTEAD}")
        if low >= high or space.get("step", 1) <= 0:
            raise UserError(
                f"{place}: the range or its step is empty. Fix: set low ({low}) below high ({high}), and `step` above 0"
            )
        if space.get("log") and (low <= 0 or "step" in space):
            raise UserError(
                f"{place}: `log: true` needs low above 0 and no `step`. Fix: raise low, remove `step`, or leave "
                "`log` out"
            )
    given = tuple(str(text) for text in tree.values.get("overrides", []))
    return Sweep(tree.values["recipe"], tree.values["metric"], tree.values["parameters"], (*given, *overrides))


def suggest(trial: optuna.Trial, sweep: Sweep) -> list[str]:
    """Returns a trial's overrides, `optimizer.lr=0.0003`. Ends of a range that are both whole give whole numbers."""
    texts = []
    for name, space in sweep.parameters.items():
        if isinstance(space, list):
            value = trial.suggest_categorical(name, space)
        elif isinstance(space["low"], int) and isinstance(space["high"], int):
            value = trial.suggest_int(name, **{"step": 1, **space})
        else:
            value = trial.suggest_float(name, **space)
        texts.append(f"{name}={value if isinstance(value, str) else json.dumps(value)}")
    return texts


def run_trial(sweep: Sweep, trial: optuna.Trial) -> float:
    """Trains one trial and returns its best value of the metric: Optuna's objective.

    The run is called as the recipe says, with the trial's number: `run.name=lr-{optimizer.lr}` gives `lr-0.001-3`. What
    it prints is in `<run>.log` next to its folder. Raises TrialPruned, RunFailure if the run failed, UserError if every
    other would fail alike, and KeyboardInterrupt at a signal, after the run has saved.
    """
    import optuna

    overrides = [*sweep.overrides, *suggest(trial, sweep)]
    run = load_recipe(sweep.recipe, overrides).run
    again = trial.user_attrs.get("run")  # of a trial that was stopped
    name = again or f"{run.name}-{trial.number}"
    folder = Path(run.dir).expanduser() / name
    if folder.exists() and not again:
        raise UserError(f"{folder}: is of an earlier study. Fix: remove it, or use another `run.name` or `run.dir`")
    trial.set_user_attr("run", name)
    process = _start([sweep.recipe, *overrides, f"run.name={name}"], folder.with_name(f"{name}.log"))
    try:
        gives_up = _follow(process, trial, folder / "metrics.jsonl", sweep.metric)
    except KeyboardInterrupt:
        trial.study.enqueue_trial(trial.params, {"run": name})  # before anything that a second Ctrl-C would end
        raise
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        status = process.wait()
    if gives_up and status == STOPPED_STATUS:
        raise optuna.TrialPruned
    if status == STOPPED_STATUS:  # by somebody else, such as a scheduler
        trial.study.enqueue_trial(trial.params, {"run": name})
        raise KeyboardInterrupt
    if status:
        log = folder.with_name(f"{name}.log")
        log_lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it printed nothing"]
        reason = next((line for line in reversed(log_lines) if line.startswith("error: ")), log_lines[-1])
        kind = UserError if status == 2 else RunFailure
        fix = "" if "Fix: " in reason else ". Fix: read this log"
        error = kind(f"{log}: the run ended with status {status}: {reason.removeprefix('error: ')}{fix}")
        trial.set_user_attr("error", str(error))
        raise error
    metrics = folder / "metrics.jsonl"
    metric = sweep.metric
    lines = read_metrics(metrics).lines
    values = [line[metric] for line in lines if line.get(metric) is not None]
    if values:
        return (min if metric_direction(metric) == "lower" else max)(values)
    if any(metric in line for line in lines):
        raise RunFailure(
            f"{metrics}: {metric} overflowed in every evaluation. Fix: try smaller values, such as of optimizer.lr"
        )
    raise UserError(
        f"{metrics}: no evaluation measured {metric!r}. Fix: set `data.eval` and `evaluate`, or another `metric`"
    )


def _start(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Starts `finetune launch`, in a session of its own: Ctrl-C reaches it through the sweep alone."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "finetune", "launch", *words]
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def _follow(process: subprocess.Popen[bytes], trial: optuna.Trial, metrics: Path, metric: str) -> bool:
    """Reports a run's evaluations until it ends; returns True as soon as the pruner gives it up."""
    reported = -1  # the last step
    while True:
        ended = process.poll() is not None  # before the last look at the file
        for line in read_metrics(metrics).lines:
            if metric in line and line["step"] > reported:
                reported, value = line["step"], line[metric]
                trial.report(math.nan if value is None else value, reported)  # null: it overflowed
                if not ended and trial.should_prune():
                    return True
        if ended:
            return False
        time.sleep(POLL_S)


def run_sweep(path: Path, trials: int, overrides: Sequence[str] = (), console: Console | None = None) -> optuna.Study:
    """Begins or continues the study of a file until it has so many trials; returns it. Raises UserError.

    console: gets a line for each trial.
    """
    if importlib.util.find_spec("optuna") is None:
        raise UserError("a sweep needs Optuna, which is not installed. Fix: pip install optuna")
    import optuna

    sweep = read_sweep(path, *overrides)
    storage = path.with_suffix(".db")
    try:
        with FileLock(f"{storage}.lock", timeout=0):
            study = optuna.create_study(
                storage=f"sqlite:///{storage}",
                study_name=path.stem,
                load_if_exists=True,
                direction="minimize" if metric_direction(sweep.metric) == "lower" else "maximize",
                pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS),
            )
            now = {**asdict(sweep), "overrides": list(sweep.overrides)}
            before = study.user_attrs.get("sweep", now)
            if changed := [key for key in now if now[key] != before[key]]:
                raise UserError(
                    f"{storage}: its trials are of other {' and '.join(changed)}, and cannot be compared. Fix: undo "
                    f"the change, or give {storage.with_suffix('.yaml').name} another name, which begins a new study"
                )
            study.set_user_attr("sweep", now)
            _take_up(study)
            seed = len(study.trials)  # a study that continues draws no value a second time
            study.sampler = optuna.samplers.TPESampler(n_startup_trials=STARTUP_TRIALS, seed=seed)
            # A trial that was stopped and taken up again is one run.
            waiting = {trial.user_attrs.get("run") for trial in study.trials if not trial.state.is_finished()}
            ended = {trial.user_attrs.get("run") for trial in study.trials} - waiting - {None}
            if (missing := trials - len(ended)) > 0:

                def say(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
                    values = " ".join(f"{name}={value}" for name, value in trial.params.items())
                    result = trial.user_attrs.get("error", "" if trial.value is None else f"{trial.value:.5g}")
                    line = f"trial {trial.number}: {trial.state.name.lower()} with {values}"
                    if console:
                        console.print(f"{line}: {result}" if result else line, markup=False)

                study.optimize(lambda trial: run_trial(sweep, trial), missing, catch=RunFailure, callbacks=[say])
    except Timeout:
        raise UserError(f"{storage}: another sweep is running. Fix: wait for it, or stop it") from None
    return study


def _take_up(study: optuna.Study) -> None:
    """Puts trials of a sweep that was killed into the queue again."""
    from optuna.trial import TrialState

    for trial in study.get_trials(states=[TrialState.RUNNING]):
        study.tell(trial.number, state=TrialState.FAIL)
        if "run" in trial.user_attrs:
            study.enqueue_trial(trial.params, {"run": trial.user_attrs["run"]})


def show_trials(study: optuna.Study, console: Console) -> None:
    """Prints every trial, the best first."""
    metric = study.user_attrs["sweep"]["metric"]
    sign = 1 if metric_direction(metric) == "lower" else -1
    table = Table("trial", "state", metric, "last step", *study.user_attrs["sweep"]["parameters"], box=None)
    table.add_column("run", overflow="fold")
    for trial in sorted(study.trials, key=lambda one: (one.state.value, sign * (one.value or 0))):
        value = "" if trial.value is None else f"{trial.value:.5g}"
        values = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in trial.params.values()]
        if trial.state.is_finished():
            cells = [str(trial.number), trial.state.name.lower(), value, str(trial.last_step or ""), *values]
            table.add_row(*cells, trial.user_attrs.get("run", ""))
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m finetune.sweep", description="Search recipe values with Optuna.")
    parser.add_argument("sweep", type=Path, help="file with `recipe`, `metric` and `parameters`")
    parser.add_argument("--trials", type=int, required=True, help="trials in all, those of earlier commands included")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of every trial")
    options = parser.parse_intermixed_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    if importlib.util.find_spec("optuna") is not None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)  # its warnings of failed trials have tracebacks
    console = Console()
    try:
        show_trials(run_sweep(options.sweep, options.trials, options.overrides, console), console)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return STOPPED_STATUS
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
