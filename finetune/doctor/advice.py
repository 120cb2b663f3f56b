"""`doctor`: advice for a launch, one function per problem; and the tables of a diagnosis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from finetune.doctor.diagnosis import Diagnosis, Disk, Host
from finetune.engine.launch import TIMEOUT_VARIABLE, collective_timeout
from finetune.engine.links import Links
from finetune.utils import print_line, readable_bytes

_SHARED_MEMORY = 2**30  # bytes; Docker gives 64 MiB
_SKEW = 0.5  # seconds
_SLOW_DISK = 100e6  # bytes/s
_LOW_SPACE = 20 * 2**30  # bytes
_CHECKPOINT = 10e9  # bytes, as an example


def versions_differ(diagnosis: Diagnosis) -> Iterator[str]:
    packages = sorted({package for host in diagnosis.hosts for package in host.versions})
    for package in packages:
        ranks = defaultdict[str, list[int]](list)
        for host in diagnosis.hosts:
            ranks[host.versions.get(package, "none")].append(host.rank)
        if len(ranks) > 1:
            each = ", ".join(f"{version} on rank {_listed(having)}" for version, having in ranks.items())
            yield f"{package} differs: {each}. Install the same version everywhere, or losses will differ"


def devices_differ(diagnosis: Diagnosis) -> Iterator[str]:
    names = sorted({host.device for host in diagnosis.hosts})
    if len(names) > 1:
        yield f"devices differ ({', '.join(names)}): the slowest sets the pace, the smallest the memory"


def tf32_on(diagnosis: Diagnosis) -> Iterator[str]:
    ranks = [host.rank for host in diagnosis.hosts if host.tf32]
    if ranks:
        yield (
            f"TF32 is on for rank {_listed(ranks)}: train.precision: fp32 would round operands of its products to 10 "
            "bits, and losses would not be those of other devices: unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
        )


def threads_unset(diagnosis: Diagnosis) -> Iterator[str]:
    host = diagnosis.hosts[0]
    on_node = sum(other.node == host.node for other in diagnosis.hosts)
    if host.device == "cpu" and on_node > 1 and "OMP_NUM_THREADS" not in host.variables:
        threads = max(1, host.cores // on_node)
        yield f"{on_node} processes share {host.cores} cores: set OMP_NUM_THREADS={threads} to avoid oversubscription"


def small_shared_memory(diagnosis: Diagnosis) -> Iterator[str]:
    for host in _first_of_nodes(diagnosis):
        devices = sum(other.node == host.node for other in diagnosis.hosts)
        if host.device != "cpu" and devices > 1 and host.shared_memory < _SHARED_MEMORY:
            yield (
                f"{host.name}: /dev/shm holds {host.shared_memory / 2**20:,.0f} MiB, and NCCL passes data through it: "
                "start the container with --shm-size=8g or --ipc=host"
            )


def pinning_limited(diagnosis: Diagnosis) -> Iterator[str]:
    for host in _first_of_nodes(diagnosis):
        if host.rdma and host.locked_memory is not None:
            yield (
                f"{host.name}: a process may pin {host.locked_memory / 2**20:,.0f} MiB, and RDMA pins its buffers: "
                "set `ulimit -l unlimited` (containers: --ulimit memlock=-1)"
            )


def rdma_down(diagnosis: Diagnosis) -> Iterator[str]:
    for host in _first_of_nodes(diagnosis):
        for port in host.rdma:
            if "ACTIVE" not in port.state:
                yield f"{host.name}: {port.name} is not active ({port.state}): NCCL uses slower paths"


def interface_unclear(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.nodes == 1:
        return
    variable = "GLOO_SOCKET_IFNAME" if diagnosis.hosts[0].device == "cpu" else "NCCL_SOCKET_IFNAME"
    for host in _first_of_nodes(diagnosis):
        with_address = [interface.name for interface in host.interfaces if interface.address]
        if len(with_address) > 1 and variable not in host.variables:
            yield (
                f"{host.name} has several networks ({', '.join(with_address)}): name the fast one in {variable}, "
                "or ranks may hang on networks that are not connected"
            )


def mtu_differs(diagnosis: Diagnosis) -> Iterator[str]:
    """Compares within one network; different networks may have different MTUs."""
    networks = defaultdict[str, dict[int, list[str]]](lambda: defaultdict(list))
    for host in _first_of_nodes(diagnosis):
        for interface in host.interfaces:
            if interface.network:
                networks[interface.network][interface.mtu].append(f"{host.name}/{interface.name}")
    for network, sizes in networks.items():
        if len(sizes) > 1:
            each = "; ".join(f"{mtu} on {', '.join(names)}" for mtu, names in sorted(sizes.items()))
            yield f"the MTU in {network} differs ({each}): large messages may never arrive; set one MTU"


def long_timeout(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.nodes > 1 and TIMEOUT_VARIABLE not in diagnosis.hosts[0].variables:
        minutes = collective_timeout().total_seconds() / 60
        yield (
            f"a lost connection is detected after {minutes:.0f} minutes: set {TIMEOUT_VARIABLE}=600, or somewhat more "
            "than the longest wait of one rank for another"
        )


def folders_not_shared(diagnosis: Diagnosis) -> Iterator[str]:
    for folder, hosts in diagnosis.not_shared.items():
        yield f"{folder} is not the same folder on {', '.join(hosts)}: runs need a file system that all machines share"


def no_direct_reach(diagnosis: Diagnosis) -> Iterator[str]:
    for host in diagnosis.hosts:
        if host.reaches and not all(host.reaches):
            yield (
                f"rank {host.rank} ({host.device}) has no peer access to {host.reaches.count(False)} of the other "
                "devices: data goes through host memory. Prefer fsdp2 or zero2 to tensor parallelism there"
            )


def clocks_differ(diagnosis: Diagnosis) -> Iterator[str]:
    for node, skew in (diagnosis.links.skews if diagnosis.links else {}).items():
        if abs(skew) > _SKEW:
            yield (
                f"the clock of node {node} is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} node 0's: logs "
                "are not comparable, and files on a shared disk look newer or older than they are; run chrony or ntpd"
            )


def slow_links(diagnosis: Diagnosis) -> Iterator[str]:
    """Finds a pair much slower than others of its kind: a cable, a switch or a route."""
    pairs = diagnosis.links.pairs if diagnosis.links else []
    for between, words in ((False, "within a node"), (True, "between nodes")):
        alike = sorted((pair for pair in pairs if pair.between_nodes == between), key=lambda pair: pair.bandwidth)
        if len(alike) >= 3 and alike[0].bandwidth < alike[len(alike) // 2].bandwidth / 2:
            yield (
                f"ranks {_listed(alike[0].ranks)} reach each other at {alike[0].bandwidth / 1e9:.2f} GB/s, the median "
                f"{words} is {alike[len(alike) // 2].bandwidth / 1e9:.2f}: check that path first"
            )


def slow_disk(diagnosis: Diagnosis) -> Iterator[str]:
    for disk in diagnosis.disks:
        if disk.write < _SLOW_DISK:
            yield (
                f"{disk.folder} writes {disk.write / 1e6:,.0f} MB/s: a checkpoint of {_CHECKPOINT / 1e9:.0f} GB takes "
                f"{_CHECKPOINT / disk.write / 60:.0f} minutes. Put run.dir on a faster disk, or save less often"
            )
        if disk.free < _LOW_SPACE:
            yield f"{disk.folder} has {disk.free / 2**30:,.1f} GiB free: a run that cannot save stops"


RULES: tuple[Callable[[Diagnosis], Iterator[str]], ...] = (
    versions_differ,
    devices_differ,
    tf32_on,
    threads_unset,
    small_shared_memory,
    pinning_limited,
    rdma_down,
    interface_unclear,
    mtu_differs,
    long_timeout,
    folders_not_shared,
    no_direct_reach,
    clocks_differ,
    slow_links,
    slow_disk,
)


def advice(diagnosis: Diagnosis) -> list[str]:
    """Returns all advice, in the order of the table."""
    return [line for rule in RULES for line in rule(diagnosis)]


def _first_of_nodes(diagnosis: Diagnosis) -> list[Host]:
    return [
        next(host for host in diagnosis.hosts if host.node == node)
        for node in sorted({h.node for h in diagnosis.hosts})
    ]


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def show_diagnosis(console: Console, diagnosis: Diagnosis, advice: list[str]) -> None:
    console.print(_ranks(diagnosis))
    for topology in dict.fromkeys(host.topology for host in diagnosis.hosts if host.topology):  # equal on most machines
        console.print(topology, markup=False, highlight=False)
    console.print(_networks(diagnosis))
    if diagnosis.links:
        console.print(_collectives(diagnosis.links))
        console.print(_pairs(diagnosis.links))
        for node, skew in diagnosis.links.skews.items():
            print_line(console, f"the clock of node {node} is {1000 * skew:+,.1f} ms from node 0's", highlight=False)
    console.print(_disks(diagnosis.disks))
    print_line(
        console,
        "versions: " + ", ".join(f"{name} {v}" for name, v in diagnosis.hosts[0].versions.items()),
        highlight=False,
    )
    if any(host.tf32 is False for host in diagnosis.hosts):
        print_line(console, "TF32 is off: train.precision: fp32 runs without tensor cores", highlight=False)
    for name, value in diagnosis.hosts[0].variables.items():
        print_line(console, f"{name}={escape(value)}", highlight=False)
    if not advice:
        console.print("[green]nothing to change[/green]")
    for line in advice:
        print_line(console, f"[yellow]change:[/yellow] {escape(line)}", highlight=False)


def _ranks(diagnosis: Diagnosis) -> Table:
    table = Table(
        "rank", "node", "host", "device", "memory", "host memory", "cores", title="ranks", title_justify="left"
    )
    for host in diagnosis.hosts:
        memory = readable_bytes(host.device_memory) if host.device_memory else "-"
        cells = (host.name, host.device, memory, readable_bytes(host.memory), str(host.cores))
        table.add_row(str(host.rank), str(host.node), *map(escape, cells))
    return table


def _networks(diagnosis: Diagnosis) -> Table:
    table = Table("node", "network", "address", "speed", "MTU", title="networks", title_justify="left")
    seen = set[int]()
    for host in diagnosis.hosts:
        if host.node in seen:
            continue
        seen.add(host.node)
        for interface in host.interfaces:
            speed = f"{interface.megabits / 1000:g} Gbit/s" if interface.megabits > 0 else "unknown"
            table.add_row(str(host.node), interface.name, interface.address or "-", speed, str(interface.mtu))
        for port in host.rdma:
            table.add_row(str(host.node), f"{port.name} ({port.link})", port.state, port.rate, "-")
    return table


def _collectives(links: Links) -> Table:
    title = f"collectives of all ranks, over {links.backend}"
    table = Table("collective", "4 KiB", "message", "time", "bus bandwidth", "1 GB", title=title, title_justify="left")
    for one in links.collectives:
        per_gigabyte = one.seconds / one.bytes * 1e9
        cells = (f"{1e6 * one.latency:,.0f} µs", readable_bytes(one.bytes), f"{1e3 * one.seconds:,.1f} ms")
        table.add_row(one.name, *cells, f"{one.bus_bandwidth / 1e9:.2f} GB/s", f"{per_gigabyte:.2f} s")
    return table


def _pairs(links: Links) -> Table:
    table = Table("ranks", "where", "4 KiB", "bandwidth", title="point to point, one way", title_justify="left")
    for pair in links.pairs:
        where = "between nodes" if pair.between_nodes else "same node"
        latency, bandwidth = f"{1e6 * pair.latency:,.0f} µs", f"{pair.bandwidth / 1e9:.2f} GB/s"
        table.add_row(f"{pair.ranks[0]} - {pair.ranks[1]}", where, latency, bandwidth)
    return table


def _disks(disks: list[Disk]) -> Table:
    table = Table("folder", "free", "write", "read", title="disks of rank 0", title_justify="left")
    for disk in disks:
        speeds = (f"{speed / 1e6:,.0f} MB/s" for speed in (disk.write, disk.read))
        table.add_row(escape(disk.folder), readable_bytes(disk.free), *speeds)
    return table
