"""Runs the program of a completion with a row's tests, in a process with limits. This is no sandbox against malice.

The process has a folder of its own that is deleted afterwards, no environment variables of ours, and limits on CPU and
wall time, memory, sizes of files and open files. Linux also gives it namespaces of its own: for processes, which end
with it, for the network, which is empty, and for mounts, in which all files but those of its folder are read-only. It
can read the files that the user can read. Without namespaces it could read the environment of our processes as well,
tokens included, and send it: such a system is refused unless the recipe says `isolation: none`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RUNNER = Path(__file__).with_name("program_runner.py")
_START_S = 10.0  # of the interpreter, on a busy machine
_RESULT_BYTES = 1 << 20


@dataclass(frozen=True)
class Program:
    """Settings of `tests`."""

    column: str
    partial: bool
    memory_mb: int
    seconds: float  # of CPU, and of the clock after the start of the interpreter
    isolation: str = "required"  # namespaces; or none


def run_program(code: str, tests: Sequence[str], program: Program) -> list[bool]:
    """Returns which tests passed; none if the program ended before, or there was no result in time."""
    result = _result(code, tests, program)
    passed = result.get("passed") if isinstance(result, dict) else None
    fits = isinstance(passed, list) and len(passed) == len(tests) and all(isinstance(one, bool) for one in passed)
    return list(passed) if fits and passed is not None else [False] * len(tests)


def missing_limits(program: Program) -> list[str] | None:
    """Returns the limits that this system does not offer, by an empty program under them; None if even that fails."""
    result = _result("", [], program)
    missing = result.get("missing") if isinstance(result, dict) else None
    return [str(one) for one in missing] if isinstance(missing, list) else None


def _result(code: str, tests: Sequence[str], program: Program) -> object:
    """Returns the result of the runner (`program_runner.py`); None if there is none."""
    limits = {"seconds": program.seconds, "memory": program.memory_mb << 20}
    request = json.dumps({"code": code, "tests": list(tests), **limits}).encode()
    # No key or token of ours, sets in the same order in every run, one thread.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    variables = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **threads}
    with tempfile.TemporaryDirectory(prefix="finetune-tests-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-s", "-B", str(RUNNER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={**variables, "HOME": folder, "TMPDIR": folder},
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(program.seconds + _START_S, _end, (process,))
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(request)
            content = process.stdout.read(_RESULT_BYTES)
        finally:
            timer.cancel()
            _end(process)
            process.stdout.close()
            process.wait()
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended; macOS says so of zombies
        os.killpg(process.pid, signal.SIGKILL)
