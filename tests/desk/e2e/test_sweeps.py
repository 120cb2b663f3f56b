"""Sweeps with real runs: a trial that the pruner gives up, a study that is stopped and continues, W&B's command."""

from __future__ import annotations

import math
import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from conftest import metrics
from optuna.trial import TrialState

from finetune.errors import RunFailure, UserError
from finetune.sweep import read_sweep, run_sweep, run_trial
from finetune.tracking.metrics import read_status

LONG = 100_000  # steps: such a run ends only because it is told to


@pytest.fixture
def sweep(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> Path:
    recipe["evaluate"]["every_steps"] = 2
    recipe["run"]["name"] = "lr-{optimizer.lr}"
    path = tmp_path / "sweep.yaml"
    values = {
        "recipe": str(write_recipe(recipe)),
        "metric": "eval_loss",
        "parameters": {"optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True}, "batch.rows": [2, 4]},
    }
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


@pytest.mark.long
def test_a_trial_that_the_pruner_gives_up_saves_and_ends(sweep: Path, tmp_path: Path) -> None:
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=0.0))  # no loss is good enough
    study.optimize(lambda trial: run_trial(read_sweep(sweep, f"train.max_steps={LONG}"), trial), n_trials=1)
    (trial,) = study.trials
    run = tmp_path / "runs" / f"lr-{float(format(trial.params['optimizer.lr'], '.4g'))}-0"
    assert trial.state == TrialState.PRUNED
    assert read_status(run) == "stopped"
    assert list((run / "checkpoints").iterdir())
    measured = {line["step"]: line["eval_loss"] for line in metrics(run) if "eval_loss" in line}
    assert trial.intermediate_values.items() <= measured.items()
    other, named = optuna.create_study(), read_sweep(sweep, f"run.name={run.name.removesuffix('-0')}")
    with pytest.raises(UserError, match="is of an earlier study"):
        other.optimize(lambda again: run_trial(named, again), n_trials=1)


@pytest.mark.long
def test_a_study_is_stopped_and_continues(sweep: Path, tmp_path: Path) -> None:
    """Of six trials one is stopped by SIGTERM and resumes, and one fails, which ends no other."""
    command = [sys.executable, "-m", "finetune.sweep", str(sweep), "--trials", "5", "train.max_steps=40"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    runs = tmp_path / "runs"
    while process.poll() is None and not any("loss" in path.read_text() for path in runs.glob("*/metrics.jsonl")):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    errors = process.communicate()[1]
    assert process.returncode == 75, errors
    assert "stopped; the same command continues" in errors
    (first,) = (path.parent for path in runs.glob("*/metrics.jsonl"))
    assert read_status(first) == "stopped"

    done = subprocess.run(command, capture_output=True, text=True, check=True)
    study = run_sweep(sweep, 5, ["train.max_steps=40"])  # has them all: nothing is launched
    states = [trial.state for trial in study.trials]
    assert states[0] == TrialState.FAIL  # told when it was stopped
    assert len(states) == 6
    assert set(states[1:]) <= {TrialState.COMPLETE, TrialState.PRUNED}
    assert study.trials[1].user_attrs == study.trials[0].user_attrs == {"run": first.name}
    assert [line["step"] for line in metrics(first) if "loss" in line] == list(range(1, 41))
    for trial in study.trials[1:]:
        values = [line["eval_loss"] for line in metrics(runs / trial.user_attrs["run"]) if "eval_loss" in line]
        if trial.state == TrialState.COMPLETE:
            assert trial.value == min(values)
    (table,) = (part for part in done.stdout.split("last step") if "complete" in part and "with" not in part)
    assert table.splitlines()[1].split()[:2] == [str(study.best_trial.number), "complete"]


@pytest.mark.long
def test_a_run_that_fails_ends_no_study(sweep: Path, tmp_path: Path) -> None:
    values = yaml.safe_load(sweep.read_text())
    values["parameters"] = {"optimizer.lr": [1e-3, 1e30]}  # with the second one the loss is not finite
    values["overrides"] = ["optimizer={name: sgd}"]
    sweep.write_text(yaml.safe_dump(values), encoding="utf-8")
    study = optuna.create_study(sampler=optuna.samplers.GridSampler(values["parameters"], seed=0))
    study.optimize(lambda trial: run_trial(read_sweep(sweep), trial), n_trials=2, catch=RunFailure)
    assert {trial.params["optimizer.lr"]: trial.state for trial in study.trials} == {
        1e-3: TrialState.COMPLETE,
        1e30: TrialState.FAIL,
    }
    assert math.isfinite(study.best_value)
    (error,) = [trial.user_attrs["error"] for trial in study.trials if "error" in trial.user_attrs]
    assert "the run ended with status 1: the loss is not finite" in error


@pytest.mark.long
def test_wandbs_agent_starts_a_run_and_stops_it(
    recipe: dict[str, Any], write_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does at its server's commands; the server's part, the search, runs nowhere else."""
    from wandb.wandb_agent import Agent

    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep123")
    monkeypatch.setenv("WANDB_RUN_ID", "")  # the agent sets both in os.environ: restored after the test
    monkeypatch.setenv("WANDB_SWEEP_PARAM_PATH", "")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    agent = Agent(None, multiprocessing.Queue(), sweep_id="sweep123")
    words = ["-m", "finetune", "launch", str(write_recipe(recipe)), "tracking.wandb=true", f"train.max_steps={LONG}"]
    # W&B has no public way to start a run without its server: these two are what its commands "run" and "stop" become.
    agent._sweep_command = [sys.executable, *words, "${args_no_hyphens}"]
    chosen = {"optimizer.lr": {"value": 0.002}}
    agent._command_run({"run_id": "agentrun", "program": "finetune", "args": chosen})
    (process,) = agent._run_processes.values()
    run = tmp_path / "runs" / "run"
    while process.poll() is None and len(metrics(run) if (run / "metrics.jsonl").exists() else []) < 3:
        time.sleep(0.1)
    agent._command_stop({"run_id": "agentrun"})
    while process.poll() is None:
        time.sleep(0.1)
    assert process.poll() == 75
    assert read_status(run) == "stopped"
    assert metrics(run)[1]["lr"] > 0
    assert [folder.name.rpartition("-")[2] for folder in (run / "wandb").glob("offline-run-*")] == ["agentrun"]
