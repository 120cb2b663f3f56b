"""What doctor would change, from facts made up; and what it finds out on this machine."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import finetune

from finetune.desk.doctor.advice import advice
from finetune.desk.doctor.diagnosis import (
    Diagnosis,
    Disk,
    Host,
    Interface,
    Rdma,
    diagnose,
    inspect_host,
    is_taken,
    nvidia_gpus,
    rdma_ports,
)
from finetune.desk.doctor.links import LaunchGroup, Links, Pair, chosen_pairs, measure_links

ALONE = LaunchGroup(0, 1, 0, torch.device("cpu"))


def host(rank: int, node: int = 0, **facts: Any) -> Host:
    """A GPU's rank on a machine with nothing to complain of."""
    healthy = Host(
        rank=rank,
        node=node,
        name=f"node{node}",
        cores=64,
        memory=2**40,
        shared_memory=2**34,
        locked_memory=None,
        device="H100",
        device_memory=80 * 2**30,
        tf32=False,
        reaches=[True],
        topology=None,
        interfaces=[Interface("eth0", f"10.0.0.{node}", "10.0.0.0/24", 100_000, 9000)],
        rdma=[Rdma("mlx5_0:1", "4: ACTIVE", "400 Gb/sec", "InfiniBand")],
        variables={"FINETUNE_TIMEOUT_S": "600"},
        versions={"torch": "2.13.0"},
    )
    return replace(healthy, **facts)


def diagnosis(*changes: dict[str, Any], **facts: Any) -> Diagnosis:
    """Two machines of two ranks each. changes: to the facts of rank 0, 1, ..."""
    hosts = [host(rank, rank // 2, **dict(*changes[rank : rank + 1])) for rank in range(4)]
    pairs = [Pair(ranks, ranks[0] // 2 != ranks[1] // 2, 1e-5, 20e9) for ranks in chosen_pairs([0, 0, 1, 1])]
    found = Diagnosis(hosts, Links("nccl", [], pairs, {1: 0.001}), [Disk("runs", 2**40, 1e9, 2e9)], {})
    return replace(found, **facts)


def slow(ranks: tuple[int, int]) -> Links:
    links = diagnosis().links
    assert links is not None
    return replace(links, pairs=[replace(p, bandwidth=1e9) if p.ranks == ranks else p for p in links.pairs])


def skewed(seconds: float) -> Links:
    return Links("nccl", [], [], {1: seconds})


CPU = {"device": "cpu", "variables": {"FINETUNE_TIMEOUT_S": "600"}}
TWO_NETWORKS = [
    Interface("eth0", "10.0.0.1", "10.0.0.0/24", 1000, 9000),
    Interface("ib0", "10.1.0.1", "10.1.0.0/24", 400_000, 4092),
]
OTHER_MTU = [Interface("eth0", "10.0.0.1", "10.0.0.0/24", 100_000, 1500)]
AILING: list[tuple[str, Diagnosis, str]] = [
    (
        "versions_differ",
        diagnosis({"versions": {"torch": "2.12.0"}}),
        "torch differs: 2.12.0 on rank 0, 2.13.0 on rank 1",
    ),
    (
        "gpus_that_torch_cannot_use",
        diagnosis(hosts=[host(0, **CPU, unused=("H100",) * 8, driver="470.1")], links=None),
        "has 8 x H100 (driver 470.1) that torch, built for CPU, cannot use: install a torch for GPUs",
    ),
    ("packages", diagnosis({"outside": ("peft<1,>=0.20",)}), "has in another version: peft<1,>=0.20. Install"),
    ("port", diagnosis({"port_is_taken": True}), "port 29500 is taken"),
    ("devices_differ", diagnosis({"device": "A100"}), "devices differ (A100, H100)"),
    ("tf32_on", diagnosis({"tf32": True}), "TF32 is on for rank 0"),
    ("threads_unset", diagnosis(CPU, CPU, CPU, CPU), "2 processes share 64 cores: set OMP_NUM_THREADS=32"),
    ("small_shared_memory", diagnosis({"shared_memory": 64 * 2**20}), "/dev/shm holds 64 MiB"),
    ("pinning_limited", diagnosis({"locked_memory": 8 * 2**20}), "may pin 8 MiB"),
    (
        "rdma_down",
        diagnosis({"rdma": [Rdma("mlx5_0:1", "1: DOWN", "10 Gb/sec", "Ethernet")]}),
        "mlx5_0:1 is not active",
    ),
    (
        "network_unclear",
        diagnosis({"interfaces": TWO_NETWORKS}),
        "several networks (eth0, ib0): name the fast one in NCCL",
    ),
    ("mtu_differs", diagnosis({"interfaces": OTHER_MTU}), "the MTU in 10.0.0.0/24 differs"),
    ("long_timeout", diagnosis({"variables": {}}), "a lost connection is detected after 30 minutes"),
    ("folders_not_shared", diagnosis(not_shared={"runs": ["node1"]}), "runs is not the same folder on node1"),
    ("no_direct_reach", diagnosis({"reaches": [True, False]}), "has no peer access to 1 of the other devices"),
    ("clocks_differ", diagnosis(links=skewed(-2.0)), "the clock of node 1 is 2.0 s behind node 0's"),
    ("slow_links", diagnosis(links=slow((1, 2))), "ranks 1, 2 reach each other at 1.00 GB/s"),
    ("slow_disk", diagnosis(disks=[Disk("runs", 2**40, 20e6, 1e9)]), "runs writes 20 MB/s"),
    ("slow_disk", diagnosis(disks=[Disk("runs", 2**30, 1e9, 1e9)]), "runs has 1.0 GiB free"),
]


def test_nothing_to_change() -> None:
    assert advice(diagnosis()) == []


@pytest.mark.parametrize(("found", "fragment"), [case[1:] for case in AILING], ids=[case[0] for case in AILING])
def test_each_problem_gives_one_advice(found: Diagnosis, fragment: str) -> None:
    (line,) = advice(found)
    assert fragment in line


def test_what_this_machine_has_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """GPUs by nvidia-smi, which need not be GPUs that torch can use; a port by binding it."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '550.54, NVIDIA L4'\necho '550.54, NVIDIA L4'\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert nvidia_gpus() == ("550.54", ("NVIDIA L4", "NVIDIA L4"))
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n", encoding="utf-8")
    assert nvidia_gpus() == (None, ())
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        assert is_taken(taken.getsockname()[1])
    assert inspect_host(0, 0, torch.device("cpu")).outside == ()


def test_one_machine_needs_no_network() -> None:
    hosts = [host(rank, interfaces=TWO_NETWORKS, variables={}) for rank in range(2)]
    assert advice(replace(diagnosis(), hosts=hosts, links=None)) == []


def test_pairs_of_many_ranks_are_neighbours_and_first_of_machines() -> None:
    nodes = [rank // 8 for rank in range(32)]
    pairs = chosen_pairs(nodes)
    assert {(0, 8), (8, 16), (16, 24), (0, 1), (30, 31)} <= set(pairs)
    assert (7, 8) not in pairs
    assert len(pairs) == 4 * 7 + 3


def test_ports_of_adapters(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert rdma_ports(tmp_path) == [Rdma("mlx5_0:1", "4: ACTIVE", "400 Gb/sec (4X NDR)", "unknown")]


def test_one_process_has_no_links(tmp_path: Path) -> None:
    assert measure_links(ALONE) is None
    found = diagnose(ALONE, [tmp_path])
    assert (len(found.hosts), found.links, found.not_shared) == (1, None, {})
    assert list(tmp_path.iterdir()) == []
    json.dumps(found.as_dict())


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = finetune("doctor", "--folder", tmp_path / "file" / "runs")
    assert done.returncode == 2
    assert "cannot be written: Not a directory. Fix: name another with --folder" in done.stderr
