"""A plugin of pytest for machines with a GPU that are lent for minutes: `./scripts/gpu.sh`.

The result of a test is a line of OUT/results.jsonl as soon as there is one, and is kept: the same command runs what has
no result yet, then what failed or was left out. It starts no test that may take longer than the time left. What a test
measures is in its line as well, by `record_property`. Whatever uses the device is a process of its own: one that hangs
or crashes costs its own test alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

# Seconds that a test may take, an estimate. Of the first test of an 8B model most is making weights.
LONGEST = {"test_resume": 150, "test_speed": 400, "test_benchmark": 400}
USUALLY = 120
TIMES = 2  # of that a test may take before its program is ended
Result = dict[str, Any]


class NoTimeLeft(pytest.skip.Exception):
    """Not a result: the same command runs the test later."""


@dataclass
class Runs:
    """Runs `finetune train` and keeps what runs gave, because several tests compare with the same run."""

    out: Path
    rehearse: int  # CPU processes of a rehearsal with tiny shapes; 0: GPUs
    until: float = float("inf")  # by time.monotonic(), for the test that runs
    again: bool = False  # the test had a result before: its own runs, but for references, are made again
    trained: set[str] = field(default_factory=set)  # in this session

    @property
    def seconds_left(self) -> float:
        """Returns the seconds until the test has to end."""
        return max(1.0, self.until - time.monotonic())

    @property
    def num_devices(self) -> int:
        if self.rehearse:
            return self.rehearse
        import torch

        return torch.cuda.device_count()

    @property
    def shape(self) -> tuple[str, ...]:
        """Overrides for runs that are timed: 160 M parameters, large enough for kernels to matter."""
        import tiny

        if self.rehearse:
            return ("train.max_steps=3",)
        medium = tiny.MODELS["llama"] | {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816}
        medium |= {"num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8}
        medium |= {"max_position_embeddings": 4096}
        tokenizer = f"model.tokenizer={self.out / 'llama'}"
        size = ("data.max_length=4096", "train.max_steps=12", "batch={rows: 4, rows_per_device: 2}")
        size += ("optimizer.lr=1e-4",)  # at 1e-3 the loss jumps, and rounding grows to 1e-2 in ten steps
        return ("model.name=null", f"model.config={json.dumps(medium)}", tokenizer, *size)

    def train(
        self,
        name: str,
        *overrides: str,
        cpu: bool = False,
        config: str = "",
        processes: int = 1,
        recipe: Path | None = None,
    ) -> Result:
        """Trains, unless this or an earlier session has; returns what `read` does. Skips the test if finetune refuses
        (status 2).

        config: name in accelerate_configs/; none: without a launcher. recipe: None: that of all tests."""
        # Without the folder's own path: references are made on another machine.
        same = json.dumps([[one.replace(str(self.out), "OUT") for one in overrides], cpu, config, processes])
        done_file = self.out / f"{name}.done"
        is_done = done_file.exists() and done_file.read_text(encoding="utf-8") == same
        if not is_done or (self.again and not cpu and name not in self.trained):
            done_file.unlink(missing_ok=True)
            shutil.rmtree(self.out / "runs" / name, ignore_errors=True)
            program = ["-m", "finetune", "train", recipe or self.out / "recipe.yaml", *overrides, f"run.name={name}"]
            if config:
                file = ROOT / "accelerate_configs" / f"{config}.yaml"
                launcher = ("-m", "accelerate.commands.launch", "--num_processes", processes, "--config_file", file)
                program = [*launcher, *program]
            done = self.start(program, without_gpu=cpu)
            output = done.stdout + done.stderr
            (self.out / f"{name}.log").write_text(output, encoding="utf-8")
            lines = [line for line in output.splitlines() if line.strip()] or ["no output"]
            if done.returncode == 2:
                pytest.skip(" ".join(lines[-3:])[-400:])
            assert done.returncode == 0, lines[-1]
            done_file.write_text(same, encoding="utf-8")
            self.trained.add(name)
        return self.read(name)

    def read(self, name: str) -> Result:
        """Returns the losses of a run, the median seconds of its later steps and its peak memory."""
        text = (self.out / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [line for line in map(json.loads, text.splitlines()) if "loss" in line]
        later = lines[len(lines) // 2 :]
        return {
            "losses": [line["loss"] for line in lines],
            "step_s": statistics.median(line["step_s"] for line in later),
            "tokens_per_s": statistics.median(line["tokens_per_s"] for line in later),
            "peak_gib": max(line["memory_peak_gib"] for line in lines),
            "compilations": lines[-1].get("compilations", 0),
        }

    def start(self, program: list[Any], without_gpu: bool = False) -> subprocess.CompletedProcess[str]:
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {"CUDA_VISIBLE_DEVICES": ""} if without_gpu or self.rehearse else {}
        # A collective that waits for a rank that has died, or for another collective, ends before the test does.
        environment |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60"}
        return start_python(program, environment, self.seconds_left)


def start_python(program: list[Any], environment: dict[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Runs a Python program. If it takes longer, ends it with all that it has started, and fails the test."""
    command = [sys.executable, *map(str, program)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **environment}, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not over after {seconds:.0f} s, all that it was given", pytrace=False)
        finally:  # Ctrl+C ends a test as well
            if process.poll() is None:
                import psutil

                for one in (*psutil.Process(process.pid).children(recursive=True), process):
                    one.kill()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def write_inputs(out: Path, is_rehearsal: bool) -> None:
    """Makes tiny models and rows, unless an earlier session has, and the recipe: the folder may have been moved."""
    import tiny
    import yaml

    out.mkdir(parents=True, exist_ok=True)
    if not (out / "pairs.jsonl").exists():
        for name in ("llama", "mixtral"):
            tiny.save_model(out, name)
        tiny.save_seeing(out, "gemma3")
        tiny.write_pictures(out, "pictures", 80)
        tiny.write_rows(out / "rows.jsonl", tiny.conversations(300 if is_rehearsal else 20_000))
        tiny.write_rows(out / "pairs.jsonl", tiny.preferences(400))  # last: all is there
    recipe = {
        "run": {"name": "base", "dir": str(out / "runs")},
        "model": {"name": str(out / "llama")},
        "mode": "full",
        "data": {"train": [{"path": str(out / "rows.jsonl"), "format": "messages"}], "max_length": 64},
        "batch": {"rows": 4, "rows_per_device": 1},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.01},
        "schedule": {"warmup_steps": 2},
        "train": {"max_steps": 3 if is_rehearsal else 20, "precision": "fp32"},
    }
    (out / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")


# --- pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu check")
    group.addoption("--out", type=Path, default=Path("runs/gpu-check"), help="results, logs and references")
    group.addoption("--seconds", type=float, default=570.0, help="start nothing that may take longer than what is left")
    group.addoption("--rehearse", type=int, default=0, metavar="N", help="on N CPU processes; in OUT/rehearsal")
    group.addoption("--first", action="store_true", help="the first case of each test alone")


def pytest_configure(config: pytest.Config) -> None:
    from finetune.desk.doctor.requirements import missing_requirements

    if missing := missing_requirements():
        listed = " ".join(missing)
        raise pytest.UsageError(f"Packages are missing or of another version: {listed}. Fix: docs/proofs/gpu.md")
    config.pluginmanager.register(Check(config), "gpu check of this session")


class Check:
    """A session: what has a result already, and how much time is left."""

    def __init__(self, config: pytest.Config) -> None:
        rehearse = config.getoption("--rehearse")
        self.out: Path = config.getoption("--out").resolve() / ("rehearsal" if rehearse else "")
        self.until: float = time.monotonic() + config.getoption("--seconds")
        self.runs_of_session = Runs(self.out, rehearse)
        self.before = {one["test"]: one["status"] for one in read_results(self.out)}
        self.has_started = False
        self.num_done = self.num_waiting = 0

    @pytest.hookimpl(trylast=True)  # after `-k`
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leaves out what is ok. What has no result comes first."""
        if config.getoption("--first"):
            first = {item.name.partition("[")[0]: item for item in reversed(items)}.values()
            config.hook.pytest_deselected(items=[item for item in items if item not in first])
            items[:] = [item for item in items if item in first]
        done = [item for item in items if self.before.get(item.name) == "ok"]
        items[:] = sorted((item for item in items if item not in done), key=lambda item: item.name in self.before)
        config.hook.pytest_deselected(items=done)
        self.num_done = len(done)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.num_done:
            session.exitstatus = pytest.ExitCode.OK

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        longest, now = LONGEST.get(item.name.partition("[")[0], USUALLY), time.monotonic()
        if self.has_started and self.until - now < longest:
            raise NoTimeLeft("no time left: the same command continues from here")
        self.has_started = True
        of_test = now + TIMES * longest if not self.runs_of_session.rehearse else self.until  # CPUs may be slow
        self.runs_of_session.until = min(self.until, of_test)
        self.runs_of_session.again = item.name in self.before

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: pytest.TestReport = (yield).get_result()  # type: ignore[misc]
        if call.excinfo is not None and call.excinfo.errisinstance(NoTimeLeft):
            self.num_waiting += 1
        elif call.when == "call" or call.excinfo is not None:
            status = "left out" if report.skipped else "failed" if report.failed else "ok"
            why = {} if call.excinfo is None else {"why": str(call.excinfo.value)[:600]}
            result = {"test": item.name, "status": status, "seconds": round(report.duration, 1), **why}
            append_result(self.out, result | dict(item.user_properties))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints a table of all results that the folder has, from other sessions too."""
        if not (results := read_results(self.out)):
            return
        terminalreporter.section(str(self.out / "results.jsonl"))
        width = max(len(one["test"]) for one in results)
        for one in results:
            shown = {k: v for k, v in one.items() if k not in ("test", "status", "seconds")}
            figures = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items())
            line = f"{one['status']:8} {one['seconds']:6.1f} s  {one['test']:{width}}  {figures}"
            terminalreporter.write_line(line.replace("\n", " "))
        if self.num_waiting:
            terminalreporter.write_line(f"{self.num_waiting} tests wait: the same command continues from here")

    @pytest.fixture
    def runs(self) -> Runs:
        """Tiny models and rows are made, in a folder that can be carried to another machine."""
        write_inputs(self.out, bool(self.runs_of_session.rehearse))
        return self.runs_of_session

    @pytest.fixture
    def gpu(self, request: pytest.FixtureRequest) -> Runs:
        """`runs`, of a test that needs a GPU unless it is rehearsed."""
        if not self.runs_of_session.num_devices:
            pytest.exit("No GPU here. Fix: --rehearse 2 tries everything on two CPU processes", 2)
        return request.getfixturevalue("runs")


def read_results(out: Path) -> list[Result]:
    """Returns the last result of each test. A line that was cut off, with its machine, is none."""
    file, latest = out / "results.jsonl", dict[str, Result]()
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            result = json.loads(line)
            latest[result["test"]] = result
    return list(latest.values())


def append_result(out: Path, result: Result) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "results.jsonl", "a+b") as file:
        file.seek(max(0, file.tell() - 1))
        is_cut_off = file.read() not in (b"", b"\n")
        file.write(b"\n" * is_cut_off + json.dumps(result).encode() + b"\n")
