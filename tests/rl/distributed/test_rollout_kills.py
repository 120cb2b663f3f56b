"""Runs that sample, killed with SIGKILL while they generate, reward, and train; another config goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import launch, metrics, train_here

STEPS, PROMPTS, SAMPLES = 4, 4, 4
EACH = PROMPTS * SAMPLES  # samples of a step
KILLED_IN = 3  # this step
REPLAYED = 5e-6  # of a loss, as in test_rollouts.py
# Counts its calls, says which process asks, and waits in the `pause`-th call for its end.
REWARDS = """
import os, time
from pathlib import Path

def vowels(completion: str, row: dict) -> float:
    here = Path(__file__).parent
    with (here / "calls").open("a") as file:
        file.write(f"{os.getppid()}\\n")
    calls, pause = len((here / "calls").read_text().split()), here / "pause"
    if pause.exists() and calls == int(pause.read_text()):
        parent = os.getppid()
        (here / "paused").touch()
        while os.getppid() == parent:
            time.sleep(0.01)
    return float(any(letter in "aeiou" for letter in completion))
"""


@pytest.fixture
def online(recipe: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Long samples in small cohorts, and many micro-batches: each part of a step takes longer than the others' ends."""
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    del recipe["data"]["eval"], recipe["evaluate"]
    recipe["data"] |= {"packing": False}
    return recipe | {
        "objective": {"name": "grpo"},
        "rollouts": {"prompts": PROMPTS, "samples": SAMPLES, "max_new_tokens": 40, "cohort": 2, "temperature": 0.8},
        "rewards": [{"file": str(tmp_path / "rewards.py"), "function": "vowels", "processes": 1, "seconds": 120}],
        "batch": {"rows": EACH, "tokens_per_device": 64},
        "train": {"max_steps": STEPS, "precision": "fp32"},
        "checkpoint": {"every_steps": 1, "keep": 10, "asynchronous": False},
    }


def lines_of(run: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"rollouts/step-{step:08d}.jsonl").read_text().splitlines()]


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if "loss" in line]


def kill(path: Path, folder: Path, is_there: Callable[[], bool]) -> None:
    """Starts the run on two processes, and kills both once `is_there`."""
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(launch, "ddp", 2, "train", path)
        while not is_there():
            assert not running.done(), running.result().stderr
            time.sleep(0.001)
        main = psutil.Process(int((folder / "calls").read_text().split()[-1]))
        ranks = main.parent().children()  # type: ignore[union-attr]
        assert len(ranks) == 2
        for rank in ranks:
            rank.kill()
        assert running.result().returncode != 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "config", "processes"), [("generating", "fsdp2", 1), ("rewarding", "zero3", 2), ("training", "fsdp2", 2)]
)
def test_a_killed_run_goes_on_elsewhere_with_the_same_samples_and_curve(
    place: str, config: str, processes: int, online: dict[str, Any], write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    train_here(write_recipe(online))
    whole, run, calls = tmp_path / "runs" / "run", tmp_path / "runs" / "killed", tmp_path / "calls"
    calls.unlink()
    online["run"]["name"] = "killed"
    path, before = write_recipe(online), KILLED_IN - 1
    record = run / f"rollouts/step-{KILLED_IN:08d}.safetensors"
    if place == "rewarding":
        (tmp_path / "pause").write_text(str(before * EACH + EACH // 2))

    def is_there() -> bool:
        if place == "generating":
            return (run / f"checkpoints/step-{before:08d}/state.json").exists()
        return record.exists() if place == "training" else (tmp_path / "paused").exists()

    kill(path, tmp_path, is_there)
    assert [line["step"] for line in steps_of(run)] == [1, 2]
    rewarded = {"generating": before * EACH, "rewarding": before * EACH + EACH // 2, "training": KILLED_IN * EACH}
    assert len(calls.read_text().split()) == rewarded[place]
    assert record.exists() == (place == "training")
    kept = {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in (run / "rollouts").glob("step-*")}
    (tmp_path / "pause").unlink(missing_ok=True)

    done = launch(config, processes, "train", path)
    assert done.returncode == 0, done.stderr
    assert len(calls.read_text().split()) == STEPS * EACH + (EACH // 2 if place == "rewarding" else 0)
    for name, was in kept.items():
        file = run / "rollouts" / name
        assert (file.stat().st_mtime_ns, file.read_bytes()) == was
    assert not list((run / "rollouts").glob("aside-*"))
    for step in range(1, STEPS + 1):
        assert lines_of(run, step) == lines_of(whole, step)
    assert [line["step"] for line in steps_of(run)] == list(range(1, STEPS + 1))
    expected = [line["loss"] for line in steps_of(whole)]
    assert [line["loss"] for line in steps_of(run)] == pytest.approx(expected, rel=REPLAYED, abs=1e-7)
