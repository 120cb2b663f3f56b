"""Rollouts on one process and on several: the same tokens, and the same curve when they are trained on again.

A run that is killed continues with those that it has recorded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import launch, metrics, train_here

from finetune.errors import UserError
from finetune.rollouts.records import read_record, record_file

Write = Callable[..., Path]
STEPS, PROMPTS, SAMPLES = 4, 4, 4
REPLAYED = 5e-6  # of a loss


@pytest.fixture
def online(recipe: dict[str, Any]) -> dict[str, Any]:
    """Vowels are rewarded, which a random model writes now and then."""
    recipe["data"] |= {"packing": False}
    del recipe["data"]["eval"], recipe["evaluate"]
    return recipe | {
        "objective": {"name": "grpo"},
        "rollouts": {"prompts": PROMPTS, "samples": SAMPLES, "max_new_tokens": 6, "cohort": 4, "temperature": 0.8},
        "rewards": [{"name": "regex", "pattern": "[aeiou]"}],
        "batch": {"rows": PROMPTS * SAMPLES, "tokens_per_device": 128},
        "train": {"max_steps": STEPS, "precision": "fp32"},
    }


def curve(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run) if "loss" in line]


def lines_of(run: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record_file(run / "rollouts", step).read_text().splitlines()]


def assert_same_tokens(run: Path, other: Path) -> None:
    for step in range(1, STEPS + 1):
        margin = min(float(sample.margins.min()) for sample in (read_record(run / "rollouts", step) or ([], ""))[0])
        ours, theirs = lines_of(run, step), lines_of(other, step)
        assert ours == theirs, f"step {step}: the nearest tie had a margin of {margin:.2e}"


def assert_same_curve(curve: list[float], other: list[float]) -> None:
    assert len(curve) == len(other) == STEPS
    assert other == pytest.approx(curve, rel=REPLAYED, abs=1e-7)


LORA = {"mode": "lora", "lora": {"rank": 4, "alpha": 8}, "optimizer": {"lr": 5e-3}}
QLORA = {**LORA, "mode": "qlora", "quantization": {"type": "nf4"}, "optimizer": {"lr": 1e-3}}  # see parity.QLORA
MODES: dict[str, dict[str, Any]] = {"full": {}, "lora": LORA, "qlora": QLORA}
DEFAULT = (("ddp", 2, "full"), ("fsdp2", 2, "full"), ("zero3", 2, "full"))
MORE = (
    *((config, 2, "full") for config in ("zero2", "tp", "cp", "ulysses", "ep")),
    *((config, 2, "full") for config in ("fsdp2_offload", "zero2_offload", "zero3_offload")),
    *((config, 4, "full") for config in ("hsdp", "fsdp2_tp", "fsdp2_cp", "ddp", "ep")),
    *((config, 2, "lora") for config in ("ddp", "fsdp2", "zero2", "zero3", "zero3_offload", "tp", "cp", "ulysses")),
    *((config, 2, "qlora") for config in ("ddp", "fsdp2", "zero2", "zero3", "cp", "ulysses")),
    *(("hsdp", 4, mode) for mode in ("lora", "qlora")),
    ("ep", 2, "lora"),
)


@pytest.mark.parametrize(
    ("config", "processes", "mode"),
    [*DEFAULT, *(pytest.param(*place, marks=pytest.mark.long) for place in MORE)],
)
def test_processes_sample_the_same_tokens_and_train_on_them_alike(
    config: str, processes: int, mode: str, online: dict[str, Any], write_recipe: Write, made: Path, tmp_path: Path
) -> None:
    online |= MODES[mode]
    if config == "ep":
        online |= {"model": {"name": str(made / "mixtral")}}
    train_here(write_recipe(online))
    single = tmp_path / "runs" / "run"
    assert len(set(curve(single))) == STEPS  # rewards differ, or nothing would be learnt
    for name, changes in {
        "sampled": {},
        "replayed": {"rollouts": {**online["rollouts"], "replay": str(single / "rollouts")}, "rewards": []},
    }.items():
        online["run"]["name"] = name
        path = write_recipe({**online, **changes}, f"{name}.yaml")
        done = launch(config, processes, "train", path)
        assert done.returncode == 0, done.stderr
        assert_same_curve(curve(single), curve(tmp_path / "runs" / name))
    assert_same_tokens(single, tmp_path / "runs" / "sampled")
    assert not (tmp_path / "runs" / "replayed" / "rollouts").exists()


def test_what_is_decoded_together_changes_no_token(online: dict[str, Any], write_recipe: Write, tmp_path: Path) -> None:
    """Prompts of a cohort are padded to its longest: neither a cohort's size nor the padding is in the noise."""
    train_here(write_recipe(online))
    online["rollouts"]["cohort"], online["run"]["name"] = PROMPTS * SAMPLES, "together"
    train_here(write_recipe(online))
    ours, theirs = (lines_of(tmp_path / "runs" / name, 1) for name in ("run", "together"))
    assert len({line["row"] for line in ours}) == PROMPTS
    assert ours == theirs


def test_recorded_rollouts_are_used_after_a_kill_and_none_of_another_recipe(
    online: dict[str, Any], write_recipe: Write, tmp_path: Path
) -> None:
    """As a kill leaves the folder: in a step, with its rollouts recorded; and while they are being written."""
    path = write_recipe(online | {"checkpoint": {"every_steps": 2}})
    train_here(path)
    run, whole = tmp_path / "runs" / "run", tmp_path / "whole"
    shutil.copytree(run, whole)
    for folder in ("step-00000004",):
        shutil.rmtree(run / "checkpoints" / folder)
    marked = lines_of(run, 3)
    (run / "rollouts" / "step-00000004.safetensors").unlink()  # incomplete
    train_here(path)
    assert curve(run) == curve(whole)
    assert lines_of(run, 3) == marked
    assert_same_tokens(run, whole)
    assert [file.name for file in sorted((run / "rollouts").glob("aside-*"))] == ["aside-0-step-00000004.jsonl"]
    assert "time/generation" not in next(line for line in metrics(run) if line.get("step") == 3)

    shutil.rmtree(run / "checkpoints")
    online["optimizer"]["lr"] = 2e-3
    train_here(write_recipe(online))
    assert lines_of(run, 1) == lines_of(whole, 1)  # of the initial weights, drawn again
    assert lines_of(run, 4) != lines_of(whole, 4)
    assert (run / "rollouts" / "aside-0-step-00000001.jsonl").is_file()


def test_a_replay_that_lacks_a_step_or_has_another_size_is_refused(
    online: dict[str, Any], write_recipe: Write, tmp_path: Path
) -> None:
    train_here(write_recipe(online))
    records = tmp_path / "runs" / "run" / "rollouts"
    online |= {"run": {**online["run"], "name": "again"}, "rewards": []}
    online["rollouts"]["replay"] = str(records)
    longer = write_recipe(online | {"train": {"max_steps": STEPS + 1, "precision": "fp32"}})
    with pytest.raises(UserError, match=r"step-00000005\.jsonl: no such file, and train.max_steps needs 5 steps"):
        train_here(longer)
    smaller = {**online, "batch": {**online["batch"], "rows": 8}, "rollouts": {**online["rollouts"], "prompts": 2}}
    with pytest.raises(UserError, match="has 16 samples, and a step of this recipe 8"):
        train_here(write_recipe(smaller))
