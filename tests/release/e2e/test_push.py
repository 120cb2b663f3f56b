"""`run.push`: what a run sends to the hub while it trains and at its end, and what becomes of a push that fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import TOKEN, Hub, environment, serving

from finetune.errors import UserError
from finetune.recipe import load_recipe
from finetune.release.export.push import check_push

REPO = "org/model"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as server:
        yield server


@pytest.fixture
def pushing(recipe: dict[str, Any], write_recipe: Callable[..., Path]) -> Path:
    del recipe["data"]["eval"]
    recipe["run"]["push"] = {"repo": REPO, "base_model": "org/base"}
    recipe["checkpoint"] = {"every_steps": 2, "keep": 1}
    return write_recipe(recipe)


def command(hub: Hub, recipe: Path, *overrides: str) -> dict[str, Any]:
    words = [sys.executable, "-m", "finetune", "train", str(recipe), *overrides]
    return {"args": words, "env": {**os.environ, **environment(hub)}, "text": True}


def run(hub: Hub, recipe: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(**command(hub, recipe, *overrides), capture_output=True, timeout=300)
    assert TOKEN not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.mark.long
def test_a_run_pushes_while_it_trains_and_never_waits(hub: Hub, pushing: Path, tmp_path: Path) -> None:
    """The hub answers no commit until the run has its result. By then the first checkpoint, which is on its way, is
    deleted from the run."""
    hub.may_commit.clear()
    folder = tmp_path / "runs" / "run"
    with subprocess.Popen(**command(hub, pushing), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        status = folder / "status.json"
        while not (status.is_file() and json.loads(status.read_text())["status"] == "finished"):
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000006"]
        hub.may_commit.set()
        out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert f"on the hub: the checkpoint of step 6 and the result, at {hub.url}/{REPO}" in out
    first, second, third = hub.commits
    assert all(name.startswith("checkpoints/step-00000002/") for name in first)
    assert {name.split("/")[0] for name in second + third} >= {"checkpoints", "model.safetensors", "README.md"}
    repo = hub.repos[REPO]
    assert repo["private"]
    there = {name for name in repo["files"] if name.startswith("checkpoints/")}
    kept = {path.relative_to(folder).as_posix() for path in (folder / "checkpoints").rglob("*") if path.is_file()}
    assert there == kept
    assert repo["files"]["model.safetensors"] == (folder / "model" / "model.safetensors").read_bytes()
    assert b"base_model: org/base\nbase_model_relation: finetune\n" in repo["files"]["README.md"]
    assert not (folder / "push.partial").exists()

    shutil.rmtree(folder)  # the machine is gone: what a download of the checkpoint gives
    for name in there:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(repo["files"][name])
    resumed = run(hub, pushing, "train.max_steps=8", "run.push=false")
    assert resumed.returncode == 0, resumed.stderr
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [7, 8]


@pytest.mark.long
def test_a_failed_push_ends_no_run(hub: Hub, pushing: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "run"
    hub.refusals = 10**6
    failed = run(hub, pushing)
    assert failed.returncode == 1
    assert "the last checkpoint is not on the hub: run.push: the hub answers 400" in " ".join(failed.stderr.split())
    assert f"{REPO} on the hub lacks the last checkpoint and the result." in " ".join(failed.stderr.split())
    assert json.loads((folder / "status.json").read_text())["status"] == "finished"
    assert not hub.repos[REPO]["files"]

    hub.refusals = 1  # one more try is enough
    again = run(hub, pushing)
    assert again.returncode == 0, again.stderr
    assert "nothing to do" in again.stdout
    assert f"on the hub: the result, at {hub.url}/{REPO}" in again.stdout
    assert hub.repos[REPO]["files"]["model.safetensors"] == (folder / "model" / "model.safetensors").read_bytes()


@pytest.mark.long
def test_a_run_that_is_stopped_does_not_wait_for_the_hub(hub: Hub, pushing: Path, tmp_path: Path) -> None:
    """A scheduler gives it seconds, and requeues it by its status."""
    hub.may_commit.clear()
    words = command(hub, pushing, "train.max_steps=100000")
    with subprocess.Popen(**words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while REPO not in hub.repos:  # the first checkpoint is on its way
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        process.terminate()
        out, err = process.communicate(timeout=200)
    assert process.returncode == 75, err
    assert f"on the hub: nothing of this launch, at {hub.url}/{REPO}" in out


@pytest.mark.parametrize(
    ("push", "token", "message"),
    [
        (REPO, TOKEN, "is a local path, which means nothing on the hub. Fix: set run.push.base_model"),
        ({"repo": REPO, "base_model": "org/base"}, None, "run.push: no token of the hub. Fix: run `hf auth login`"),
    ],
)
def test_what_can_never_be_pushed_is_refused_before_training(
    push: Any,
    token: str | None,
    message: str,
    recipe: dict[str, Any],
    write_recipe: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe["run"]["push"] = push
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    with pytest.raises(UserError, match=message):
        check_push(load_recipe(write_recipe(recipe)))
