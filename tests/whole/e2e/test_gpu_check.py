"""`./scripts/gpu.sh` on the CPU: every result is written as it comes, what cannot be here is said, runs continue."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from gpu_check import Runs, write_inputs

from finetune.engine.launch import read_config_file
from finetune.features import load_recipe

TRIAL = """
import os, time
import psutil, pytest
from gpu_check import start_python

STARTS = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], sys.argv[2]])"
WAITS = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"

def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

def test_hangs(tmp_path):
    with pytest.raises(pytest.fail.Exception) as over:
        start_python(["-c", STARTS, WAITS, tmp_path / "pid"], {}, 5.0)
    if (tmp_path / "pid").exists():  # a slow machine has not started it yet
        started, until = int((tmp_path / "pid").read_text()), time.monotonic() + 60
        while is_running(started) and time.monotonic() < until:  # a signal takes a moment to arrive
            time.sleep(0.1)
        assert not is_running(started), "what it has started runs on"
    raise over.value

@pytest.mark.parametrize("of", ["a step"])
def test_differs(of):
    assert "BROKEN" not in os.environ, "1 is not 2"

def test_lacks():
    if "LACKS" in os.environ:
        pytest.skip("not installed: flash_attn")

def test_works(record_property):
    record_property("answer", 42)
"""


@dataclass
class Checked:
    status: int
    said: str
    lines: list[str]  # of results.jsonl

    @property
    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]

    @property
    def statuses(self) -> dict[str, str]:
        return {one["test"]: one["status"] for one in self.results}


def run(command: list[Any], out: Path, environment: dict[str, str]) -> Checked:
    own = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    done = subprocess.run(list(map(str, command)), env=own, capture_output=True, text=True)
    file = out / "results.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return Checked(done.returncode, done.stdout + done.stderr, lines)


def trial(folder: Path, *arguments: str, **environment: str) -> Checked:
    """Runs the trial's tests as those of GPUs are run."""
    (file := folder / "trial.py").write_text(TRIAL, encoding="utf-8")
    words = ["-m", "pytest", "-p", "gpu_check", "-q", "--rootdir", folder, "--out", folder / "out", file, *arguments]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    return run([sys.executable, *words], folder / "out", {"PYTHONPATH": paths, **environment})


def check(folder: Path, *arguments: object, **environment: str) -> Checked:
    """`./scripts/gpu.sh` with this Python; folder: of the results."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    out = folder.parent if "--rehearse" in arguments else folder
    return run([ROOT / "scripts" / "gpu.sh", "--out", out, *arguments], folder, {"PATH": path, **environment})


@pytest.mark.long
def test_results_stay_and_what_is_not_ok_is_tried_again_last(tmp_path: Path) -> None:
    first = trial(tmp_path, "-k", "not works", BROKEN="1", LACKS="1")
    assert first.status == 1, first.said
    assert first.statuses == {"test_hangs": "failed", "test_differs[a step]": "failed", "test_lacks": "left out"}
    hangs, differs, lacks = (one["why"] for one in first.results)
    assert hangs == "not over after 5 s, all that it was given"
    assert "1 is not 2" in differs
    assert lacks == "not installed: flash_attn"

    second = trial(tmp_path, "-k", "not hangs")
    assert second.status == 0, second.said
    new = [(one["test"], one["status"]) for one in second.results[3:]]
    assert new == [("test_works", "ok"), ("test_differs[a step]", "ok"), ("test_lacks", "ok")]
    assert second.results[3]["answer"] == 42
    # The table has what is known, of both sessions.
    assert re.search(r"^failed +\d+\.\d s  test_hangs +why not over after 5 s", second.said, re.MULTILINE)
    assert re.search(r"^ok +\d+\.\d s  test_works +answer 42$", second.said, re.MULTILINE)

    third = trial(tmp_path, "-k", "not hangs")
    assert (third.status, third.lines) == (0, second.lines), third.said  # nothing is run again
    mistyped = trial(tmp_path, "-k", "wroks")
    assert (mistyped.status, mistyped.lines) == (5, second.lines), mistyped.said


def test_no_test_starts_that_may_take_longer_than_what_is_left(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    cut_off = '{"test": "test_dif'  # the machine was taken away
    (tmp_path / "out" / "results.jsonl").write_text(cut_off, encoding="utf-8")
    checked = trial(tmp_path, "--seconds", "60", "-k", "not hangs")
    assert checked.status == 0, checked.said
    kept, line = checked.lines
    assert (kept, json.loads(line)["test"]) == (cut_off, "test_differs[a step]")  # the first one always starts
    assert "2 tests wait: the same command continues from here" in checked.said


@pytest.mark.long
def test_what_is_missing_is_named_first(tmp_path: Path) -> None:
    checked = check(tmp_path / "out", "-k", "test_devices")
    assert (checked.status, checked.lines) == (2, []), checked.said
    assert "No GPU here. Fix: --rehearse 2 tries everything on two CPU processes" in checked.said
    (other := tmp_path / "datasets-4.9.0.dist-info").mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: datasets\nVersion: 4.9.0\n", encoding="utf-8")
    checked = check(tmp_path / "out", "-k", "test_versions", PYTHONPATH=str(tmp_path))
    assert (checked.status, checked.lines) == (4, []), checked.said
    expected = "Packages are missing or of another version: datasets<6,>=5.0. Fix: docs/proofs/gpu.md"
    assert expected in checked.said


@pytest.mark.long
def test_references_are_carried_to_a_gpu_and_trained_once(tmp_path: Path) -> None:
    """Rehearsed: on the CPU both sides are equal to the last bit, and one that differs is a failure."""
    words = ("--rehearse", "1", "--seconds", "3600", "-k")
    made = check(tmp_path / "a" / "rehearsal", *words, "test_reference[lora-fp32]")
    assert (made.status, made.statuses) == (0, {"test_reference[lora-fp32]": "ok"}), made.said
    (tmp_path / "a").rename(tmp_path / "b")
    folder = tmp_path / "b" / "rehearsal"
    file = folder / "runs" / "lora-fp32-cpu" / "metrics.jsonl"
    before = file.read_bytes(), file.stat().st_mtime_ns
    checked = check(folder, *words, "test_parity[lora-fp32] or test_several[tp-full] or test_versions")
    assert (checked.status, (file.read_bytes(), file.stat().st_mtime_ns)) == (0, before), checked.said
    results = {one["test"]: one for one in checked.results}
    assert results["test_parity[lora-fp32]"]["difference"] == 0
    assert results["test_several[tp-full]"]["why"] == "2 devices, here is 1"
    assert "torch" in results["test_versions"]

    (folder / "results.jsonl").unlink()
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    other = [json.dumps(line | {"loss": line["loss"] * 1.001}) for line in lines if "loss" in line]
    file.write_text("\n".join(other), encoding="utf-8")
    checked = check(folder, *words, "test_parity[lora-fp32]")
    assert (checked.status, checked.statuses) == (1, {"test_parity[lora-fp32]": "failed"}), checked.said
    assert "losses differ by 1.0e-03, relative; 2.0e-05 is rounding" in checked.results[0]["why"]


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_each_of_its_tests_on_the_cpu(tmp_path: Path) -> None:
    """The first case of each: all of them are half an hour, and `test_its_cases_are_recipes` reads the others."""
    checked = check(tmp_path / "rehearsal", "--rehearse", "2", "--first", "--seconds", "7200")
    assert checked.status == 0, checked.said
    results = {one["test"]: one for one in checked.results}
    assert len(results) == len({test.partition("[")[0] for test in results}) > 15
    assert "(+0.0%)" in results["test_memory[full]"]["weights"]
    why = {one["test"]: one["why"] for one in checked.results if one["status"] == "left out"}
    expected = "CUDA|devices, here|not installed|No module|needs torchao|skipped in"
    unexpected = {test: text for test, text in why.items() if not re.search(expected, text)}
    assert not {test for test in unexpected if not test.startswith("test_benchmark")}, unexpected


def test_its_cases_are_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests" / "gpu")
    import runs as cases

    write_inputs(tmp_path, is_rehearsal=True)
    gpu = Runs(tmp_path, rehearse=1)
    overrides = [
        *(of_case for of_case, _ in cases.PARITY.values()),
        *(tuple(f"{key}={value}" for key, value in chosen.items()) for chosen in cases.KERNELS.values()),
        *((override, *both) for override, both in cases.SAVERS.values()),
        *(*cases.FALLING.values(), *cases.MEMORY.values(), *cases.GRAPHED.values()),
    ]
    for one in overrides:
        load_recipe(str(tmp_path / "recipe.yaml"), cases.in_folder(gpu, one))
    assert len(overrides) > 30
    for config in cases.SEVERAL:
        read_config_file(str(ROOT / "accelerate_configs" / f"{config}.yaml"), 2)
