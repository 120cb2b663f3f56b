"""Ctrl-C in the first seconds of a command, while it imports its modules or starts other processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import STOPPED_STATUS

ENDS = "SIGINT received before the first step: the run ends now, there is nothing to save\n"
INTERRUPTED = 128 + signal.SIGINT

# `python -m finetune ...`, whose process gets the signal as it begins to import a module.
_IMPORTING = """
import os, runpy, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
runpy.run_module("finetune", run_name="__main__", alter_sys=True)
"""

# A process of a launch that is only starting, when its `finetune launch` gets the signal.
_STARTING = """
import os, signal, sys, time

if " ".join(sys.orig_argv).partition(" ")[2].startswith("-m finetune{which} "):
    import psutil
    parents = psutil.Process().parents()
    launch = next(one for one in parents if one.cmdline()[1:4] == ["-m", "finetune", "launch"])
    launch.send_signal(signal.SIGINT)
    time.sleep(60)
"""


def run(command: list[str], **environment: str) -> tuple[int, str]:
    """Returns the exit status, and all that a person sees."""
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([sys.executable, *command], timeout=300, env={**os.environ, **environment}, **streams)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("module", "words", "environment", "seen"),
    [
        ("typer", "launch a.yaml", {}, (STOPPED_STATUS, ENDS)),
        ("finetune.training.launcher", "launch a.yaml", {}, (STOPPED_STATUS, ENDS)),
        ("typer", "train a.yaml", {}, (STOPPED_STATUS, ENDS)),
        ("typer", "train a.yaml", {"FINETUNE_ANSWERED": "1"}, (STOPPED_STATUS, "")),  # by its `finetune launch`
        ("typer", "launch a.yaml --on slurm", {}, (INTERRUPTED, "")),
        ("typer", "check a.yaml", {}, (INTERRUPTED, "")),
    ],
)
def test_a_command_that_is_importing(
    module: str, words: str, environment: dict[str, str], seen: tuple[int, str], tmp_path: Path
) -> None:
    script = tmp_path / "interrupt.py"
    script.write_text(_IMPORTING.format(module=module), encoding="utf-8")
    assert run([str(script), *words.split()], **environment) == seen


@pytest.mark.parametrize("which", [pytest.param(".training.launcher", marks=pytest.mark.long), " train"])
def test_a_launch_whose_processes_are_starting(
    which: str, recipe: dict[str, Any], write_recipe: Any, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_STARTING.format(which=which), encoding="utf-8")
    seen = run(["-m", "finetune", "launch", str(write_recipe(recipe))], PYTHONPATH=str(tmp_path))
    assert seen == (STOPPED_STATUS, ENDS)
