"""Meters of this process: keys are present and consistent; the clock; memory by category."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from bitwise import is_measured
from conftest import train_alone

from finetune.engine.base import StorageCounter
from finetune.engine.timing import Stopwatch
from finetune.errors import UserError
from finetune.tracking.meters import DeviceMeter
from finetune.tracking.metrics import Totals
from finetune.training.profile import advice
from finetune.utils import peak_resident_bytes

CPU = torch.device("cpu")
PHASES = {"data", "forward", "backward", "communication", "optimizer", "other"}


def train_lines(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if "loss" in line]


@pytest.fixture
def profiled(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> tuple[str, Path]:
    """A run with a profile, and the same without; what the first one showed, and the folder of both."""
    recipe["profile"] = {"steps": [3, 4]}
    recipe["checkpoint"] = {"every_steps": 3}
    shown = train_alone(write_recipe(recipe))
    train_alone(write_recipe(recipe), "run.name=plain", "profile=null")
    return shown, tmp_path / "runs"


def test_a_run_measures_itself_and_a_profile_changes_nothing(profiled: tuple[str, Path]) -> None:
    shown, runs = profiled
    lines = train_lines(runs / "run")
    for line in lines:
        times = {key[5:]: value for key, value in line.items() if key.startswith("time/")}
        assert set(times) >= PHASES | {"checkpoint", "evaluation"}
        assert sum(times[name] for name in PHASES) == pytest.approx(line["step_s"])
        assert all(value >= 0 for value in times.values())
        shares = [value for key, value in line.items() if key.startswith("share/")]
        assert sum(shares) == pytest.approx(1)
        assert line["tokens_per_s_per_device"] == line["tokens_per_s"]
        assert line["supervised_tokens_per_s"] < line["tokens_per_s"]
        assert line["padding_tokens"] == 0
        assert line["tflops_per_device"] > 0
        assert not {"mfu", "hfu", "straggler", "power_w", "energy_j"} & set(line)  # nobody knows them here
        held = [line[f"memory/{name}_gib"] * 2**30 for name in ("weights", "gradients", "optimizer_state")]
        parameters = 4 * 123_200  # fp32
        # Buffers beside the weights; a step count beside the two moments of each parameter.
        assert held == [pytest.approx(size, rel=0.01) for size in (parameters, parameters, 2 * parameters)]
        assert (
            sum(held) < line["memory_peak_gib"] * 2**30 == pytest.approx(sum(held) + line["memory/other_gib"] * 2**30)
        )
    assert [line["time/checkpoint"] > 0 for line in lines] == [False, False, False, True, False, False]
    assert [line["time/checkpoint"] for line in lines[:3]] == [0, 0, 0]

    plain = train_lines(runs / "plain")
    of_the_maths = [{k: v for k, v in line.items() if not is_measured(k)} for line in lines]
    assert of_the_maths == [{k: v for k, v in line.items() if not is_measured(k)} for line in plain]
    assert "loss" in of_the_maths[0]

    assert "measured over 5 steps" in shown
    assert "peak memory, GiB" in shown
    assert "profile of steps 3 to 4" in shown
    summary = json.loads((runs / "run" / "profile" / "summary.json").read_text())
    assert summary["steps"] == [3, 4]
    assert sum(summary["shares"].values()) == pytest.approx(1, abs=1e-6)
    assert 0 < summary["products"] < 1
    page = (runs / "run" / "profile" / "summary.md").read_text()
    assert summary["advice"] in page
    assert re.search(r"^ +aten::mm +\S+%", page, re.MULTILINE)
    with gzip.open(runs / "run" / "profile" / "rank-00000.json.gz", "rt") as trace:
        names = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert names >= {"finetune/data", "finetune/forward", "finetune/backward", "finetune/optimizer"}


def test_a_profile_after_the_last_step_is_refused(recipe: dict[str, Any], write_recipe: Any) -> None:
    recipe["profile"] = {"steps": [3, 7]}
    with pytest.raises(UserError, match=r"profile\.steps: \[3, 7\] must end by the last step"):
        train_alone(write_recipe(recipe))
    recipe["train"] = {"epochs": 0.1, "precision": "fp32"}  # known only once the data is
    with pytest.raises(UserError, match=r"profile\.steps: \[3, 7\], but the run has 1 steps"):
        train_alone(write_recipe(recipe))


def test_waits_are_excluded_from_their_phase_and_stalls_from_the_step() -> None:
    stopwatch = Stopwatch(CPU, knows_waits=True)
    with stopwatch.phase("backward"):
        with stopwatch.waiting(), stopwatch.waiting():
            sum(range(20_000))
        stopwatch.end_wait()  # of nothing
    with stopwatch.stall("checkpoint"), stopwatch.waiting():
        sum(range(20_000))
    lap = stopwatch.lap()
    assert set(lap.phases) == {"backward", "communication"}
    assert min(*lap.phases.values(), lap.stalls["checkpoint"]) > 0
    assert sum(lap.phases.values()) <= lap.step
    assert stopwatch.lap().phases == {}


def test_a_backend_that_hides_its_waits_has_none() -> None:
    stopwatch = Stopwatch(CPU, knows_waits=False)
    with stopwatch.phase("forward"), stopwatch.waiting():
        pass
    assert set(stopwatch.lap().phases) == {"forward"}


def test_memory_is_counted_once() -> None:
    tensor, counter = torch.zeros(100), StorageCounter(CPU)
    assert counter.add([tensor[:10], tensor[50:], torch.zeros(3, dtype=torch.int8)]) == 403
    assert counter.add([tensor]) == 0
    assert StorageCounter(torch.device("cuda")).add([tensor]) == 0
    assert peak_resident_bytes() > 2**20


def test_a_device_without_nvml_reads_nan() -> None:
    assert all(value != value for value in DeviceMeter(CPU).read())


def test_totals_leave_the_first_step_out() -> None:
    totals = Totals()
    common = {"time/forward": 1.0, "time/checkpoint": 1.0, "straggler": 1, "rank_spread": 1.5}
    totals.add({"step_s": 100.0, "tokens_per_s": 1.0, **common})
    assert (totals.steps, totals.mean("tokens_per_s")) == (1, 1.0)
    totals.add({"step_s": 1.0, "tokens_per_s": 30.0, **common})
    totals.add({"step_s": 2.0, "tokens_per_s": 60.0, **common, "straggler": 0})
    assert totals.steps == 2
    assert totals.mean("tokens_per_s") == pytest.approx(50)  # 150 tokens in 3 s
    assert totals.mean("mfu") is None
    assert totals.shares() == {"forward": 0.5, "checkpoint": 0.5}
    assert totals.straggler() == (1, 0.5, 1.5)


@pytest.mark.parametrize(
    ("shares", "products", "said"),
    [
        ({"data": 0.2}, 0.9, "input-bound"),
        ({"communication": 0.3}, 0.9, "communication-bound"),
        ({"idle": 0.3}, 0.9, "launch-bound"),
        ({}, 0.3, "memory-bound"),
        ({}, 0.8, "compute-bound"),
    ],
)
def test_advice_names_the_bottleneck(shares: dict[str, float], products: float, said: str) -> None:
    nothing = {"data": 0.0, "communication": 0.0, "idle": 0.0}
    assert advice({**nothing, **shares}, products).startswith(said)
