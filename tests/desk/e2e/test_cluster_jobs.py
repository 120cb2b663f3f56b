"""The commands inside the jobs of clusters, run here on two CPU processes with what each target puts around them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.desk.cluster.job import JobOptions
from finetune.desk.cluster.manifest import launch_on

CONTAINER = {"image": "registry.example.com/finetune:1", "hours": 1.0}
JOBS: dict[str, dict[str, Any]] = {
    "slurm": {"devices": "2xcpu", "hours": 1.0},
    "kubeflow": {"devices": "2x1xcpu", "shared": "claim", **CONTAINER},
    "skypilot": {"devices": "2x1xcpu", "shared": "volume", **CONTAINER},
    "hf-jobs": {"devices": "2xcpu", "shared": "user/bucket", **CONTAINER},
}


def script_of(name: str, text: str) -> str:
    if name == "slurm":
        return text
    if name == "hf-jobs":
        (script,) = re.findall(r"<<'SCRIPT'\n(.*?)\nSCRIPT\n", text, re.DOTALL)
        return script
    objects = list(yaml.safe_load_all(text))
    return objects[1]["spec"]["trainer"]["args"][0] if name == "kubeflow" else objects[0]["run"]


def around(name: str, machine: int, port: int, tools: Path) -> dict[str, str]:
    """What a target puts into the environment of one of two machines."""
    if name == "kubeflow":
        found = {"PET_NODE_RANK": str(machine), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
        return {**found, "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}
    if name == "skypilot":
        return {"SKYPILOT_NODE_RANK": str(machine), "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}
    if name == "slurm":
        return {"SLURM_JOB_ID": "7", "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return {}


@pytest.mark.long
@pytest.mark.parametrize("name", JOBS)
def test_the_command_of_a_job_trains_on_two_processes(
    name: str,
    recipe: dict[str, Any],
    write_recipe: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free_tcp_port: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_recipe({**recipe, "run": {"name": "run", "dir": "runs"}, "train": {"max_steps": 2, "precision": "fp32"}})
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "srun").write_text('#!/bin/sh\nshift\nexec "$@"\n', encoding="utf-8")
    (tools / "srun").chmod(0o755)
    launch_on(name, Path("recipe.yaml"), (), JobOptions(**JOBS[name]), Path("job"), submit=False)
    script = script_of(name, Path("job").read_text(encoding="utf-8")).replace("29500", str(free_tcp_port))
    own = {**os.environ, "FINETUNE_SHARED": str(tmp_path), "FINETUNE_PROCESSES": "2"}
    machines = JOBS[name]["devices"].count("x1x") + 1
    started = [
        subprocess.Popen(["bash", "-c", script], env={**own, **around(name, machine, free_tcp_port, tools)})
        for machine in range(machines)
    ]
    assert [process.wait() for process in started] == [0] * machines
    steps = [json.loads(line) for line in (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == [1, 2]


@pytest.mark.long
def test_a_launcher_that_misses_the_others_stops(
    recipe: dict[str, Any], write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under Kubeflow's variables with `accelerate launch`, which ignores them."""
    write_recipe(recipe)
    words = ["-m", "finetune", "launch", "--num-processes", "1", str(tmp_path / "recipe.yaml")]
    alone = {**os.environ, "FINETUNE_PROCESSES": "2", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}
    done = subprocess.run([sys.executable, *words], env=alone, capture_output=True, text=True)
    assert done.returncode == 2
    assert "FINETUNE_PROCESSES=2, but 1 is running" in done.stderr
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()
