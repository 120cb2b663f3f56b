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
from torch.cuda import nccl

from finetune.desk.doctor.links import LaunchGroup, Links, measure_links
from finetune.desk.doctor.requirements import missing_requirements
from finetune.engine.launch import hosts_without_shared_folder
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
    disks: list[Disk] = []
    problem = ""
    if group.rank == 0:
        try:
            disks = [measure_disk(folder) for folder in folders]
        except OSError as error:
            problem = f"{error.filename}: cannot be written: {error.strerror}. Fix: name another with --folder"
    disks, problem = group.gather((disks, problem))[0]
    if problem:
        raise UserError(problem)
    checked = folders if len({host.node for host in hosts}) > 1 else []
    missing = {str(folder): hosts_without_shared_folder(group.gather, group.rank, folder) for folder in checked}
    return Diagnosis(hosts, links, disks, {folder: names for folder, names in missing.items() if names})


DEFAULT_PORT = 29500  # of accelerate's and torch's launchers
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
    driver: str | None = None  # of NVIDIA's GPUs
    unused: tuple[str, ...] = ()  # GPUs of this machine that torch cannot use
    torch_build: str = "CPU"  # what this torch was built for: CPU, CUDA 13.0 or ROCm 7.0
    outside: tuple[str, ...] = ()  # requirements of finetune that this Python lacks or has in another version
    port_is_taken: bool = False  # that launchers take unless they are given another


def inspect_host(rank: int, node: int, device: torch.device) -> Host:
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    cuda = device.type == "cuda"
    others = [other for other in range(torch.cuda.device_count()) if other != device.index] if cuda else []
    tf32 = topology = None
    # Ampere and later support TF32 (https://docs.nvidia.com/cuda/ampere-tuning-guide).
    if cuda and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0):
        is_off = torch.get_float32_matmul_precision() == "highest" or os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"
        tf32 = not is_off
    if cuda and shutil.which("nvidia-smi"):
        # NV#: NVLink; PIX, PXB: PCIe switches; PHB, NODE, SYS: through the CPU (legend of `nvidia-smi topo -m`).
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False)
        topology = re.sub("\x1b\\[[0-9;]*m", "", done.stdout) if done.returncode == 0 else None
    interfaces, addresses = [], psutil.net_if_addrs()
    for name, stats in psutil.net_if_stats().items():
        if not stats.isup or "loopback" in (stats.flags or "") or name == "lo":
            continue
        address = next((a for a in addresses.get(name, []) if a.family == socket.AF_INET), None)
        network = str(ip_network(f"{address.address}/{address.netmask}", strict=False)) if address else None
        interfaces.append(Interface(name, address.address if address else None, network, stats.speed, stats.mtu))
    driver, gpus = nvidia_gpus()
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
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
        tf32=tf32,
        reaches=[torch.cuda.can_device_access_peer(device, other) for other in others],
        topology=topology,
        interfaces=interfaces,
        rdma=rdma_ports(Path("/sys/class/infiniband")),
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(_REPORTED_VARIABLES)},
        versions=versions() | ({"NCCL": ".".join(map(str, nccl.version()))} if cuda and torch.version.cuda else {}),
        driver=driver,
        unused=() if torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES") == "" else gpus,
        torch_build=f"ROCm {torch.version.hip}" if torch.version.hip else build,
        outside=tuple(missing_requirements()),
        port_is_taken=os.environ.get("MASTER_PORT") != str(DEFAULT_PORT) and is_taken(DEFAULT_PORT),
    )


def nvidia_gpus() -> tuple[str | None, tuple[str, ...]]:
    """Returns the version of NVIDIA's driver and its GPUs as nvidia-smi knows them, whatever torch can use."""
    if not shutil.which("nvidia-smi"):
        return None, ()
    query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    rows = [line.partition(", ") for line in done.stdout.splitlines() if ", " in line] if done.returncode == 0 else []
    return (rows[0][0] if rows else None), tuple(name for _, _, name in rows)


def is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was closed just now is free
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def rdma_ports(folder: Path) -> list[Rdma]:
    """Reads the kernel's listing (Linux, Documentation/ABI/stable/sysfs-class-infiniband)."""
    ports = []
    for port in sorted(folder.glob("*/ports/*")):
        values = []
        for name in ("state", "rate", "link_layer"):
            try:
                values.append((port / name).read_text(encoding="utf-8").strip())
            except OSError:
                values.append("unknown")
        ports.append(Rdma(f"{port.parent.parent.name}:{port.name}", *values))
    return ports


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
