"""`doctor`: advice for a launch, and the tables of a diagnosis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from finetune.desk.doctor.diagnosis import DEFAULT_PORT, Diagnosis, Host
from finetune.engine.launch import TIMEOUT_VARIABLE, collective_timeout
from finetune.utils import print_line, readable_bytes

_SHARED_MEMORY = 2**30  # bytes; Docker gives 64 MiB
_SKEW = 0.5  # seconds
_SLOW_DISK = 100e6  # bytes/s
_LOW_SPACE = 20 * 2**30  # bytes
_CHECKPOINT = 10e9  # bytes, as an example


def advice(diagnosis: Diagnosis) -> list[str]:
    """Returns a line for each problem."""
    first_of_node: dict[int, Host] = {}
    for host in diagnosis.hosts:
        first_of_node.setdefault(host.node, host)
    machines = [first_of_node[node] for node in sorted(first_of_node)]
    lines = [
        *_of_ranks(diagnosis),
        *(line for host in machines for line in _of_machine(diagnosis, host)),
        *_of_network(diagnosis, machines),
    ]
    for folder, hosts in diagnosis.not_shared.items():
        names = ", ".join(hosts)
        lines.append(f"{folder} is not the same folder on {names}: runs need a file system that all machines share")
    for disk in diagnosis.disks:
        if disk.write < _SLOW_DISK:
            lines.append(
                f"{disk.folder} writes {disk.write / 1e6:,.0f} MB/s: a checkpoint of {_CHECKPOINT / 1e9:.0f} GB takes "
                f"{_CHECKPOINT / disk.write / 60:.0f} minutes. Put run.dir on a faster disk, or save less often"
            )
        if disk.free < _LOW_SPACE:
            lines.append(f"{disk.folder} has {disk.free / 2**30:,.1f} GiB free: a run that cannot save stops")
    return lines


def _of_ranks(diagnosis: Diagnosis) -> Iterator[str]:
    hosts = diagnosis.hosts
    for package in sorted({package for host in hosts for package in host.versions}):
        ranks = defaultdict[str, list[int]](list)
        for host in hosts:
            ranks[host.versions.get(package, "none")].append(host.rank)
        if len(ranks) > 1:
            each = ", ".join(f"{version} on rank {_listed(having)}" for version, having in ranks.items())
            yield f"{package} differs: {each}. Install the same version everywhere, or losses will differ"
    if len(names := sorted({host.device for host in hosts})) > 1:
        yield f"devices differ ({', '.join(names)}): the slowest sets the pace, the smallest the memory"
    if with_tf32 := [host.rank for host in hosts if host.tf32]:
        yield (
            f"TF32 is on for rank {_listed(with_tf32)}: train.precision: fp32 would round operands of its products to "
            "10 bits, and losses would not be those of other devices: unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
        )
    for host in hosts:
        if host.reaches and not all(host.reaches):
            yield (
                f"rank {host.rank} ({host.device}) has no peer access to {host.reaches.count(False)} of the other "
                "devices: data goes through host memory. Prefer fsdp2 or zero2 to tensor parallelism there"
            )


def _of_machine(diagnosis: Diagnosis, host: Host) -> Iterator[str]:
    """host: of the first rank on a machine."""
    processes, on_cpu = sum(other.node == host.node for other in diagnosis.hosts), host.device == "cpu"
    if host.rank == 0 and on_cpu and processes > 1 and "OMP_NUM_THREADS" not in host.variables:
        threads = max(1, host.cores // processes)
        yield f"{processes} processes share {host.cores} cores: set OMP_NUM_THREADS={threads} to avoid oversubscription"
    if not on_cpu and processes > 1 and host.shared_memory < _SHARED_MEMORY:
        yield (
            f"{host.name}: /dev/shm holds {host.shared_memory / 2**20:,.0f} MiB, and NCCL passes data through it: "
            "start the container with --shm-size=8g or --ipc=host"
        )
    if host.rdma and host.locked_memory is not None:
        yield (
            f"{host.name}: a process may pin {host.locked_memory / 2**20:,.0f} MiB, and RDMA pins its buffers: "
            "set `ulimit -l unlimited` (containers: --ulimit memlock=-1)"
        )
    for port in host.rdma:
        if "ACTIVE" not in port.state:
            yield f"{host.name}: {port.name} is not active ({port.state}): NCCL uses slower paths"
    if host.unused:
        needs = "a torch for GPUs" if host.torch_build == "CPU" else f"a driver for {host.torch_build}"
        yield (
            f"{host.name} has {len(host.unused)} x {host.unused[0]} (driver {host.driver}) that torch, built for "
            f"{host.torch_build}, cannot use: install {needs}, or the run takes the CPU"
        )
    if host.outside:
        yield (
            f"{host.name} lacks, or has in another version: {', '.join(host.outside)}. Install them with pip, "
            "`-c constraints.txt` for the versions that the tests ran with"
        )
    if host.port_is_taken:
        yield (
            f"{host.name}: port {DEFAULT_PORT} is taken, which launchers use unless told otherwise: give "
            "--main_process_port (torchrun: --master_port) another one, on one machine 0"
        )
    variable = "GLOO_SOCKET_IFNAME" if diagnosis.hosts[0].device == "cpu" else "NCCL_SOCKET_IFNAME"
    networks = [interface.name for interface in host.interfaces if interface.address]
    if diagnosis.nodes > 1 and len(networks) > 1 and variable not in host.variables:
        yield (
            f"{host.name} has several networks ({', '.join(networks)}): name the fast one in {variable}, or ranks may "
            "hang on networks that are not connected"
        )


def _of_network(diagnosis: Diagnosis, machines: Sequence[Host]) -> Iterator[str]:
    mtus = defaultdict[str, dict[int, list[str]]](lambda: defaultdict(list))  # by network, which may differ in theirs
    for host in machines:
        for interface in host.interfaces:
            if interface.network:
                mtus[interface.network][interface.mtu].append(f"{host.name}/{interface.name}")
    for network, sizes in mtus.items():
        if len(sizes) > 1:
            each = "; ".join(f"{mtu} on {', '.join(names)}" for mtu, names in sorted(sizes.items()))
            yield f"the MTU in {network} differs ({each}): large messages may never arrive; set one MTU"
    if diagnosis.nodes > 1 and TIMEOUT_VARIABLE not in diagnosis.hosts[0].variables:
        minutes = collective_timeout().total_seconds() / 60
        yield (
            f"a lost connection is detected after {minutes:.0f} minutes: set {TIMEOUT_VARIABLE}=600, or somewhat more "
            "than the longest wait of one rank for another"
        )
    for node, skew in (diagnosis.links.skews if diagnosis.links else {}).items():
        if abs(skew) > _SKEW:
            yield (
                f"the clock of node {node} is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} node 0's: logs "
                "are not comparable, and files on a shared disk look newer or older than they are; run chrony or ntpd"
            )
    # A pair that is much slower than others of its kind: a cable, a switch or a route.
    for between, words in ((False, "within a node"), (True, "between nodes")):
        pairs = diagnosis.links.pairs if diagnosis.links else []
        alike = sorted((pair for pair in pairs if pair.between_nodes == between), key=lambda pair: pair.bandwidth)
        if len(alike) >= 3 and alike[0].bandwidth < (median := alike[len(alike) // 2].bandwidth) / 2:
            yield (
                f"ranks {_listed(alike[0].ranks)} reach each other at {alike[0].bandwidth / 1e9:.2f} GB/s, the median "
                f"{words} is {median / 1e9:.2f}: check that path first"
            )


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def show_diagnosis(console: Console, diagnosis: Diagnosis, advice: list[str]) -> None:
    hosts, links = diagnosis.hosts, diagnosis.links

    def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(table)

    ranks = []
    for host in hosts:
        memory = readable_bytes(host.device_memory) if host.device_memory else "-"
        sizes = (memory, readable_bytes(host.memory), str(host.cores))
        ranks.append((str(host.rank), str(host.node), host.name, host.device, *sizes))
    show("ranks", ("rank", "node", "host", "device", "memory", "host memory", "cores"), ranks)
    for topology in dict.fromkeys(host.topology for host in hosts if host.topology):  # equal on most machines
        console.print(topology, markup=False, highlight=False)
    networks: list[Sequence[str]] = []
    for node, host in {host.node: host for host in reversed(hosts)}.items():
        for interface in host.interfaces:
            speed = f"{interface.megabits / 1000:g} Gbit/s" if interface.megabits > 0 else "unknown"
            networks.append((str(node), interface.name, interface.address or "-", speed, str(interface.mtu)))
        networks += [(str(node), f"{port.name} ({port.link})", port.state, port.rate, "-") for port in host.rdma]
    show("networks", ("node", "network", "address", "speed", "MTU"), sorted(networks, key=lambda row: int(row[0])))
    if links:
        collectives = []
        for one in links.collectives:
            times = f"{1e6 * one.latency:,.0f} µs", readable_bytes(one.bytes), f"{1e3 * one.seconds:,.1f} ms"
            per_gigabyte = f"{one.seconds / one.bytes * 1e9:.2f} s"
            collectives.append((one.name, *times, f"{one.bus_bandwidth / 1e9:.2f} GB/s", per_gigabyte))
        columns = ("collective", "4 KiB", "message", "time", "bus bandwidth", "1 GB")
        show(f"collectives of all ranks, over {links.backend}", columns, collectives)
        pairs = []
        for pair in links.pairs:
            where = "between nodes" if pair.between_nodes else "same node"
            latency, bandwidth = f"{1e6 * pair.latency:,.0f} µs", f"{pair.bandwidth / 1e9:.2f} GB/s"
            pairs.append((f"{pair.ranks[0]} - {pair.ranks[1]}", where, latency, bandwidth))
        show("point to point, one way", ("ranks", "where", "4 KiB", "bandwidth"), pairs)
        for node, skew in links.skews.items():
            print_line(console, f"the clock of node {node} is {1000 * skew:+,.1f} ms from node 0's", highlight=False)
    disks = []
    for disk in diagnosis.disks:
        speeds = (f"{speed / 1e6:,.0f} MB/s" for speed in (disk.write, disk.read))
        disks.append((disk.folder, readable_bytes(disk.free), *speeds))
    show("disks of rank 0", ("folder", "free", "write", "read"), disks)
    known = {**hosts[0].versions, **({"driver": hosts[0].driver} if hosts[0].driver else {})}
    lines = ["versions: " + ", ".join(f"{name} {version}" for name, version in known.items())]
    if any(host.tf32 is False for host in hosts):
        lines.append("TF32 is off: train.precision: fp32 runs without tensor cores")
    lines += [f"{name}={escape(value)}" for name, value in hosts[0].variables.items()]
    lines += [f"[yellow]change:[/yellow] {escape(line)}" for line in advice] or ["[green]nothing to change[/green]"]
    for line in lines:
        print_line(console, line, highlight=False)
