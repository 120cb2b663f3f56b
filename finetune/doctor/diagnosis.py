"""`doctor`: facts of a launch (hosts, devices, links, disks); `advice.py` suggests changes."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import psutil
import torch

from finetune.engine.launch import hosts_without_shared_folder
from finetune.engine.links import LaunchGroup, Links, measure_links
from finetune.errors import UserError
from finetune.training.run_plan import versions
from finetune.utils import num_cores


@dataclass(frozen=True)
class Diagnosis:
    hosts: list[Host]  # one per rank
    links: Links | None  # None for one process
    disks: list[Disk]  # rank 0's disks
    not_shared: dict[str, list[str]]  # folder -> hosts on which it is not rank 0's

    @property
    def nodes(self) -> int:
        return len({host.node for host in self.hosts})

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(group: LaunchGroup, folders: list[Path]) -> Diagnosis:
    """Collects the facts, which takes seconds. Collective. Raises UserError on all ranks if a folder is not
    writable."""
    hosts = group.gather(inspect_host(group.rank, group.node, group.device))
    links = measure_links(group)
    disks = group.gather(_measure_disks(folders) if group.rank == 0 else [])[0]
    if isinstance(disks, str):
        raise UserError(disks)
    checked = folders if len({host.node for host in hosts}) > 1 else []
    missing = {str(folder): hosts_without_shared_folder(group.gather, group.rank, folder) for folder in checked}
    return Diagnosis(hosts, links, disks, {folder: names for folder, names in missing.items() if names})


def _measure_disks(folders: list[Path]) -> list[Disk] | str:
    """Returns the disks, or an error message."""
    try:
        return [measure_disk(folder) for folder in folders]
    except OSError as error:
        return f"{error.filename}: cannot be written: {error.strerror}; name another with --folder"


# Prefixes of variables that change how ranks find and reach each other.
_REPORTED_VARIABLES = (
    "NCCL_",
    "GLOO_",
    "TORCH_NCCL_",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    "FINETUNE_TIMEOUT_S",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "UCX_",
    "FI_",
)


@dataclass(frozen=True)
class Interface:
    """Active network interface other than loopback."""

    name: str
    address: str | None  # IPv4
    network: str | None  # network of the address, such as 10.0.0.0/24
    megabits: int  # 0: unknown
    mtu: int


@dataclass(frozen=True)
class Rdma:
    """Port of an InfiniBand or RoCE adapter."""

    name: str
    state: str
    rate: str
    link: str  # InfiniBand or Ethernet (RoCE)


@dataclass(frozen=True)
class Host:
    """One rank's machine and device. Sizes in bytes."""

    rank: int
    node: int
    name: str
    cores: int
    memory: int
    shared_memory: int  # size of /dev/shm; 0 if there is none
    locked_memory: int | None  # limit that a process may pin; None: no limit
    device: str
    device_memory: int | None
    tf32: bool | None  # whether torch rounds operands of fp32 products to 10 bits; None: the device cannot
    reaches: list[bool]  # peer access of this device to each other one on its machine
    topology: str | None  # connections of devices and network adapters, as nvidia-smi prints them
    interfaces: list[Interface]
    rdma: list[Rdma]
    variables: dict[str, str]
    versions: dict[str, str]


def inspect_host(rank: int, node: int, device: torch.device) -> Host:
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    cuda = device.type == "cuda"
    others = [other for other in range(torch.cuda.device_count()) if other != device.index] if cuda else []
    return Host(
        rank=rank,
        node=node,
        name=socket.gethostname(),
        cores=num_cores(),
        memory=psutil.virtual_memory().total,
        shared_memory=psutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        locked_memory=None if locked == resource.RLIM_INFINITY else locked,
        device=torch.cuda.get_device_name(device) if cuda else "cpu",
        device_memory=torch.cuda.get_device_properties(device).total_memory if cuda else None,
        tf32=_tf32(device),
        reaches=[torch.cuda.can_device_access_peer(device, other) for other in others],
        topology=_topology() if cuda else None,
        interfaces=_interfaces(),
        rdma=_rdma(Path("/sys/class/infiniband")),
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(_REPORTED_VARIABLES)},
        versions=versions(),
    )


def _tf32(device: torch.device) -> bool | None:
    """Returns whether TF32 is on; Ampere and later support it (https://docs.nvidia.com/cuda/ampere-tuning-guide)."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    return torch.get_float32_matmul_precision() != "highest" and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"


def _topology() -> str | None:
    """Returns nvidia-smi's matrix. NV#: NVLink; PIX, PXB: PCIe switches; PHB, NODE, SYS: through the CPU (legend of
    `nvidia-smi topo -m`)."""
    if not shutil.which("nvidia-smi"):
        return None
    done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False)
    return re.sub("\x1b\\[[0-9;]*m", "", done.stdout) if done.returncode == 0 else None


def _interfaces() -> list[Interface]:
    addresses = psutil.net_if_addrs()
    interfaces = []
    for name, stats in psutil.net_if_stats().items():
        if not stats.isup or "loopback" in (stats.flags or "") or name == "lo":
            continue
        address = next((a for a in addresses.get(name, []) if a.family == socket.AF_INET), None)
        network = str(ip_network(f"{address.address}/{address.netmask}", strict=False)) if address else None
        interfaces.append(Interface(name, address.address if address else None, network, stats.speed, stats.mtu))
    return interfaces


def _rdma(folder: Path) -> list[Rdma]:
    """Reads the kernel's listing (Linux, Documentation/ABI/stable/sysfs-class-infiniband)."""
    return [
        Rdma(f"{port.parent.parent.name}:{port.name}", *(_first_line(port / name) for name in _PORT_FILES))
        for port in sorted(folder.glob("*/ports/*"))
    ]


_PORT_FILES = ("state", "rate", "link_layer")


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return "unknown"


_SIZE = 256 * 2**20  # bytes
_CHUNK = 8 * 2**20


@dataclass(frozen=True)
class Disk:
    folder: str
    free: int  # bytes
    write: float  # bytes/s, to the device
    read: float  # bytes/s, from the device if the kernel drops its page cache


def measure_disk(folder: Path) -> Disk:
    """Writes and reads a quarter of a gigabyte in `folder`, created if absent. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    noise = os.urandom(_CHUNK)  # incompressible, so that a compressing file system does not look faster
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        began = time.perf_counter()
        for _ in range(_SIZE // _CHUNK):
            file.write(noise)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - began
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        began = time.perf_counter()
        while file.read(_CHUNK):
            pass
        read = time.perf_counter() - began
    return Disk(str(folder), shutil.disk_usage(folder).free, _SIZE / written, _SIZE / read)
