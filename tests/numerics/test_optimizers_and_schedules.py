"""Schedules by value, optimizers by their published update, every name of both tables."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from finetune.recipe.schema import Optimizer, Schedule
from finetune.training.optim import BUILDERS, SHAPES, build_optimizers, decay_groups, lr_factor


def factors(steps: int, **settings: object) -> list[float]:
    schedule = Schedule.model_validate(settings)
    return [lr_factor(schedule, step, steps) for step in range(steps)]


def test_every_name_of_the_schema_is_in_the_tables() -> None:
    assert set(get_args(Schedule.model_fields["name"].annotation)) == set(SHAPES)
    assert set(get_args(Optimizer.model_fields["name"].annotation)) == set(BUILDERS)


def test_warm_up_is_linear_and_never_zero() -> None:
    assert factors(8, name="constant", warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])


def test_linear_by_its_formula() -> None:
    assert factors(4, name="linear", min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_cosine_by_its_formula() -> None:
    got = factors(10, name="cosine", min_lr_ratio=0.1)
    assert got == pytest.approx([0.1 + 0.45 * (1 + math.cos(math.pi * i / 10)) for i in range(10)])


def test_wsd_is_flat_then_linear() -> None:
    got = factors(10, name="wsd", decay_ratio=0.4)
    assert got == pytest.approx([1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("name", SHAPES)
def test_a_run_of_one_step_trains(name: str) -> None:
    assert lr_factor(Schedule.model_validate({"name": name}), 0, 1) == 1.0


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("warmup", [0, 3])
def test_no_step_stands_still(name: str, warmup: int) -> None:
    assert min(factors(20, name=name, warmup_steps=warmup)) > 0


def test_matrices_decay_vectors_do_not() -> None:
    matrix, vector = torch.zeros(2, 2), torch.zeros(2)
    groups = decay_groups([("w", matrix), ("b", vector)], 0.1)
    assert [(g["params"], g["weight_decay"]) for g in groups] == [([matrix], 0.1), ([vector], 0.0)]
    assert len(decay_groups([("w", matrix)], 0.1)) == 1


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.filterwarnings("ignore:Paged optimizers:UserWarning")  # bitsandbytes: no unified memory without a GPU
def test_each_optimizer_goes_downhill(name: str) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 64))
    bias = torch.nn.Parameter(torch.randn(64))
    optimizers = build_optimizers(Optimizer.model_validate({"name": name, "lr": 0.01}), [("w", weight), ("b", bias)])
    before = (weight.square().sum() + bias.square().sum()).item()
    for _ in range(20):
        (weight.square().sum() + bias.square().sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert (weight.square().sum() + bias.square().sum()).item() < 0.97 * before


def test_adamw_by_the_paper() -> None:
    """Loshchilov & Hutter 2017, algorithm 2, one matrix, three steps."""
    recipe = Optimizer(lr=0.1, weight_decay=0.01, betas=(0.9, 0.95), eps=1e-8)
    weight = torch.nn.Parameter(torch.tensor([[1.0, -2.0]], dtype=torch.float64))
    (optimizer,) = build_optimizers(recipe, [("w", weight)])
    w, m, v = weight.detach().clone(), torch.zeros(1, 2), torch.zeros(1, 2)
    for t in range(1, 4):
        gradient = torch.tensor([[0.5, -t / 2]], dtype=torch.float64)
        weight.grad = gradient.clone()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        w = w * (1 - 0.1 * 0.01) - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
    torch.testing.assert_close(weight.detach(), w)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_the_decay_begins_where_the_warm_up_ends(name) -> None:
    schedule = Schedule(name=name, warmup_steps=4)
    assert lr_factor(schedule, 4, 12) == 1.0
    assert lr_factor(schedule, 8, 12) == pytest.approx(0.5)
