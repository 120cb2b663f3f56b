"""Formulas of bytes sent and state bytes: by hand, and compared with a benchmark's measurements."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from costs import (
    ParameterCounts,
    StateBytes,
    StepSizes,
    all_reduce,
    one_way,
    state_bytes,
    step_sizes,
    traffic,
)
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.engine.launch import read_config_file
from finetune.engine.parallelism import Parallelism

MEASURED = json.loads((ROOT / "benchmarks" / "results" / "communication.json").read_text(encoding="utf-8"))
CELLS = [cell for cell in MEASURED["cells"] if cell["processes"] > 1]
# 4 layers of 10 bytes of weights each, 20 beside them (8 of them the head's); all of it trains.
WORK = StepSizes(40.0, 20.0, 8.0, 60.0, 4, 6, 6, 2, 4, 3, 100, recomputes=False)


def test_collectives() -> None:
    assert [all_reduce(n, 8.0) for n in (1, 2, 4)] == [0.0, 8.0, 12.0]
    assert [one_way(n, 8.0) for n in (1, 2, 4)] == [0.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("backend", "division", "sent"),
    [
        ("ddp", Parallelism(), 0.0),
        ("ddp", Parallelism(replicate=2), 60.0),
        ("zero2", Parallelism(shard=2), 3 * 60.0 + 30.0),
        ("zero3", Parallelism(shard=2), 3 * (2 * 30.0 + 30.0)),
        ("fsdp2", Parallelism(shard=2), 3 * ((2 * 40 + 2 * 12 + 8) / 2 + 30.0)),
        ("fsdp2", Parallelism(replicate=2, shard=2), 3 * ((2 * 40 + 2 * 12 + 8) / 2 + 30.0 + 30.0)),
        ("ddp", Parallelism(pipeline=2), 3 * 2 * 0.5 * 100 * 6 * 4),
        # embedding and head once each, their gradients, and four sums of hidden states in each of 4 layers
        ("ddp", Parallelism(tensor=2), 3 * (20 / 2 + 20 / 2 + 4 * 4 * 100 * 6 * 4)),
        # forward and backward of 4 layers: queries, outputs, keys and values of 50 tokens, half of each sent
        ("ddp", Parallelism(sequence=2), 60.0 + 3 * 4 * 2 * 0.5 * 50 * (6 + 6 + 2 + 2) * 4),
        ("ddp", Parallelism(context=2), 60.0 + 3 * 4 * 3 * 0.5 * 100 * (2 + 2) * 4),
        ("ddp", Parallelism(context=2, exchange="ring"), 60.0 + 3 * 4 * 3 * 0.5 * 100 * (2 + 2) * 4),
    ],
)
def test_bytes_sent(backend: str, division: Parallelism, sent: float) -> None:
    assert sum(line.sent for line in traffic(backend, division, WORK)) == pytest.approx(sent)


def test_state_bytes() -> None:
    parameters = ParameterCounts(layers=600, others=200, trained=1.0)
    assert state_bytes("ddp", Parallelism(replicate=4), parameters) == StateBytes(3200, 3200, 6400)
    assert state_bytes("fsdp2", Parallelism(shard=4), parameters) == StateBytes(800, 800, 1600)
    assert state_bytes("zero2", Parallelism(shard=4), parameters) == StateBytes(3200, 800, 1600 + 800)
    assert state_bytes("fsdp2", Parallelism(shard=2, tensor=2), parameters) == StateBytes(800, 800, 1600)
    assert state_bytes("ddp", Parallelism(pipeline=2), parameters).total == 6400


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("communication")


@pytest.mark.parametrize("cell", CELLS, ids=[f"{c['model']} {c['config']} x{c['processes']}" for c in CELLS])
def test_predictions_match_measurements(cell: dict[str, Any], benchmark: Any, tmp_path: Path) -> None:
    config = AutoConfig.for_model(**MEASURED["models"][cell["model"]])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    numels = {name: (p.numel(), True) for name, p in model.named_parameters()}
    processes = cell["processes"]
    launch = read_config_file(str(benchmark.config_of(tmp_path, cell["config"], processes)), processes)
    work = step_sizes(config, numels, MEASURED["rows"] // launch.parallelism.data, MEASURED["tokens"], recomputes=False)
    lines = traffic(benchmark.backend(cell["config"], launch), launch.parallelism, work)
    factors = {} if launch.kind == "zero" else benchmark.GLOO
    predicted = sum(line.sent * factors.get(line.collective, 1.0) for line in lines)
    assert cell["sent"] == pytest.approx(predicted, rel=0.03)
