"""The folder of a run beside others: one launch writes it, exports read it while old checkpoints are deleted, and what
is missing of its log is said."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import finetune, metrics, train_alone
from filelock import FileLock

from finetune.checkpoints.folder import describe_checkpoints, list_checkpoints
from finetune.checkpoints.trained import find_trained
from finetune.errors import UserError
from finetune.training.run_lock import RunLock

PATIENCE_S = 120.0


def wait_for(condition: Callable[[], Any]) -> None:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < PATIENCE_S
        time.sleep(0.01)


class Running:
    """A run of a process of its own, which deletes a checkpoint at every step and never ends by itself."""

    def __init__(self, path: Path, folder: Path):
        self.path, self.folder = path, folder
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        wait_for(lambda: len(self.steps()) > 2)

    def _run(self) -> None:
        self.done = finetune("train", self.path)

    def steps(self) -> list[int]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line)["step"] for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def wait(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def taken(folder: Path) -> Iterator[None]:
    """A launch that finds no .lock, where the one that has it does not get to see that."""
    with FileLock(folder / "new"):
        (folder / "new").rename(folder / ".lock")
        yield


@pytest.fixture
def running(recipe: dict[str, Any], write_recipe: Any) -> Iterator[Running]:
    recipe["data"]["eval"] = []
    recipe["train"] |= {"max_steps": 1_000_000}
    recipe["checkpoint"] = {"every_steps": 1, "keep": 1}
    run = Running(write_recipe(recipe), Path(recipe["run"]["dir"]) / "run")
    yield run
    with taken(run.folder):
        run.wait()


def test_readers_and_a_second_launch_beside_a_running_one(running: Running) -> None:
    root = running.folder / "checkpoints"
    # Checkpoints that are read stay, whatever `keep` says, and no longer.
    trained = find_trained(running.folder)
    last = running.steps()[-1]
    wait_for(lambda: running.steps()[-1] > last + 5)
    assert trained.folder in list_checkpoints(root)
    assert len({trained.read(name).shape for name in trained.shapes}) > 2
    assert trained.identity()["checkpoint"] == trained.folder.name
    folder = trained.folder
    del trained
    wait_for(lambda: not folder.exists())

    read: set[Path] = set()
    for _ in range(20):
        trained = find_trained(running.folder)
        read.add(trained.folder)
        assert all(trained.read(name).isfinite().all() for name in trained.shapes)
        assert all(info.problem is None for info in describe_checkpoints(running.folder, verify=True))
        with pytest.raises(UserError, match=r"--step 999: .* has no such checkpoint"):
            find_trained(running.folder, "999")
    assert len(read) > 2

    # The first launch stops when another has the folder, and leaves every file to it.
    with taken(running.folder):
        running.wait()
    status = (running.folder / "status.json").read_text()
    assert json.loads(status)["status"] == "running"
    assert "saved" in train_alone(running.path, "checkpoint.resume=never", "train.max_steps=4")
    assert running.done.returncode == 1, running.done.stderr
    assert "Traceback" not in running.done.stderr
    assert ".lock was removed and another launch (process" in running.done.stderr
    assert [line["step"] for line in metrics(running.folder)] == [1, 2, 3, 4]
    assert json.loads((running.folder / "status.json").read_text())["status"] == "finished"
    assert [info.step for info in describe_checkpoints(running.folder, verify=True) if not info.set_aside] == [4]
    assert not list(root.glob(".*"))


def test_a_lock_that_was_removed_is_locked_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    assert first.acquire() is None
    assert not first.is_lost()
    (tmp_path / ".lock").unlink()
    assert not first.is_lost()
    assert "is locked again" in caplog.text
    (tmp_path / ".lock").unlink()
    assert second.acquire() is None
    assert first.is_lost()
    assert not second.is_lost()
    second.release()  # what it wrote is there
    assert first.is_lost()
    first.release()


@pytest.mark.parametrize(
    ("damage", "missing"),
    [
        (lambda path: path.unlink(), "1 to 4"),
        (lambda path: path.write_bytes(b"\n".join(path.read_bytes().split(b"\n")[:2]) + b"\n"), "3 to 4"),
        (lambda path: path.write_bytes(b'{"step": 2, "loss": 1.0}\n{"step": 4, "loss": 1.0}\n{"st'), "1, 3"),
    ],
    ids=["removed", "cut", "lines of two steps and a half"],
)
def test_what_the_log_lacks_is_said_at_resume(
    recipe: dict[str, Any],
    write_recipe: Any,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], object],
    missing: str,
) -> None:
    recipe["data"]["eval"] = []
    recipe["checkpoint"] = {"every_steps": 2}
    path, run = write_recipe(recipe), Path(recipe["run"]["dir"]) / "run"
    with caplog.at_level(logging.WARNING):
        train_alone(path, "train.max_steps=2")
        train_alone(path, "train.max_steps=4")
    assert "metrics.jsonl" not in caplog.text
    damage(run / "metrics.jsonl")
    with caplog.at_level(logging.WARNING):
        train_alone(path, "train.max_steps=5")
    assert f"metrics.jsonl has no lines of steps {missing}, which" in caplog.text
    assert metrics(run)[-1]["step"] == 5
