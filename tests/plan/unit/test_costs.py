"""What each backend says that it sends, against what a benchmark has counted on the network."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from transformers import AutoConfig

from finetune.engine.costs.common import all_reduce, one_way
from finetune.engine.launch import read_config_file
from finetune.plan.shapes import costs_at, shapes_of
from finetune.plan.speed import Shape
from finetune.recipe import load_recipe

MEASURED = json.loads(Path(__file__).with_name("measured_communication.json").read_text(encoding="utf-8"))
CELLS = [cell for cell in MEASURED["cells"] if cell["processes"] > 1]


def test_collectives() -> None:
    assert [all_reduce(n, 8.0) for n in (1, 2, 4)] == [0.0, 8.0, 12.0]
    assert [one_way(n, 8.0) for n in (1, 2, 4)] == [0.0, 4.0, 6.0]


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("communication")


@pytest.mark.parametrize("cell", CELLS, ids=[f"{c['model']} {c['config']} x{c['processes']}" for c in CELLS])
def test_bytes_sent_are_those_that_were_counted(cell: dict[str, Any], benchmark: Any, tmp_path: Path) -> None:
    config = AutoConfig.for_model(**MEASURED["models"][cell["model"]])
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(benchmark.recipe_of("model", tmp_path)), encoding="utf-8")
    recipe, processes = load_recipe(tmp_path / "recipe.yaml", []), cell["processes"]
    launch = read_config_file(str(benchmark.config_of(tmp_path, cell["config"], processes)), processes)
    costs = costs_at(recipe, config, launch, "cpu")
    model = Shape.of(shapes_of(recipe, config).weights, recipe, config, on_cpu=True, recomputes=False)
    assert cell["sent"] == pytest.approx(benchmark.predicted(costs, model)[1], rel=0.03)


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_the_ends_of_a_pipeline_add_up_the_gradient_of_the_matrix_they_share(
    mode: str, benchmark: Any, tmp_path: Path
) -> None:
    """Once a step, if it trains: `Pipeline.sum_ends`."""
    config = AutoConfig.for_model(**{**MEASURED["models"]["dense"], "tie_word_embeddings": True})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(benchmark.recipe_of("model", tmp_path)), encoding="utf-8")
    recipe = load_recipe(tmp_path / "recipe.yaml", ["mode=lora", "lora={rank: 4}"] if mode == "lora" else [])
    launch = read_config_file(str(ROOT / "accelerate_configs" / "pp.yaml"), 2)
    costs = costs_at(recipe, config, launch, "cpu")
    model = Shape.of(shapes_of(recipe, config).weights, recipe, config, on_cpu=True, recomputes=False)
    reduced = [one for one in costs.transfers_of_rows(model, 4, 512, 512) if one.kind == "all-reduce"]
    shared = 4 * config.vocab_size * config.hidden_size
    assert sum(one.moved for one in reduced) == (all_reduce(2, shared) if mode == "full" else 0)


@pytest.mark.parametrize(
    ("config", "mode", "summed"),
    [
        ("cp", "full", r"layers.*(proj|experts)"),
        ("ulysses", "lora", r"lora_"),
        # Of a column parallel matrix each rank has the rows of B, of a row parallel one its tokens.
        ("tp", "lora", r"(q|k|v|gate|up)_proj\.lora_A|(o|down)_proj\.lora_B"),
        ("tp", "full", r"nothing"),
        ("fsdp2", "full", r"nothing"),
    ],
)
def test_fp16_adds_up_gradients_of_which_ranks_have_parts(
    config: str, mode: str, summed: str, benchmark: Any, tmp_path: Path
) -> None:
    """In 16 bits, for each micro-batch: `engine/overflow.py`."""
    shape = AutoConfig.for_model(**MEASURED["models"]["dense"])
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(benchmark.recipe_of("model", tmp_path)), encoding="utf-8")
    launch = read_config_file(str(ROOT / "accelerate_configs" / f"{config}.yaml"), 2)
    moved: dict[str, float] = {}
    for precision in ("bf16", "fp16"):
        overrides = [f"train.precision={precision}", *(["mode=lora", "lora={rank: 4}"] if mode == "lora" else [])]
        recipe = load_recipe(tmp_path / "recipe.yaml", overrides)
        costs = costs_at(recipe, shape, launch, "cpu")
        weights = shapes_of(recipe, shape).weights
        model = Shape.of(weights, recipe, shape, on_cpu=True, recomputes=False)
        reduced = [one for one in costs.transfers_of_rows(model, 4, 512, 512) if one.kind == "all-reduce"]
        moved[precision] = sum(one.moved for one in reduced)
        size = 2 * sum(w.numel for w in weights if w.trains and re.search(summed, w.name) and len(w.shape) > 1)
    assert moved["fp16"] - moved["bf16"] == 4 * all_reduce(2, size)
    assert (size > 0) == (summed != "nothing")
