"""`train.stop_when`: a run ends where evaluations no longer improve, at the same step however often it was stopped."""

from __future__ import annotations

import io
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import launch, metrics, train_alone
from rich.console import Console
from safetensors.torch import load_file

from finetune.errors import Stopped, UserError
from finetune.recipe import load_recipe
from finetune.tracking.metrics import read_status
from finetune.training.run import train
from finetune.training.signals import StopRequest

STEPS = 12
RUINOUS = 0.3  # a rate with which the loss gets worse after a step or two


@pytest.fixture
def stopping(recipe: dict[str, Any]) -> dict[str, Any]:
    recipe["evaluate"]["every_steps"] = 1
    recipe["schedule"] = {"name": "constant"}
    recipe["optimizer"]["lr"] = RUINOUS
    recipe["train"] |= {"max_steps": STEPS, "stop_when": {"metric": "eval_loss", "patience": 3}}
    recipe["train"].pop("epochs", None)
    recipe["checkpoint"] = {"every_steps": 1, "keep": 2}
    return recipe


def last_step(losses: dict[int, float], patience: int) -> int:
    """Returns the first step after which the best evaluation is `patience` evaluations ago."""
    for step in losses:
        until = [losses[s] for s in losses if s <= step]
        if len(until) - 1 - until.index(min(until)) == patience:
            return step
    return STEPS


def evaluations(run: Path) -> dict[int, float]:
    return {line["step"]: line["eval_loss"] for line in metrics(run) if "eval_loss" in line}


def test_a_run_ends_early_and_is_finished(stopping: dict[str, Any], write_recipe: Any) -> None:
    path, run = write_recipe(stopping), Path(stopping["run"]["dir"]) / "run"
    train_alone(path, "train.stop_when=null")
    everything = evaluations(run)
    expected = last_step(everything, patience=3)
    assert expected < STEPS, everything

    output = train_alone(path, "run.name=early")
    early = run.parent / "early"
    assert evaluations(early) == {step: loss for step, loss in everything.items() if step <= expected}
    assert read_status(early) == "finished"
    assert (early / "model" / "model.safetensors").exists()
    assert sorted(p.name for p in (early / "checkpoints").iterdir())[-1] == f"step-{expected:08d}"
    assert f"stopped early after step {expected} of {STEPS}: no eval_loss better than" in output

    lines = metrics(early)
    train_alone(path, "run.name=early")  # the same command again trains nothing
    assert metrics(early) == lines


def test_patience_is_counted_across_a_resume(stopping: dict[str, Any], write_recipe: Any) -> None:
    path, run = write_recipe(stopping), Path(stopping["run"]["dir"]) / "run"
    train_alone(path)
    at_once = metrics(run)
    train_alone(path, "run.name=parts", "train.max_steps=2")
    train_alone(path, "run.name=parts")
    assert [line["step"] for line in metrics(run.parent / "parts")] == [line["step"] for line in at_once]


def test_a_stop_before_an_evaluation_loses_nothing_of_it(stopping: dict[str, Any], write_recipe: Any) -> None:
    """Evaluated by the next launch: it counts for patience, best checkpoint and result as in a run without a stop."""
    stopping["train"] |= {"result": "best"}
    stopping["train"]["stop_when"]["patience"] = 2
    stopping["checkpoint"] = {"best": "eval_loss", "keep": 1}
    path, runs = write_recipe(stopping), Path(stopping["run"]["dir"])
    train_alone(path)
    expected = evaluations(runs / "run")
    while read_status(runs / "parts") != "finished":
        stop = StopRequest()
        stop.steps_begun = True
        stop.receive(signal.SIGTERM)  # after the first step of each launch
        try:
            train(load_recipe(path, ["run.name=parts"]), str(path), stop, Console(file=io.StringIO()))
        except Stopped:
            assert read_status(runs / "parts") == "stopped"
    assert evaluations(runs / "parts") == expected
    result, at_once = (load_file(runs / name / "model" / "model.safetensors") for name in ("parts", "run"))
    assert all(torch.equal(result[name], at_once[name]) for name in at_once)


def test_a_metric_that_no_evaluation_measures(stopping: dict[str, Any], write_recipe: Any) -> None:
    path = write_recipe(stopping)
    with pytest.raises(UserError, match=r"train\.stop_when: this run's evaluations do not measure 'exact_match'"):
        train_alone(path, "train.stop_when.metric=exact_match")


@pytest.mark.parametrize(("config", "processes"), [("single", 1), pytest.param("tp", 2, marks=pytest.mark.long)])
def test_a_run_on_pairs_ends_at_the_same_step_on_every_config(
    recipe: dict[str, Any], write_recipe: Any, tmp_path: Path, config: str, processes: int
) -> None:
    """At a rate that moves no reward by more than rounding, which would tell pairs apart otherwise on each."""
    tiny.write_rows(tmp_path / "pairs.jsonl", tiny.preferences(40))
    pairs = [{"path": str(tmp_path / "pairs.jsonl"), "format": "preference"}]
    recipe["data"] |= {"train": pairs, "eval": pairs, "max_length": 128}
    recipe |= {"objective": {"name": "dpo"}, "optimizer": {"lr": 1e-9}}
    recipe["evaluate"] = {"every_steps": 1}
    recipe["train"]["stop_when"] = {"metric": "eval_rewards/accuracy", "patience": 2}
    recipe["checkpoint"] = {"best": "eval_rewards/accuracy"}
    done = launch(config, processes, "train", write_recipe(recipe))
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "run"
    assert [line["eval_rewards/accuracy"] for line in metrics(run) if "eval_loss" in line] == [0.5] * 3
    assert [line["rewards/accuracy"] for line in metrics(run) if "loss" in line] == [0.5] * 2
    assert "stopped early after step 2 of 6" in done.stdout
