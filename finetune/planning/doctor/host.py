"""What one rank sees of its machine. Facts only; what they mean is in `advice`."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path

import psutil
import torch

from finetune.planning.plan import versions

# Variables that change how ranks find and reach each other, by the beginnings of their names.
_TELLING = (
    "NCCL_",
    "GLOO_",
    "TORCH_NCCL_",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    "FINETUNE_TIMEOUT_S",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "UCX_",
    "FI_",
)


@dataclass(frozen=True)
class Interface:
    """A network interface that is up; loopback is left out."""

    name: str
    address: str | None  # IPv4
    network: str | None  # that the address is in, such as 10.0.0.0/24
    megabits: int  # 0: the driver does not say
    mtu: int


@dataclass(frozen=True)
class Rdma:
    """A port of an InfiniBand or RoCE adapter."""

    name: str
    state: str
    rate: str
    link: str  # InfiniBand or Ethernet (RoCE)


@dataclass(frozen=True)
class Host:
    """One rank's view. Sizes in bytes."""

    rank: int
    node: int
    name: str
    cores: int
    memory: int
    shared_memory: int  # of /dev/shm; 0 where there is none
    locked_memory: int | None  # that a process may pin; None: any
    device: str
    device_memory: int | None
    reaches: list[bool]  # whether this device reads each other one of its machine directly
    topology: str | None  # how the devices and network adapters of the machine hang together, as nvidia-smi draws it
    interfaces: list[Interface]
    rdma: list[Rdma]
    variables: dict[str, str]
    versions: dict[str, str]


def look_around(rank: int, node: int, device: torch.device) -> Host:
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    cuda = device.type == "cuda"
    return Host(
        rank=rank,
        node=node,
        name=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=psutil.virtual_memory().total,
        shared_memory=psutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        locked_memory=None if locked == resource.RLIM_INFINITY else locked,
        device=torch.cuda.get_device_name(device) if cuda else "cpu",
        device_memory=torch.cuda.get_device_properties(device).total_memory if cuda else None,
        reaches=_reaches(device) if cuda else [],
        topology=_topology() if cuda else None,
        interfaces=_interfaces(),
        rdma=_rdma(Path("/sys/class/infiniband")),
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(_TELLING)},
        versions=versions(),
    )


def _reaches(device: torch.device) -> list[bool]:
    others = (other for other in range(torch.cuda.device_count()) if other != device.index)
    return [torch.cuda.can_device_access_peer(device, other) for other in others]


def _topology() -> str | None:
    """NV#: NVLink; PIX, PXB: PCIe switches; PHB, NODE, SYS: through the CPU (legend of `nvidia-smi topo -m`)."""
    if not shutil.which("nvidia-smi"):
        return None
    asked = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False)
    return re.sub("\x1b\\[[0-9;]*m", "", asked.stdout) if asked.returncode == 0 else None


def _interfaces() -> list[Interface]:
    addresses = psutil.net_if_addrs()
    found = []
    for name, stats in psutil.net_if_stats().items():
        if not stats.isup or "loopback" in (stats.flags or "") or name == "lo":
            continue
        address = next((a for a in addresses.get(name, []) if a.family == socket.AF_INET), None)
        network = str(ip_network(f"{address.address}/{address.netmask}", strict=False)) if address else None
        found.append(Interface(name, address.address if address else None, network, stats.speed, stats.mtu))
    return found


def _rdma(folder: Path) -> list[Rdma]:
    """From the kernel's own listing (Linux, Documentation/ABI/stable/sysfs-class-infiniband)."""
    ports = sorted(folder.glob("*/ports/*"))
    return [
        Rdma(f"{port.parent.parent.name}:{port.name}", *(_first_line(port / what) for what in _PORT)) for port in ports
    ]


_PORT = ("state", "rate", "link_layer")


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return "unknown"
