"""scripts/gpu_check.py on the CPU: every result is written as it comes, what cannot be here is said, runs continue."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import forks
import gpu_check
import psutil
import pytest
from conftest import run_script


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program, with runs in forks."""
    monkeypatch.setattr(gpu_check, "start_one", lambda program, environment, _: forks.python(*program, **environment))
    return gpu_check


def run(check: Any, monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    command = ["gpu_check.py", "--device", "cpu", "--tiny", "--seconds", "3600", "--out", str(out), *arguments]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        check.main()
    results = map(json.loads, (out / "results.jsonl").read_text(encoding="utf-8").splitlines())
    code = ended.value.code
    assert isinstance(code, int)
    return code, {f"{one['piece']}: {one['case']}": one for one in results}, (out / "report.md").read_text()


def test_cases_are_ok_or_say_what_is_missing(check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cases = ("versions", "devices", "full fp32", "attention varlen", "lora", "tp x 2, full", "full, recomputed")
    pieces = ("environment", "parity", "kernels", "resume", "several", "memory")
    code, results, report = run(check, monkeypatch, tmp_path, "--pieces", *pieces, "--cases", *cases)
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
    run(check, monkeypatch, tmp_path, "--pieces", *pieces, "--cases", *cases)
    assert (tmp_path / "results.jsonl").read_bytes() == before  # nothing is run again


def test_a_difference_is_a_failure_and_is_tried_again(
    check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read = check.Check.read
    wrong = [True]

    def off(self: Any, name: str) -> Any:
        result = read(self, name)
        return {**result, "losses": [loss * 1.001 for loss in result["losses"]]} if wrong and "cpu" in name else result

    monkeypatch.setattr(check.Check, "read", off)
    code, results, report = run(check, monkeypatch, tmp_path, "--pieces", "parity", "--cases", "full fp32")
    assert code == 1
    assert "differ by 1.0e-03" in results["parity: full fp32"]["why"]
    assert "| full fp32 | failed |" in report
    wrong.clear()
    code, results, _ = run(check, monkeypatch, tmp_path, "--pieces", "parity", "--cases", "full fp32")
    assert (code, results["parity: full fp32"]["status"]) == (0, "ok")


def test_what_a_run_needs_and_is_not_there_is_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version
    other = {"datasets": "4.9.0", "pydantic": None, "bitsandbytes": None}

    def installed(name: str) -> str:
        if (found := other.get(name, version(name))) is None:
            raise metadata.PackageNotFoundError(name)
        return found

    assert gpu_check.missing_requirements() == []
    monkeypatch.setattr(metadata, "version", installed)
    assert gpu_check.missing_requirements() == ["datasets<6,>=5.0", "pydantic<3,>=2.10"]
    with pytest.raises(SystemExit, match=re.escape("another version: datasets<6,>=5.0 pydantic<3,>=2.10 ")):
        gpu_check.main()


def test_a_program_that_takes_too_long_ends_with_what_it_has_started(tmp_path: Path) -> None:
    sleeps = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[2], sys.argv[1]])"
    waits = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    with pytest.raises(RuntimeError, match="not over after"):
        gpu_check.start_one(["-c", sleeps, tmp_path / "pid", waits], {}, 3.0)
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
    arguments = ("--device", "cpu", "--tiny", "--processes", "2", "--seconds", "3600", "--out", tmp_path)
    run_script("gpu_check.py", *arguments, allowed=(0,))
    lines = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    results = [json.loads(line) for line in lines]
    assert {one["piece"] for one in results} == set(gpu_check.PIECES)
    reasons = [one["why"] for one in results if one["status"] == "left out" and one["piece"] != "benchmark"]
    assert all(re.search("CUDA|devices, here|not installed|No module|needs torchao", why) for why in reasons), reasons
