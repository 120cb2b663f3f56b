"""A run stopped by a scheduler: saves, exits with its own status, and resumes as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import ROOT, finetune, metrics

STEPS = 150


@pytest.fixture
def long_recipe(recipe: dict[str, Any]) -> dict[str, Any]:
    recipe["train"]["max_steps"] = STEPS
    recipe["tracking"] = {"samples": True}
    return recipe


def start(command: list[str], run: Path, steps: int = 3) -> subprocess.Popen[str]:
    """Begin a run and return when it has made some steps."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while process.poll() is None and len(steps_of(run)) < steps:
        time.sleep(0.02)
    return process


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def steps_of(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}") and '"loss"' in line]


def samples(run: Path) -> dict[int, list[str]]:
    """Rows of every step, over all ranks."""
    found: dict[int, list[str]] = {}
    for file in (run / "samples").glob("*.jsonl"):
        for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            found.setdefault(line["step"], []).extend(line["rows"])
    return {step: sorted(rows) for step, rows in found.items()}


@pytest.mark.long  # test_resume.py has the same of a run whose last checkpoint is gone
def test_stopped_and_gone_on_is_bitwise_the_run_never_stopped(long_recipe: dict[str, Any], write_recipe: Any) -> None:
    """Stopped by the death of its launcher, which passes no signal on: the run saves and ends by itself."""
    path = write_recipe(long_recipe)
    whole, stopped = (Path(long_recipe["run"]["dir"]) / name for name in ("run", "stopped"))
    assert finetune("train", path).returncode == 0
    config = str(ROOT / "accelerate_configs" / "single.yaml")
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    command = [accelerate, "launch", "--config_file", config, "-m", "finetune", "train", str(path), "run.name=stopped"]
    process = start(command, stopped)
    (trainer,) = psutil.Process(process.pid).children()
    os.kill(process.pid, signal.SIGTERM)
    trainer.wait(120)
    end(process)
    (saved,) = (stopped / "checkpoints").iterdir()
    assert saved.name == f"step-{len(steps_of(stopped)):08d}"
    done = finetune("train", path, "run.name=stopped")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(m["step"], m["loss"]) for m in steps_of(stopped)] == [(m["step"], m["loss"]) for m in steps_of(whole)]
    assert samples(stopped) == samples(whole)
    assert [line["eval_loss"] for line in metrics(stopped) if "eval_loss" in line] == [
        line["eval_loss"] for line in metrics(whole) if "eval_loss" in line
    ]
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (stopped, whole)]
    assert weights[0] == weights[1]


LAUNCH = [sys.executable, "-m", "finetune", "launch", "--num_processes", "2", "--config_file"]


def test_a_signal_to_one_rank_stops_all(long_recipe: dict[str, Any], write_recipe: Any) -> None:
    """By `finetune launch`, which gives schedulers the exit status that accelerate launch loses."""
    stop_one_rank(write_recipe(long_recipe), Path(long_recipe["run"]["dir"]) / "run")


def stop_one_rank(path: Path, run: Path) -> int:
    """Returns the steps that were done."""
    arguments = ["-m", "finetune", "train", str(path)]
    process = start([*LAUNCH, str(ROOT / "accelerate_configs" / "ddp.yaml"), *arguments], run)
    ranks = [p for p in psutil.Process(process.pid).children(recursive=True) if p.environ().get("RANK") == "1"]
    ranks[0].send_signal(signal.SIGUSR1)  # as Slurm sends
    status, output = end(process)
    assert status == 75, output
    done = len(steps_of(run))
    assert f"stopped by SIGUSR1 after step {done} of {STEPS}" in output
    assert json.loads((run / "status.json").read_text()) == {"status": "stopped", "step": done, "steps": STEPS}
    assert json.loads((run / "plan.json").read_text())["measured"]["steps"] == max(1, done - 1)
    return done


@pytest.mark.long
def test_a_stopped_run_goes_on_under_another_backend(long_recipe: dict[str, Any], write_recipe: Any) -> None:
    """By the other form of `finetune launch`."""
    path, run = write_recipe(long_recipe), Path(long_recipe["run"]["dir"]) / "run"
    done = stop_one_rank(path, run)
    process = start([*LAUNCH, str(ROOT / "accelerate_configs" / "fsdp2.yaml"), str(path)], run, done + 2)
    process.send_signal(signal.SIGINT)  # Ctrl-C: to the launcher, which forwards it
    status, output = end(process)
    assert status == 75, output
    assert "Traceback" not in output
    assert output.splitlines()[-1].startswith("stopped by SIGINT after step ")
    assert [line["step"] for line in steps_of(run)] == list(range(1, len(steps_of(run)) + 1))
