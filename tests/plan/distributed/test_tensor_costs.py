"""What the formulas say that tensor ranks send and hold, against ranks that do."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import forks
import pytest
import tiny
from repository import ROOT

from finetune.engine.costs.common import all_reduce, one_way
from finetune.engine.launch import read_config_file
from finetune.models.base_model import Base
from finetune.plan.shapes import costs_at, shapes_of
from finetune.plan.speed import Shape
from finetune.recipe import load_recipe

WORKER = ROOT / "tests/trainer/distributed/tensor_worker.py"
LAYERS, HIDDEN, TOKENS, TARGETS = 2, 64, 47, 46  # of the worker


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("tensor")
    done = forks.torchrun(4, WORKER, out)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((out / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(4)]


@pytest.mark.long
@pytest.mark.parametrize(("case", "splits"), [("llama", True), ("llama whole", False)])
def test_the_formula_says_what_is_sent(
    ranks: list[dict[str, Any]], recipe: dict[str, Any], write_recipe: Callable[..., Path], case: str, splits: bool
) -> None:
    loaded = load_recipe(write_recipe(recipe), ["train.activation_checkpointing=false"])
    config, launch = Base.of(loaded).config, read_config_file(str(ROOT / "accelerate_configs" / "tp.yaml"), 2)
    costs = costs_at(loaded, config, launch, "cpu")
    assert costs.shapes.splits_tokens
    if not splits:
        weights = tuple(replace(weight, partial=False) for weight in costs.shapes.weights)
        costs = replace(costs, shapes=replace(costs.shapes, weights=weights, splits_tokens=False))
    model = Shape.of(shapes_of(loaded, config).weights, loaded, config, on_cpu=True, recomputes=False)
    predicted = costs.transfers_of_rows(model, 1, TOKENS, TARGETS)
    kinds = {"all_gather_into_tensor": "all-gather", "reduce_scatter_tensor": "reduce-scatter"}
    # After the backward gradients of the norms are added up.
    norms = 4 * HIDDEN * 2 * LAYERS if splits else 0
    moved, times = defaultdict(float, {"all-reduce": all_reduce(2, norms)}), Counter({"all-reduce": splits})
    for name, elements in ranks[0][case]["sent"]:
        if elements > 2 * TARGETS:  # not the numbers of each target
            kind = kinds.get(name, "all-reduce")
            moved[kind] += 4 * (one_way if name in kinds else all_reduce)(2, elements)
            times[kind] += 1
    formula = defaultdict[str, float](float)
    for one in predicted:
        formula[one.kind] += one.moved
        times[one.kind] -= one.collectives
    assert moved == pytest.approx(dict(formula), rel=1 / TOKENS)  # of 48 tokens where ranks send equally much
    assert set(times.values()) == {0}


def test_a_plan_knows_the_experts_of_a_rank(
    recipe: dict[str, Any], write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    loaded = load_recipe(write_recipe(recipe), [f"model.name={tiny.save_model(tmp_path, 'mixtral')}"])
    ours, all_of_them = (shapes_of(loaded, Base.of(loaded).config, size).weights for size in (2, 1))
    experts = [(one, whole) for one, whole in zip(ours, all_of_them, strict=True) if whole.expert]
    assert [one.shape for one, _ in experts] == [(4, *whole.shape[1:]) for _, whole in experts]
    assert {(one.expert, one.parts) for one, _ in experts} == {(True, 2)}
