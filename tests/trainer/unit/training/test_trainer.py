"""The loop on one process: the order of a run's events, its ends, accumulation, warm-ups, and steps that fail."""

from __future__ import annotations

import io
import json
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import metrics, train_alone
from rich.console import Console
from support.trainers import prepared_run, ready_trainer, started_engine

from finetune.data.prefetch import fed_steps
from finetune.errors import RunFailure, Stopped
from finetune.recipe import load_recipe
from finetune.tracking.metrics import read_status
from finetune.training.run import train
from finetune.training.signals import StopRequest
from finetune.training.trainer import Line, Trainer

Write = Callable[..., Path]


@pytest.fixture
def path(recipe: dict[str, Any], write_recipe: Write, made: Path) -> Path:
    recipe["data"]["eval"] = [{**recipe["data"]["eval"][0], "limit": 4}]
    return write_recipe(recipe)


@contextmanager
def trainer_of(path: Path, *overrides: str) -> Iterator[Trainer]:
    prepared = prepared_run(str(path), overrides)
    engine = started_engine(prepared)
    try:
        yield ready_trainer(prepared, engine)
    finally:
        engine.close()


def first_steps(trainer: Trainer, count: int) -> list[Line]:
    with fed_steps(trainer.loader, range(count), trainer.engine.device) as feed:
        lines = []
        for batches in trainer.steps(feed):
            lines.append(trainer.train_step(batches)[0])
            if len(lines) == count:
                break
        return lines


def losses(lines: list[Line]) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in lines]


def test_evaluations_and_checkpoints_come_after_their_steps(path: Path) -> None:
    train_alone(path, "evaluate={at_start: true, every_steps: 2}", "checkpoint={every_steps: 3}", "train.max_steps=5")
    run = path.parent / "runs" / "run"
    lines = metrics(run)
    events = [(line["step"], "eval" if "eval_loss" in line else "step") for line in lines]
    assert events == [
        *((0, "eval"), (1, "step"), (2, "step"), (2, "eval"), (3, "step"), (4, "step"), (4, "eval"), (5, "step")),
        (5, "eval"),  # at the end, as the checkpoint
    ]
    assert sorted(folder.name for folder in (run / "checkpoints").glob("step-*")) == ["step-00000003", "step-00000005"]
    steps = [line for line in lines if "loss" in line]
    assert all(math.isfinite(value) for line in steps for value in (line["loss"], line["grad_norm"]))
    assert [line["tokens"] for line in steps] == sorted({line["tokens"] for line in steps})  # a total, which grows
    assert read_status(run) == "finished"
    assert json.loads((run / "plan.json").read_text())["measured"]["steps"] == 4  # without the first
    assert (run / "model" / "config.json").is_file()


def test_the_data_end_a_run_of_epochs(path: Path) -> None:
    """The last step is short: it has the sequences that are left."""
    overrides = ("train={epochs: 1, precision: fp32}", "data.train.0.limit=30", "batch={rows: 3, rows_per_device: 1}")
    overrides += ("checkpoint.every_steps=10",)
    train_alone(path, *overrides)
    run = path.parent / "runs" / "run"
    plan, lines = json.loads((run / "plan.json").read_text()), [line for line in metrics(run) if "loss" in line]
    assert plan["steps"] == math.ceil(plan["total_rows"] / 3) == len(lines)
    assert plan["total_rows"] % 3
    assert lines[-1]["epoch"] == 1.0
    assert lines[-1]["tokens"] == plan["tokens_per_epoch"]
    assert "is finished" in train_alone(path, *overrides)
    assert [line for line in metrics(run) if "loss" in line] == lines


def test_a_stop_saves_after_the_step_and_the_run_continues_as_if_there_was_none(path: Path) -> None:
    train_alone(path, "run.name=whole", "evaluate.every_steps=3")
    stop, overrides = StopRequest(), ("evaluate.every_steps=3",)
    stop.steps_begun = True
    stop.receive(signal.SIGTERM)
    with pytest.raises(Stopped, match="stopped by SIGTERM after step 1 of 6"):
        train(load_recipe(path, overrides), str(path), stop, Console(file=io.StringIO()))
    run = path.parent / "runs" / "run"
    assert read_status(run) == "stopped"
    assert [folder.name for folder in (run / "checkpoints").glob("step-*")] == ["step-00000001"]
    train_alone(path, *overrides)

    def numbers(name: str) -> list[Any]:
        return [[line.get(key) for key in ("step", "loss", "eval_loss")] for line in metrics(run.parent / name)]

    assert numbers("run") == numbers("whole")  # to the last bit


def test_accumulation_does_not_change_a_step(path: Path) -> None:
    of_sizes = []
    for rows in (4, 2, 1):
        with trainer_of(path, f"batch.rows_per_device={rows}") as trainer:
            assert trainer.plan.micro_batches == 4 // rows
            of_sizes.append(losses(first_steps(trainer, 3)))
    for other in of_sizes[1:]:
        assert torch.tensor(other) == pytest.approx(torch.tensor(of_sizes[0]), rel=5e-6)


def test_warm_ups_leave_nothing(
    recipe: dict[str, Any], write_recipe: Write, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout: they must not draw the random numbers of the first step."""
    config = {**tiny.MODELS["llama"], "attention_dropout": 0.2}
    recipe["model"] = {"config": config, "tokenizer": str(made / "llama"), "attention": "eager"}
    recipe["data"]["packing"] = False
    path, measured = write_recipe(recipe), []
    for count in (0, 2):
        with trainer_of(path) as trainer:
            monkeypatch.setattr(type(trainer.engine), "warm_ups", count)
            measured.append(losses(first_steps(trainer, 2)))
    assert measured[0] == measured[1]


def test_a_loss_that_is_not_finite_names_its_rows_and_steps_nothing(path: Path) -> None:
    with trainer_of(path) as trainer:
        parameters = dict(trainer.engine.unwrapped.named_parameters())
        broken = next(value for name, value in parameters.items() if "embed" in name)
        broken.data.fill_(math.nan)
        before = {name: value.detach().clone() for name, value in parameters.items() if value is not broken}
        with pytest.raises(
            RunFailure, match=r"the loss is not finite at step 1\. Nothing was stepped.*rows\.jsonl:\d+"
        ):
            first_steps(trainer, 1)
        assert trainer.state.step == 0
        assert all(torch.equal(parameters[name], value) for name, value in before.items())


def test_the_rate_follows_the_schedule_and_counts_add_up(path: Path) -> None:
    with trainer_of(path, "schedule={name: linear, warmup_steps: 2}", "optimizer.lr=0.01") as trainer:
        lines = first_steps(trainer, 6)
        assert [line["lr"] for line in lines] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01, 0.0075, 0.005, 0.0025])
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
        state = trainer.state
        assert (state.step, state.tokens, state.supervised_tokens) == tuple(
            lines[-1][name] for name in ("step", "tokens", "supervised_tokens")
        )
        assert trainer._is_over
