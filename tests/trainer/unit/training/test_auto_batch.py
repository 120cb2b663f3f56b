"""`batch.rows_per_device: auto`: the search, the meter, and trials on a real model that leave nothing behind."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import metrics, train_alone
from forks import start_forkserver
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.dataset import Dataset, build_dataset
from finetune.engine.base import Engine
from finetune.engine.launch import Launch
from finetune.engine.start import start_engine
from finetune.errors import UserError
from finetune.models.attention import AttentionChoice, attention_for
from finetune.models.base_model import Base
from finetune.models.config import model_config
from finetune.models.loss_model import CausalLMWithLoss
from finetune.models.parameter_roles import parameter_roles
from finetune.models.weights import load_model
from finetune.objectives import make_objective
from finetune.objectives.forward import ForwardPass
from finetune.recipe import Recipe, load_recipe
from finetune.training.auto_batch import (
    MARGIN,
    HeaviestRow,
    HostMemory,
    RowsPerDevice,
    Trials,
    find_rows,
    largest_that_fits,
    optimizer_bytes,
    rows_by_one,
)
from finetune.training.optim import BUILDERS, build_optimizers
from finetune.utils import divisors

MIB = 2**20

# --- the search


@given(
    constant=st.integers(0, 1000),
    each=st.integers(1, 100),
    limit=st.integers(1, 20000),
    rows=st.integers(1, 200),
    power=st.sampled_from([1, 2]),
)
def test_a_measured_start_is_the_largest_that_fits(constant: int, each: int, limit: int, rows: int, power: int) -> None:
    """Of memory on a straight line or a parabola: nothing that does not fit is tried, but one sequence."""
    tried = []

    def attempt(size: int) -> float:
        tried.append(size)
        return constant + each * size**power

    sizes = divisors(rows)
    found, required = largest_that_fits(sizes, limit, attempt, rows_by_one(attempt, limit, power))
    assert tried == [0, 1, found]
    assert required == attempt(found)
    fitting = [size for size in sizes if constant + each * size**power <= limit]
    assert found == max(fitting, default=1)


@pytest.mark.parametrize(
    ("start", "tried"),
    [(1, [1]), (6, [6]), (7, [6]), (40, [24, 16, 12, 8, 6]), (0, [1])],
    ids=["one", "exact", "between", "too high", "none fits"],
)
def test_memory_that_runs_out_is_stepped_down_from(start: int, tried: list[int]) -> None:
    sizes = []

    def attempt(size: int) -> float:
        sizes.append(size)
        return math.inf if size > 6 else 10.0 * size

    assert largest_that_fits(divisors(48), 100, attempt, start) == (tried[-1], 10 * tried[-1])
    assert sizes == tried


def test_the_smallest_is_taken_if_none_fits() -> None:
    assert largest_that_fits([1, 2, 4], 5, lambda size: 10.0 * size, start=4) == (1, 10)


# --- the meter


def test_the_peak_of_a_process_is_set_back() -> None:
    memory = HostMemory()

    def take(mib: int) -> None:
        torch.ones(mib * MIB, dtype=torch.uint8)

    large, small, none = (memory.peak(partial(take, mib)) for mib in (400, 100, 0))
    assert 390 * MIB < large - none < 440 * MIB
    assert 90 * MIB < small - none < 140 * MIB


def test_a_machine_is_shared_and_some_of_it_kept() -> None:
    alone, of_four = HostMemory().limit, HostMemory(4).limit
    assert of_four < alone
    assert alone < (1 - MARGIN) * 2**50
    assert HostMemory(limit=7).limit == 7


# --- trials

# 64 MiB of activations in a row of 512 tokens, made by little work: wide layers.
WIDE = {**tiny.MODELS["llama"], "hidden_size": 32, "intermediate_size": 4096, "max_position_embeddings": 512}


class Started:
    """A wrapped model on this process."""

    def __init__(self, recipe: Recipe):
        self.recipe, self.config = recipe, model_config(recipe.model)
        self.data: Dataset = build_dataset(recipe, recipe.data.train, Base.of(recipe).renderer(recipe.objective))
        self.engine: Engine = start_engine(recipe, Launch("replicated", 1), self.config)
        self.attention: AttentionChoice = attention_for(recipe, self.config, "cpu")
        model = load_model(recipe, Base.of(recipe, self.config), self.attention, self.engine.placement(recipe))
        self.build = partial(build_optimizers, recipe.optimizer, parameter_roles(model))
        self.forward = ForwardPass(self.attention, make_objective(recipe.objective))
        self.engine.wrap(CausalLMWithLoss(model, recipe.model.cross_entropy), self.build, 1)
        self.said: list[str] = []

    def trials(self) -> Trials:
        row = HeaviestRow(self.data.row(0)[0], *self.data.heaviest_row(self.recipe.data.max_length))
        return Trials(self.engine, HostMemory(), self.forward, row, 8, 0)

    def find(self, limit: int | None = None, estimate: int | None = None) -> RowsPerDevice:
        memory, self.said = HostMemory(limit=limit), []
        return find_rows(
            self.engine,
            self.recipe,
            self.forward,
            self.data,
            memory,
            estimate,
            self.said.append,
        )


@pytest.fixture
def automatic(recipe: dict[str, Any]) -> dict[str, Any]:
    recipe["batch"] = {"rows": 8, "rows_per_device": "auto"}
    return recipe


@pytest.fixture
def started(automatic: dict[str, Any], write_recipe: Any) -> Iterator[Started]:
    found = Started(load_recipe(write_recipe(automatic)))
    yield found
    found.engine.close()


@pytest.fixture
def wide(automatic: dict[str, Any], write_recipe: Any, made: Path) -> Path:
    automatic["model"] = {"config": WIDE, "tokenizer": str(made / "llama")}
    automatic["data"]["max_length"] = 512
    return write_recipe(automatic)


@pytest.mark.long
def test_the_most_rows_that_fit_and_no_trace(wide: Path) -> None:
    """In a process of its own: what earlier tests have freed in this one would be used first, and no trial show it."""
    start_forkserver()
    torch.multiprocessing.start_processes(rows_of_a_wide_model, (wide,), nprocs=1, start_method="forkserver")


def rows_of_a_wide_model(_rank: int, recipe: Path) -> None:
    os.environ.pop("THP_MEM_ALLOC_ENABLE", None)  # unused parts of large pages would count
    wide = Started(load_recipe(recipe))
    engine = wide.engine
    weights = {name: p.detach().clone() for name, p in engine.unwrapped.named_parameters()}
    torch.manual_seed(7)
    drawn = torch.get_rng_state()
    trials = wide.trials()
    trials.begin()
    needs = {rows: trials.attempt(rows) for rows in (0, 1, 2, 4)}
    each = (needs[4] - needs[2]) / 2
    assert 60 * MIB < each < 110 * MIB
    assert needs[1] - needs[0] == pytest.approx(each, rel=0.4)
    engine.drop_gradients()
    state = optimizer_bytes(engine, wide.recipe.optimizer)
    assert state == pytest.approx(8 * sum(p.numel() for p in engine.unwrapped.parameters()), rel=0.01)

    limit = int(needs[4] + 2 * each + state)
    for estimate, sizes in ((None, ["0", "1", "4"]), (8, ["8", "4"])):
        found = wide.find(limit, estimate)
        assert [line.split(":")[0].strip() for line in wide.said[1:]] == sizes
        assert found.rows == int(sizes[-1])
        assert found.reason.startswith(f"auto: the largest up to {estimate or ''}")
    smallest = wide.find(limit=1)
    assert smallest.rows == 1
    assert "the smallest, although it needs" in smallest.reason

    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(p, weights[name]) for name, p in engine.unwrapped.named_parameters())
    assert all(p.grad is None for p in engine.unwrapped.parameters())
    assert [dict(optimizer.state) for optimizer in engine.optimizers] == [{}]
    engine.close()


def test_all_of_a_step_is_the_most(started: Started) -> None:
    for estimate in (None, 100):
        found = started.find(estimate=estimate)
        assert found.rows == 8
        assert found.reason.startswith("auto: all of a step, no accumulation, ")


@pytest.mark.parametrize("name", [name for name in BUILDERS if not name.startswith("paged")])
def test_optimizer_state_is_foreseen(automatic: dict[str, Any], write_recipe: Any, name: str) -> None:
    """In bytes, against a step that is really made."""
    automatic["optimizer"]["name"] = name
    once = Started(load_recipe(write_recipe(automatic)))
    foreseen = optimizer_bytes(once.engine, once.recipe.optimizer)
    for parameter in once.engine.unwrapped.parameters():
        parameter.grad = torch.ones_like(parameter)
    once.engine.step()
    taken = {
        value.data_ptr(): value.nbytes  # 8 bit: tables are shared
        for optimizer in once.engine.optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim
    }
    once.engine.close()
    assert foreseen == pytest.approx(sum(taken.values()), rel=0.01)


def test_the_heaviest_row_is_as_heavy_as_any(started: Started) -> None:
    data = started.data
    rows = [data.rows[i] for i in range(len(data.rows))]
    tokens, supervised = data.heaviest_row(64)
    assert tokens == max(int(data.examples.lengths[row].sum()) for row in rows)
    assert supervised == max(int(data.examples.num_targets[row].sum()) for row in rows)
    batch = HeaviestRow(data.row(0)[0], tokens, supervised).batch(3)
    assert (batch.counts["tokens"], batch.counts["target_tokens"]) == (3 * tokens, 3 * supervised)
    assert batch.sequence_lengths == (tokens,) * 3
    assert HeaviestRow(data.row(0)[0], 1, 1).batch(1).counts["target_tokens"] == 0
    (sequence,) = data.row(0)[0].sequences
    input_ids = batch.inputs["input_ids"]
    assert input_ids[0, : len(sequence.input_ids)].tolist() == sequence.input_ids.tolist()
    assert input_ids.dtype == torch.int64
    assert len(batch.targets.ids) == 3 * supervised


def test_the_heaviest_row_of_pairs_is_made_of_pairs(started: Started) -> None:
    example = started.data.row(0)[0]
    pair = replace(example, sequences=example.sequences * 2, columns={"margin": 1.0})
    batch = HeaviestRow(pair, 20, 11).batch(2)
    assert batch.sequence_lengths == (10,) * 4
    assert (batch.counts["examples"], batch.counts["target_tokens"]) == (2, 20)
    assert batch.columns["margin"].tolist() == [1.0, 1.0]


# --- a run


def test_the_maths_does_not_change(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    recipe["batch"] = {"rows": 8, "rows_per_device": "auto"}
    recipe["train"]["max_steps"] = 3
    path = write_recipe(recipe)
    shown = train_alone(path, "run.name=auto")
    plan = json.loads((tmp_path / "runs" / "auto" / "plan.json").read_text())
    assert (plan["rows_per_device"], plan["micro_batches"]) == (8, 1)
    assert plan["rows_per_device_reason"].startswith("auto: all of a step, no accumulation, ")
    assert f"8 ({plan['rows_per_device_reason']})" in shown
    assert "3 steps x 8 sequences (1 device x 8 per device x 1 accumulation)" in shown
    train_alone(path, "run.name=said", "batch.rows_per_device=8")
    train_alone(path, "run.name=other", "batch.rows_per_device=1")
    found, said, other = (losses(tmp_path / "runs" / name) for name in ("auto", "said", "other"))
    assert found == said  # to the last bit: the trial left nothing
    assert found == pytest.approx(other, rel=2e-6)
    assert len(found) == 4
    plan = json.loads((tmp_path / "runs" / "other" / "plan.json").read_text())
    assert (plan["rows_per_device"], plan["rows_per_device_reason"]) == (1, "asked for in the recipe")


def losses(run: Path) -> list[float]:
    return [line.get("loss", line.get("eval_loss")) for line in metrics(run)]


def test_a_run_resumes_under_auto(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    recipe["checkpoint"] = {"every_steps": 2}
    train_alone(write_recipe(recipe), "train.max_steps=2", "schedule.name=constant")
    shown = train_alone(write_recipe(recipe), "batch.rows_per_device=auto", "schedule.name=constant")
    assert 'changed since then: batch.rows_per_device: 2 -> "auto"' in shown
    assert [line["step"] for line in metrics(tmp_path / "runs" / "run") if "loss" in line] == [1, 2, 3, 4, 5, 6]


def test_a_model_that_drops_is_refused(recipe: dict[str, Any], write_recipe: Any, made: Path) -> None:
    recipe["model"] = {"config": {**tiny.MODELS["llama"], "attention_dropout": 0.1}, "tokenizer": str(made / "llama")}
    with pytest.raises(UserError, match=r"the model's `attention_dropout` is 0\.1\).*Fix: give a number"):
        train_alone(write_recipe(recipe), "batch.rows_per_device=auto")
