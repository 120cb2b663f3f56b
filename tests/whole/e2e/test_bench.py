"""The speed benchmarks run, and everyone in them trains the same; never how long anything took.

Each contender is a process of its own, so few are started here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, script

sys.path.append(str(ROOT / "benchmarks"))

import products
import workload


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return script("scripts/bench.py")


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    return script("benchmarks/scaling.py")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A script's `main` with these arguments, in this process; what it measures is started by it."""
    for name in ("FINETUNE_CACHE", "HF_HUB_OFFLINE"):  # the scripts set them
        monkeypatch.setenv(name, str(tmp_path / "cache") if name == "FINETUNE_CACHE" else "1")

    def call(script: ModuleType, *arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, arguments)])
        try:
            script.main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return call


@pytest.mark.long
def test_ours_trains_what_the_bare_loop_trains(
    bench: ModuleType, run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With adapters, so that the same ones must be drawn too. The script itself compares the losses of every step."""
    assert run(bench, "--quick", "--modes", "lora", "--device", "cpu", "--json", tmp_path / "speed.json") == 0
    assert "bare loop" in capsys.readouterr().out
    result = json.loads((tmp_path / "speed.json").read_text())
    (mode,) = result["modes"]
    ours, bare = mode["cells"]
    assert ours["losses"] == pytest.approx(bare["losses"], rel=1e-5)
    assert ours["supervised"] == bare["supervised"] == mode["supervised_per_step"]
    assert len(ours["losses"]) == 2 + bench.WARM_UP
    assert len(set(ours["losses"])) > 1  # it was trained
    shares = [mode["contenders"][name]["of_products"]["median"] for name in ("ours", "bare")]
    assert all(0 < share < 1 for share in shares)
    assert shares[0] / shares[1] == pytest.approx(ours["tokens_per_s"] / bare["tokens_per_s"])
    assert ours["weights_bytes"] == bare["weights_bytes"] >= 4 * result["parameters"] > 0
    assert ours["state_bytes"] >= 2 * ours["gradient_bytes"] > 0
    for cell in (ours, bare):
        assert 0 < cell["imported_rss"] < cell["loaded_rss"] <= cell["peak_rss"]
        assert len(cell["step_s"]) == len(cell["step_cpu_s"]) == 1 + bench.WARM_UP
        assert min(cell["step_s"]) > 0
        assert cell["first_step_s"] > 0


def test_other_work_is_noticed(bench: ModuleType) -> None:
    rows = [workload.StepRows([np.array([1, 2, 3])], [np.array([-100, 2, 3])])] * 3
    work = workload.Work(workload.SHAPES["tiny"])

    def cell(who: str, losses: list[float], supervised: int = 2) -> dict[str, Any]:
        return {"round": 0, "contender": who, "losses": losses, "supervised": [supervised] * 3}

    bare = cell("bare", [6.0, 5.0, 4.0])
    assert bench.problems(work, rows, [cell("ours", [6.0, 5.0, 4.0]), bare, cell("trl", [6.0001])]) == []
    assert "loss 4.001 at step 3" in bench.problems(work, rows, [cell("ours", [6.0, 5.0, 4.001]), bare])[0]
    assert "2 losses" in bench.problems(work, rows, [cell("ours", [6.0, 5.0]), bare])[0]
    assert "loss nan" in bench.problems(work, rows, [cell("trl", [float("nan")]), bare])[0]
    assert "3 supervised" not in bench.problems(work, rows, [bare, cell("trl", [6.0], 3)])[0]
    assert "[3, 3, 3] supervised tokens, expected [2, 2, 2]" in bench.problems(work, rows, [cell("trl", [6.0], 3)])[0]


def test_ratios_are_taken_within_a_round(bench: ModuleType) -> None:
    def cell(number: int, who: str, speed: float, peak: int) -> dict[str, Any]:
        speeds = dict.fromkeys(("tokens_per_s", "supervised_tokens_per_s", "supervised_tokens_per_cpu_s"), speed)
        memory = {"peak_rss": peak, "loaded_rss": 0, "peak_device": 0, "loaded_device": 0}
        memory |= {"weights_bytes": 0, "gradient_bytes": 0, "state_bytes": 0}
        return {"round": number, "contender": who, **speeds, **memory, "first_step_s": 1.0}

    cells = [
        cell(number, who, speed * load, peak)
        for number, load in enumerate((1.0, 0.1, 0.5))
        for who, speed, peak in (("ours", 300.0, 1), ("trl", 100.0 + 20 * number, 4))
    ]
    found = bench.summary("trl", cells, 1.0)["ours_over_it"]
    assert found["speed"] == pytest.approx({"median": 2.5, "lowest": 300 / 140, "highest": 3.0})
    assert found["peak"]["median"] == 0.25
    assert bench.summary("ours", cells, 1.0)["ours_over_it"]["speed"] is None


def test_turns_go_back_and_forth(bench: ModuleType) -> None:
    assert bench.turns(["ours", "bare", "trl"], 0) == ["ours", "bare", "trl"]
    assert bench.turns(["ours", "bare", "trl"], 1) == ["trl", "bare", "ours"]


@pytest.mark.long  # in the rehearsal of `scripts/gpu.sh`, too
def test_a_gpu_cell_on_the_cpu(run: Any, tmp_path: Path) -> None:
    """The device's peak was measured before, as by a run that was cut off; what is there is not measured again."""
    gpu = script("benchmarks/gpu.py")
    found = {"device": "CPU", "versions": gpu.contenders.versions(), "cells": []}
    found |= {"matmul_tflops": products.best_tflops("cpu", "bfloat16")}
    (tmp_path / "gpu.json").write_text(json.dumps(found))
    arguments = ["--shape", "tiny", "--device", "cpu", "--only", "8b-lora-rows", "--contenders", "ours", "--steps", "2"]
    arguments += ["--json", tmp_path / "gpu.json", "--folder", tmp_path / "work", "--threads", "1"]
    assert run(gpu, *arguments) == 0
    result = json.loads((tmp_path / "gpu.json").read_text())
    ((cell,), (check,)) = result["cells"], result["checks"]
    assert abs(check["together"] / check["alone"] - 1) > 0.005  # or the check could not fail
    assert gpu.documents_problems([check]) == []
    (problem,) = gpu.documents_problems([{**check, "loss": check["together"]}])
    assert problem.startswith("lora, ours: loss ")
    assert cell["supervised"] == [2 * (256 - 1)] * len(cell["supervised"])
    assert cell["tokens_per_s_slowest"] <= cell["tokens_per_s"] <= cell["tokens_per_s_fastest"]
    assert cell["supervised"] == cell["expected_supervised"]
    assert cell["work"]["precision"] == "bf16"
    assert cell["tokens_per_s"] > cell["supervised_tokens_per_s"] > 0
    assert run(gpu, *arguments) == 0
    assert json.loads((tmp_path / "gpu.json").read_text()) == result
    counted = {**cell, "metrics": {"tflops_per_device": 2.0, "tokens_per_s": 100.0}}
    assert products.share({"tokens_per_s": 50.0}, counted, 4.0) == pytest.approx(0.25)
    (tmp_path / "gpu.json").write_text(json.dumps({**result, "versions": {"torch": "1.0"}}))
    with pytest.raises(SystemExit, match="was measured with"):
        gpu.measured_before(tmp_path / "gpu.json", "cpu")


def test_other_work_on_a_gpu_is_noticed() -> None:
    gpu = script("benchmarks/gpu.py")
    ours = {"cell": "8b-lora", "contender": "ours", "supervised": [3, 3], "expected_supervised": [3, 3]}
    ours |= {"losses": [8.0, 7.0, 6.0], "about": {"trainable_parameters": 10, "attention": "varlen"}}
    peer = {**ours, "contender": "trl", "losses": [8.01], "later_loss": 6.51}
    assert gpu.problems([ours, peer, {**peer, "failed": "no time left"}]) == []
    for change, problem in (
        ({"supervised": [3, 4]}, "[3, 4] supervised tokens, expected [3, 3]"),
        ({"losses": [8.2]}, "first loss 8.2, ours 8.0"),
        ({"losses": [float("nan")]}, "first loss nan, ours 8.0"),
        ({"later_loss": 6.7}, "mean of the later losses 6.7, ours 6.5"),
        ({"about": {"trainable_parameters": 8}}, "8 trained parameters, ours 10"),
    ):
        assert gpu.problems([ours, {**peer, **change}]) == [f"8b-lora, TRL, packed: {problem}"]
    assert gpu.equipment([ours]) == ["8b-lora, ours: attention varlen"]


def test_slopes_and_their_plot(scaling: ModuleType, tmp_path: Path) -> None:
    points = [{"size": n, "step_s": 3.0 * n, "memory_bytes": 5.0 * n**2} for n in (1, 2, 4, 8)]
    found = scaling.slopes(points)
    assert found["time"] == pytest.approx(1)
    assert found["memory, larger half"] == pytest.approx(2)
    scaling.plot({"tokens": {"points": points, "slopes": found}}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_start_up_of_prepared_rows(scaling: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    work = workload.Work(workload.SHAPES["tiny"], row_tokens=512, steps=1)
    scaling.save_model(tmp_path, work.shape)
    workload.write_rows(tmp_path / "rows.jsonl", scaling.short_documents(300))
    workload.write_recipe(tmp_path, work, "tokens")
    workload.write_steps(tmp_path, work)
    (step,) = workload.read_steps(tmp_path)
    assert 400 < step.tokens <= 512
    found = scaling.start_up(tmp_path)
    assert found["packed_rows"] > 5
    assert found["memory_bytes"] > 0


@pytest.mark.long
def test_images_are_trained_and_waits_are_measured(run: Any, tmp_path: Path) -> None:
    quick = ("--rounds", 1, "--steps", 1, "--row-tokens", 1024, "--only", "ours")
    assert run(script("benchmarks/images.py"), *quick, "--json", tmp_path / "images.json") == 0
    result = json.loads((tmp_path / "images.json").read_text())
    assert sum(result["steps"]["images"]) > 0
    assert result["steps"]["parameters"]["tower"] < result["steps"]["parameters"]["language"]
    assert 0 <= result["waiting_for_batches"]["median"] < 1


@pytest.mark.long
def test_pairs_are_the_same_shared_or_not(run: Any, tmp_path: Path) -> None:
    quick = ("--shape", "tiny", "--rounds", 1, "--steps", 1, "--row-tokens", 1024, "--only", "shared", "whole")
    assert run(script("benchmarks/preference.py"), *quick, "--json", tmp_path / "pairs.json") == 0
    result = json.loads((tmp_path / "pairs.json").read_text())
    shared, whole = result["cells"]
    assert shared["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    share = result["steps"]["shared_token_share"]
    assert 0.2 < share < 0.5
    assert result["sharing"]["predicted_by_tokens"] == 1 / (1 - share)
    assert 1 < result["sharing"]["predicted_by_flops"] < 1 / (1 - share)
