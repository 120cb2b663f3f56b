"""Two launchers, each the ranks of one host: a host that is lost and comes back, and folders apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import killable
import parity
import pytest
import two_hosts
from conftest import train_alone
from two_hosts import Job, Outcome, Scenario

STEPS = 400  # so that the host which comes back still finds some to make
OVERRIDES = (*two_hosts.RECIPE, f"train.max_steps={STEPS}", "checkpoint.every_steps=10")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hosts")
    parity.prepare(made)
    return made


def job(folder: Path, name: str, config: str) -> Job:
    return Job(folder, two_hosts.loopback(), config, name, killable.free_port(), ranks=1, overrides=OVERRIDES)


@pytest.mark.long
def test_a_host_is_killed_the_other_resumes_alone_and_it_comes_back(folder: Path) -> None:
    """fsdp2 on two hosts, one, and two, against one process that nobody disturbs: the recipe fixes the maths."""
    reference = job(folder, "reference", "single")
    train_alone(folder / "recipe.yaml", *OVERRIDES, "run.name=reference")
    this, outcome = job(folder, "killed", "fsdp2"), Outcome("killed", "torchrun")
    two_hosts.interrupted(this, Scenario("fsdp2", "killed", fewer=True), None, outcome)
    two_hosts.compare(reference, this, outcome)
    assert outcome.problems == []
    assert [size for size, _ in outcome.ranks] == [2, 1, 2]


@pytest.mark.long
def test_two_hosts_that_do_not_share_a_disk(folder: Path, tmp_path: Path) -> None:
    """A relative run.dir, started in two folders: refused before the first step; and doctor says the same."""
    this = job(folder, "apart", "ddp")
    here, there = tmp_path / "here", tmp_path / "there"
    ends = [_output(this, which, where, "train") for which, where in enumerate((here, there))]
    for output in [end.communicate(timeout=300)[0] for end in ends]:
        assert "run.dir: " in output
        assert "is not the same folder on" in output
        assert "choose a `run.dir` on a file system that all machines share" in output
    ends = [_output(this, which, where, "doctor") for which, where in enumerate((here, there))]
    report, nothing = (end.communicate(timeout=300)[0] for end in ends)
    found = json.loads(report[report.index("{") :])
    assert [(h["rank"], h["node"]) for h in found["hosts"]] == [(0, 0), (1, 1)]
    assert [(c["name"], c["bus_bandwidth"] > 0) for c in found["links"]["collectives"]] == [
        ("all-reduce", True),
        ("all-gather", True),
    ]
    assert [(p["ranks"], p["between_nodes"]) for p in found["links"]["pairs"]] == [([0, 1], True)]
    assert abs(found["links"]["skews"]["1"]) < 1.0  # the same clock
    assert any("runs is not the same folder on" in line for line in found["advice"])
    assert "{" not in nothing


def _output(this: Job, which: int, where: Path, command: str) -> subprocess.Popen[str]:
    """Of a host that works in a folder of its own."""
    where.mkdir(exist_ok=True)
    words = ["--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "127.0.0.1", "--node_rank", str(which)]
    words += ["--master_port", str(this.port), "-m", "finetune", command]
    words += [str(this.folder / "recipe.yaml"), *OVERRIDES, "run.dir=runs"] if command == "train" else ["--json"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if command == "train" else subprocess.DEVNULL,
        text=True,
        cwd=where,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
