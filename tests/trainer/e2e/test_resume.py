"""Stop and resume through the command line: same samples, same losses, one line per step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import finetune, launch, metrics, train_alone


@pytest.fixture
def checkpointed(recipe: dict[str, Any]) -> dict[str, Any]:
    recipe["train"]["max_steps"] = 6
    recipe["checkpoint"] = {"every_steps": 2, "keep": 2}
    return recipe


def run_folder(recipe: dict[str, Any]) -> Path:
    return Path(recipe["run"]["dir"]) / recipe["run"]["name"]


def forget(run: Path, *steps: int) -> None:
    for step in steps:
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")


def test_resumed_on_one_process_is_bitwise_the_run_never_stopped(
    checkpointed: dict[str, Any], write_recipe: Any
) -> None:
    path, run = write_recipe(checkpointed), run_folder(checkpointed)
    assert finetune("train", path).returncode == 0
    whole = metrics(run)
    weights = (run / "model" / "model.safetensors").read_bytes()
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
    forget(run, 6)
    done = finetune("train", path)
    assert done.returncode == 0, done.stderr
    assert "step 4 of 6" in done.stdout
    losses = [[(line["step"], line["loss"]) for line in lines if "loss" in line] for lines in (whole, metrics(run))]
    assert losses[0] == losses[1]
    assert (run / "model" / "model.safetensors").read_bytes() == weights


def test_a_damaged_checkpoint_is_skipped_with_its_reason(checkpointed: dict[str, Any], write_recipe: Any) -> None:
    path, run = write_recipe(checkpointed), run_folder(checkpointed)
    train_alone(path)
    shard = run / "checkpoints" / "step-00000006" / "rank-00000-of-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    done = finetune("train", path)
    assert done.returncode == 0, done.stderr
    assert "skipping checkpoint" in done.stderr
    assert "checksum differs" in done.stderr
    assert "step 4 of 6" in done.stdout


def test_what_may_not_change_on_resume(checkpointed: dict[str, Any], write_recipe: Any) -> None:
    path = write_recipe(checkpointed)
    train_alone(path)
    done = finetune("train", path, "data.max_length=48", "run.seed=7", "optimizer.lr=1e-4")
    assert done.returncode == 2
    assert "data.max_length: 64 -> 48" in done.stderr
    assert "run.seed: 42 -> 7" in done.stderr
    assert "optimizer.lr" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_longer_run_resumes_and_never_starts_over(checkpointed: dict[str, Any], write_recipe: Any) -> None:
    path, run = write_recipe(checkpointed), run_folder(checkpointed)
    train_alone(path)
    said = train_alone(path, "train.max_steps=8")
    lines = [line for line in metrics(run) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 9))
    rates = " had ".join(f"{lines[i]['lr']:.3g}" for i in (6, 5)).replace(" had", ", step 6 had")
    assert f"not of 6: step 7 has a learning rate of {rates}\n" in said
    assert lines[6]["lr"] > lines[5]["lr"]
    train_alone(path, "checkpoint.resume=never")
    assert [line["step"] for line in metrics(run) if "loss" in line] == list(range(1, 7))


def test_two_processes_go_on_with_one_process_s_run(checkpointed: dict[str, Any], write_recipe: Any) -> None:
    path, run = write_recipe(checkpointed), run_folder(checkpointed)
    train_alone(path)
    whole = [line["loss"] for line in metrics(run) if "loss" in line]
    forget(run, 6)
    done = launch("fsdp2", 2, "train", path)
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "plan.json").read_text())["world_size"] == 2
    assert [line["loss"] for line in metrics(run) if "loss" in line] == pytest.approx(whole, rel=5e-6)
