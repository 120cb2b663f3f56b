"""The plan compared with published runs: network cards, shares of a card's speed, and the page of them."""

from __future__ import annotations

import importlib
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from finetune.engine.costs.common import Transfer
from finetune.engine.hardware import shipped_hardware
from finetune.features import load_recipe
from finetune.models.base_model import Base
from finetune.plan.command import PlanOptions, ask
from finetune.plan.finished_runs import speeds_here
from finetune.plan.micro_batch import HeaviestBatch, How
from finetune.plan.search import evaluate, launches
from finetune.plan.tables import parse_machines, read_prices
from finetune.plan.timeline import timeline_of


@pytest.fixture(scope="module")
def runs() -> Any:
    sys.path.append(str(ROOT / "scripts" / "planner"))
    return importlib.import_module("published_runs")


def test_a_collective_of_all_devices_uses_every_network_card() -> None:
    links = shipped_hardware().links
    alone, eight = links["infiniband"].between_machines(8, 1), links["infiniband"].between_machines(8, 8)
    assert (alone, eight) == (50 * 0.8, 8 * 50 * 0.8)
    assert links["ethernet"].between_machines(8, 8) == pytest.approx(3.1 * 0.7)  # a card for the machine
    assert links["ethernet"].between_machines(8, 1) == pytest.approx(3.1 * 0.7 / 8)
    assert Transfer("all-gather", 1.0, 1, 64).members(8) == 8
    assert Transfer("all-reduce", 1.0, 1, 64, stride=8).members(8) == 1  # of a shard, by HSDP
    assert Transfer("all-gather", 1.0, 1, 64, stride=2).members(8) == 4  # beside tensor parallelism
    assert Transfer("all-to-all", 1.0, 1, 64).members(8) == 1


def test_several_machines_are_planned_as_fast_as_published(runs: Any) -> None:
    named = [one for one in runs.published()["runs"] if one["name"] == "llm-foundry 13B, 64 GPUs"]
    one = runs.planned(named[0])
    assert abs(one.error()) < 0.3
    hardware = one.job.hardware
    card = hardware.links["infiniband"].model_copy(update={"nics": 1})
    alone = hardware.model_copy(update={"links": hardware.links | {"infiniband": card}})
    assert replace(one, job=replace(one.job, hardware=alone)).error() < -0.5  # by one card a machine


def test_8b_on_64_h100_is_as_fast_sharded_within_machines_as_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    path = ROOT / "recipes" / "llama3.1-8b" / "full.yaml"
    machines = parse_machines("8xH100-80", 8, shipped_hardware())
    recipe = load_recipe(path, ["batch.rows=128"])
    request = ask(recipe, str(path), PlanOptions(()), [machines])
    speeds = speeds_here(recipe, machines, request.hardware)
    tokens = {
        launch.where: evaluate(request, launch, machines, speeds, {}).tokens_per_s or 0.0
        for launch in launches(machines)
        if launch.where in ("fsdp2", "hsdp")
    }
    assert tokens["fsdp2"] == pytest.approx(tokens["hsdp"], rel=0.05)


def test_dropout_and_the_casts_of_4_bit_layers_are_a_gpus(recipe: dict[str, Any], write_recipe: Any) -> None:
    path: Path = write_recipe(recipe)
    lora = ["mode=lora", "lora={rank: 8, alpha: 16, dropout: 0.05}", "train.precision=bf16"]
    loaded = load_recipe(path, lora)
    config, batch = Base.of(loaded).config, HeaviestBatch((24,), 20)
    parts = {device: timeline_of(loaded, config, batch, How(device=device)) for device in ("cpu", "cuda")}
    operators = {device: one.layers[0].work.operators for device, one in parts.items()}
    assert operators["cuda"] <= operators["cpu"] - 7  # one kernel for two or three of each of seven matrices
    assert parts["cuda"].layers[0].kept < parts["cpu"].layers[0].kept  # a byte for each element of a mask


def test_compiled_steps_move_fewer_bytes(runs: Any) -> None:
    run = next(one for one in runs.published()["runs"] if one["name"] == "torchtune 8B LoRA")
    job = runs.planned({key: value for key, value in run.items() if key != "memory_gib"}).job
    train = job.recipe.train.model_copy(update={"compile": False})
    eager = replace(job, recipe=job.recipe.model_copy(update={"train": train}))
    share = job.time().parts["element-wise"] / eager.time().parts["element-wise"]
    assert share == pytest.approx(shipped_hardware().efficiency.fused)


def test_common_devices_have_a_price() -> None:
    for device in ("RTX-PRO-6000-96", "A40-48", "H100-NVL-94", "GH200-96", "B300-270"):
        assert any(one.device == device for one in read_prices().prices)


def test_every_published_run_has_its_source_and_its_use(runs: Any) -> None:
    data = runs.published()
    assert len(data["runs"]) >= 22
    for run in data["runs"]:
        assert data["sources"][run["source"]].startswith("https://")
        assert run["use"] in ("fit", "held out", "excluded")
        assert (run["use"] == "excluded") <= ("reason" in run)


def test_the_page_says_what_was_reached(runs: Any) -> None:
    rows = [line.split(" | ") for line in runs.PAGE.read_text(encoding="utf-8").splitlines() if " tokens/s" not in line]
    errors = [float(row[6].rstrip("%")) for row in rows if len(row) == 8 and row[7].strip(" |") in ("fit", "held out")]
    compared = [one for one in runs.published()["runs"] if one["use"] != "excluded"]
    assert len(errors) == len(compared)
    assert statistics.median(map(abs, errors)) <= 15
    far = [one["name"] for one, error in zip(compared, errors, strict=True) if abs(error) > 30 and "reason" not in one]
    assert not far
    assert sum("reason" in one for one in compared) <= 1


@pytest.mark.long
def test_the_page_is_what_the_planner_says(runs: Any) -> None:
    assert runs.PAGE.read_text(encoding="utf-8") == runs.page(runs.all_planned())
