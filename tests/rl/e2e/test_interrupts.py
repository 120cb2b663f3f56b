"""Ctrl-C during a slow part of a run: answered while that part goes on, obeyed after it, and at once the second time.

A reward that waits for a file makes a step, or an evaluation, as slow as the test needs.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny
from conftest import ROOT

from finetune.training.signals import ECHO_S

REWARD = """
import time
from pathlib import Path
HERE = Path(__file__).parent

def waits(messages):
    part = "evaluation" if "held" in messages[-1]["content"] else "step"
    (HERE / f"{part}-began").touch()
    while not (HERE / f"{part}-may-end").exists():
        time.sleep(0.02)
    return 0.0
"""
ANSWER = "SIGINT received: the run saves and stops at the end of this step"
AGAIN = "SIGINT received again: the run ends now, without saving"
TRAIN = ("train",)
ONE, TWO = (
    ("launch", "--config-file", str(ROOT / "accelerate_configs" / f"{name}.yaml")) for name in ("single", "ddp")
)


@pytest.fixture
def slow(recipe: dict[str, Any], write_recipe: Callable[..., Path], tmp_path: Path) -> Path:
    """A recipe whose first step waits for a file."""
    (tmp_path / "rewards.py").write_text(REWARD, encoding="utf-8")
    for name in ("train", "held"):
        turns = [
            ({"role": "user", "content": f"{name} {i}"}, {"role": "assistant", "content": "yes"}) for i in range(8)
        ]
        rows = [{"messages": [*two]} for two in turns]
        tiny.write_rows(tmp_path / f"{name}.jsonl", rows)
    recipe["data"] |= {
        "train": [{"path": str(tmp_path / "train.jsonl"), "format": "messages"}],
        "eval": [{"path": str(tmp_path / "held.jsonl"), "format": "messages"}],
        "packing": False,
    }
    recipe |= {
        "objective": {"name": "grpo"},
        "rollouts": {"prompts": 2, "samples": 4, "max_new_tokens": 4},
        "rewards": [{"file": str(tmp_path / "rewards.py"), "function": "waits", "seconds": 600}],
        "batch": {"rows": 8, "rows_per_device": 2},
        "evaluate": {"at_start": False, "every_steps": 1, "prompts": 2},
    }
    return write_recipe(recipe)


@contextlib.contextmanager
def running(path: Path, command: tuple[str, ...]) -> Iterator[subprocess.Popen[str]]:
    """A run whose first step has begun; ended with all its processes."""
    words = [sys.executable, "-m", "finetune", *command, str(path)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(path.with_name("step-began"), process)
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.communicate()


def wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    while not file.exists():
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.02)


def read_to(process: subprocess.Popen[str], text: str) -> None:
    """Reads standard error up to a line that begins so."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(text):
            return
    raise AssertionError(f"the run has ended without a line {text!r}")


def status(path: Path) -> dict[str, Any]:
    return json.loads((path.parent / "runs" / "run" / "status.json").read_text(encoding="utf-8"))


@pytest.mark.long
@pytest.mark.parametrize(
    "command", [pytest.param(TRAIN, marks=pytest.mark.long), ONE, pytest.param(TWO, marks=pytest.mark.long)]
)
def test_an_interrupt_is_answered_during_the_step_and_saves_after_it(slow: Path, command: tuple[str, ...]) -> None:
    with running(slow, command) as process:
        process.send_signal(signal.SIGINT)
        read_to(process, ANSWER)
        assert not slow.with_name("step-may-end").exists()  # the step goes on
        assert process.poll() is None
        slow.with_name("step-may-end").touch()
        slow.with_name("evaluation-may-end").touch()
        _, output = process.communicate(timeout=300)
        assert process.returncode == 75
        assert "received" not in output  # it was said once
        assert "stopped by SIGINT after step 1 of 6" in output
        assert status(slow) == {"status": "stopped", "step": 1, "steps": 6}


@pytest.mark.long
@pytest.mark.parametrize("command", [TRAIN, ONE, TWO])
def test_a_second_interrupt_ends_the_step(slow: Path, command: tuple[str, ...]) -> None:
    with running(slow, command) as process:
        process.send_signal(signal.SIGINT)
        read_to(process, ANSWER)
        time.sleep(1.5 * ECHO_S)
        process.send_signal(signal.SIGINT)
        read_to(process, AGAIN)
        assert process.wait(300) == 128 + signal.SIGINT  # the step never ended
        assert status(slow)["status"] == "running"  # nobody was left to write another


@pytest.mark.long
def test_a_second_interrupt_ends_a_process_that_stands_still(slow: Path) -> None:
    """As one in a call that never returns to Python."""
    with running(slow, ONE) as process:
        (launcher,) = psutil.Process(process.pid).children()
        (rank,) = launcher.children()
        rank.suspend()
        process.send_signal(signal.SIGINT)
        read_to(process, ANSWER)
        time.sleep(1.5 * ECHO_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 128 + signal.SIGINT
        psutil.wait_procs([rank], timeout=300)
        assert not rank.is_running()


@pytest.mark.long
def test_an_interrupt_during_an_evaluation_makes_no_other_step(slow: Path) -> None:
    slow.with_name("step-may-end").touch()
    with running(slow, TRAIN) as process:
        wait_for(slow.with_name("evaluation-began"), process)
        process.send_signal(signal.SIGINT)
        read_to(process, ANSWER)
        slow.with_name("evaluation-may-end").touch()
        _, output = process.communicate(timeout=300)
        assert process.returncode == 75
        assert "stopped by SIGINT after step 1 of 6" in output


@pytest.mark.long
@pytest.mark.parametrize("command", [ONE, TWO])
def test_ranks_end_with_a_launcher_that_was_killed(slow: Path, command: tuple[str, ...]) -> None:
    """They finish the step, save, and stop: nobody would wait for them."""
    with running(slow, command) as process:
        (launcher,) = psutil.Process(process.pid).children()
        ranks = launcher.children()
        process.kill()
        read_to(process, "the launcher of this run has ended: the run saves and stops at the end of this step")
        slow.with_name("step-may-end").touch()
        slow.with_name("evaluation-may-end").touch()
        _, alive = psutil.wait_procs([launcher, *ranks], timeout=300)
        assert not alive
        assert status(slow) == {"status": "stopped", "step": 1, "steps": 6}
