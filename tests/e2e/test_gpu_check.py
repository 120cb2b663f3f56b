"""`doctor --gpu` on the CPU: every result is written as it comes, what cannot be here is said, runs continue."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import forks
import psutil
import pytest
from conftest import finetune

from finetune.doctor import gpu, gpu_cases
from finetune.errors import UserError


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are forks of a process that has imported what they import."""
    monkeypatch.setattr(
        gpu_cases, "start_python", lambda program, environment, _: forks.python(*program, **environment)
    )


def run(out: Path, pieces: list[str], cases: list[str], processes: int = 1) -> tuple[int, dict[str, Any], str]:
    code = gpu.check_gpu(gpu.GpuCheck(out, processes), pieces, cases, 3600)
    results = map(json.loads, (out / "results.jsonl").read_text(encoding="utf-8").splitlines())
    return code, {f"{one['piece']}: {one['case']}": one for one in results}, (out / "report.md").read_text()


@pytest.mark.usefixtures("forked")
def test_cases_are_ok_or_say_what_is_missing(tmp_path: Path) -> None:
    cases = ["versions", "devices", "full fp32", "attention varlen", "lora", "tp x 2, full", "full, recomputed"]
    pieces = ["environment", "parity", "kernels", "resume", "several", "memory"]
    code, results, report = run(tmp_path, pieces, cases)
    assert code == 0, report
    statuses = {name: one["status"] for name, one in results.items()}
    assert statuses == {
        "environment: versions": "ok",
        "environment: devices": "ok",
        "parity: full fp32": "ok",
        "kernels: attention varlen": "left out",
        "resume: lora": "ok",
        "several: tp x 2, full": "left out",
        "memory: full, recomputed": "ok",
    }
    assert "predicted" in results["memory: full, recomputed"]["optimizer state"]
    assert "(+0.0%)" in results["memory: full, recomputed"]["weights"]
    assert results["parity: full fp32"]["difference"] == 0
    assert "varlen" in results["kernels: attention varlen"]["why"]
    assert results["several: tp x 2, full"]["why"] == "2 devices, here is 1"
    assert "A rehearsal on the CPU" in report
    before = (tmp_path / "results.jsonl").read_bytes()
    run(tmp_path, pieces, cases)
    assert (tmp_path / "results.jsonl").read_bytes() == before  # nothing is run again


@pytest.mark.usefixtures("forked")
def test_a_difference_is_a_failure_and_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read = gpu.GpuCheck.read
    wrong = [True]

    def off(self: Any, name: str) -> Any:
        result = read(self, name)
        return {**result, "losses": [loss * 1.001 for loss in result["losses"]]} if wrong and "cpu" in name else result

    monkeypatch.setattr(gpu.GpuCheck, "read", off)
    code, results, report = run(tmp_path / "out", ["parity"], ["full fp32"])
    assert code == 1
    assert "differ by 1.0e-03" in results["parity: full fp32"]["why"]
    assert "| full fp32 | failed |" in report
    wrong.clear()
    code, results, _ = run(tmp_path / "out", ["parity"], ["full fp32"])
    assert (code, results["parity: full fp32"]["status"]) == (0, "ok")
    (tmp_path / "out" / "results.jsonl").unlink()
    carried = (tmp_path / "out").rename(tmp_path / "elsewhere")
    monkeypatch.setattr(gpu_cases, "start_python", None)  # what any command has trained is there, at any place
    code, results, _ = run(carried, ["parity"], ["full fp32"])
    assert (code, results["parity: full fp32"]["status"]) == (0, "ok")


@pytest.mark.usefixtures("forked")
def test_references_are_made_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check = gpu.GpuCheck(tmp_path, 1)
    choices = {"dpo lora fp32": gpu_cases.parity_choices(check)["dpo lora fp32"]}
    monkeypatch.setattr(gpu, "parity_choices", lambda _: choices)
    assert gpu.make_references(check) == 0
    assert "reference, dpo lora fp32: last loss 0." in capsys.readouterr().out
    assert [file.name for file in tmp_path.glob("*.done")] == ["dpo-lora-fp32-cpu.done"]


def test_a_case_that_hangs_or_asserts_costs_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def cases(check: gpu.GpuCheck) -> gpu_cases.Cases:
        sleep = ["-c", "import time; time.sleep(600)"]
        yield "hangs", lambda: {"rc": gpu_cases.start_python(sleep, {}, check.seconds_left).returncode}
        yield "asserts", lambda: (_ for _ in ()).throw(AssertionError("1 is not 2"))
        yield "works", lambda: {"answer": 42}

    monkeypatch.setattr(gpu, "PIECES", {"trial": cases})
    monkeypatch.setattr(gpu, "TIMES", 0.01)
    code, results, _ = run(tmp_path, [], [])
    assert code == 1
    assert {name: one["status"] for name, one in results.items()} == {
        "trial: hangs": "failed",
        "trial: asserts": "failed",
        "trial: works": "ok",
    }
    assert "not over after 1 s" in results["trial: hangs"]["why"]
    assert results["trial: asserts"]["why"] == "AssertionError: 1 is not 2"


def test_what_matters_most_comes_first() -> None:
    assert list(gpu_cases.PIECES)[:4] == ["environment", "speed", "kernels", "parity"]


def test_what_a_run_needs_and_is_not_there_is_said_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = metadata.version
    other = {"datasets": "4.9.0", "pydantic": None, "bitsandbytes": None}

    def installed(name: str) -> str:
        if (found := other.get(name, version(name))) is None:
            raise metadata.PackageNotFoundError(name)
        return found

    assert gpu.missing_requirements() == []
    monkeypatch.setattr(metadata, "version", installed)
    assert gpu.missing_requirements() == ["datasets<6,>=5.0", "pydantic<3,>=2.10"]
    with pytest.raises(UserError, match=re.escape("another version: datasets<6,>=5.0 pydantic<3,>=2.10 ")):
        gpu.check_gpu(gpu.GpuCheck(tmp_path, 1), [], [], 3600)
    other |= {"datasets": version("datasets"), "pydantic": version("pydantic"), "typing-inspection": None}
    (missing,) = gpu.missing_requirements()  # wheels carried to a machine without an index lacked this one
    assert re.fullmatch(r"typing-inspection>=[\d.]+ \(of pydantic\)", missing)


def test_no_pair_is_one_that_the_format_refuses(tmp_path: Path) -> None:
    gpu.write_inputs(gpu.GpuCheck(tmp_path))
    pairs = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(pairs) == 400
    assert all(pair["chosen"] != pair["rejected"] for pair in pairs)


def test_requirements_are_those_of_the_clone_if_finetune_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1")
    missing = gpu.missing_requirements()

    def absent(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", absent)
    assert sorted(gpu.missing_requirements()) == sorted(missing) != []


def test_without_a_clone_what_needs_one_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_cases, "__file__", str(tmp_path / "site" / "finetune" / "doctor" / "gpu_cases.py"))
    pieces = ["environment", "tests", "savers", "benchmark"]
    cases = ["matrix products", "tests/gpu", "fsdp2, one process", "1b-full, bare"]
    code, results, _ = run(tmp_path / "out", pieces, cases)
    assert code == 0
    assert len(results) == 4
    for one in results.values():
        assert one["status"] == "left out"
        assert one["why"].endswith("run this in a clone of the repository")


def test_arguments_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    done = finetune("doctor", "--gpu", "--out", tmp_path / "out", "--pieces", "parity,kernel")
    assert (done.returncode, "--pieces kernel: choose from environment, speed, " in done.stderr) == (2, True)
    done = forks.python("-m", "finetune", "doctor", "--gpu", "--out", tmp_path / "out", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, "no GPU here: --rehearse 2" in done.stderr) == (2, True)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="--case 'fulll': choose from 'full', 'lora'"):
        gpu.check_gpu(gpu.GpuCheck(tmp_path / "out", 1), ["resume"], ["fulll"], 3600)
    assert gpu.check_gpu(gpu.GpuCheck(tmp_path / "out"), [], [], 0) == 0  # on any machine: the report of what is there
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["report.md"]


def test_a_program_that_takes_too_long_ends_with_what_it_has_started(tmp_path: Path) -> None:
    sleeps = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[2], sys.argv[1]])"
    waits = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    with pytest.raises(RuntimeError, match="not over after"):
        gpu_cases.start_python(["-c", sleeps, tmp_path / "pid", waits], {}, 3.0)
    if (started := tmp_path / "pid").exists():
        with contextlib.suppress(psutil.NoSuchProcess):
            left = psutil.Process(int(started.read_text()))
            for _ in range(100):  # a signal takes a moment to arrive
                if left.status() == psutil.STATUS_ZOMBIE:
                    return
                time.sleep(0.1)
            raise AssertionError(f"{left} runs on")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_of_it_on_the_cpu(tmp_path: Path) -> None:
    words = ["-m", "finetune", "doctor", "--gpu", "--rehearse", "2", "--seconds", "3600", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    results = [json.loads(line) for line in lines]
    assert {one["piece"] for one in results} == set(gpu.PIECES)
    reasons = [one["why"] for one in results if one["status"] == "left out" and one["piece"] != "benchmark"]
    assert all(re.search("CUDA|devices, here|not installed|No module|needs torchao", why) for why in reasons), reasons
