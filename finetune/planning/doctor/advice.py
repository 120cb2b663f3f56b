"""What the facts of a launch say that a person should change: one function for each thing that goes wrong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from finetune.engine.timeout import VARIABLE, collective_timeout
from finetune.planning.doctor.diagnosis import Diagnosis
from finetune.planning.doctor.host import Host

_SHARED_MEMORY = 2**30  # bytes; Docker gives 64 MiB
_SKEW = 0.5  # seconds
_SLOW_DISK = 100e6  # bytes/s
_ROOM = 20 * 2**30  # bytes
_CHECKPOINT = 10e9  # bytes, as an example


def versions_differ(found: Diagnosis) -> Iterator[str]:
    packages = sorted({package for host in found.hosts for package in host.versions})
    for package in packages:
        ranks = defaultdict[str, list[int]](list)
        for host in found.hosts:
            ranks[host.versions.get(package, "none")].append(host.rank)
        if len(ranks) > 1:
            each = ", ".join(f"{version} on rank {_listed(of)}" for version, of in ranks.items())
            yield f"{package} differs: {each}. Install the same everywhere, or losses will differ"


def devices_differ(found: Diagnosis) -> Iterator[str]:
    names = sorted({host.device for host in found.hosts})
    if len(names) > 1:
        yield f"devices differ ({', '.join(names)}): the slowest sets the pace, the smallest the memory"


def threads_unset(found: Diagnosis) -> Iterator[str]:
    host = found.hosts[0]
    on_node = sum(other.node == host.node for other in found.hosts)
    if host.device == "cpu" and on_node > 1 and "OMP_NUM_THREADS" not in host.variables:
        share = max(1, host.cores // on_node)
        yield f"{on_node} processes share {host.cores} cores: set OMP_NUM_THREADS={share}, or their threads fight"


def small_shared_memory(found: Diagnosis) -> Iterator[str]:
    for host in _first_of_nodes(found):
        devices = sum(other.node == host.node for other in found.hosts)
        if host.device != "cpu" and devices > 1 and host.shared_memory < _SHARED_MEMORY:
            yield (
                f"{host.name}: /dev/shm holds {host.shared_memory / 2**20:,.0f} MiB, and NCCL passes data through it: "
                "start the container with --shm-size=8g or --ipc=host"
            )


def pinning_limited(found: Diagnosis) -> Iterator[str]:
    for host in _first_of_nodes(found):
        if host.rdma and host.locked_memory is not None:
            yield (
                f"{host.name}: a process may pin {host.locked_memory / 2**20:,.0f} MiB, and RDMA pins its buffers: "
                "set `ulimit -l unlimited` (containers: --ulimit memlock=-1)"
            )


def rdma_down(found: Diagnosis) -> Iterator[str]:
    for host in _first_of_nodes(found):
        for port in host.rdma:
            if "ACTIVE" not in port.state:
                yield f"{host.name}: {port.name} is not active ({port.state}): NCCL goes round it, more slowly"


def interface_unclear(found: Diagnosis) -> Iterator[str]:
    if found.nodes == 1:
        return
    variable = "GLOO_SOCKET_IFNAME" if found.hosts[0].device == "cpu" else "NCCL_SOCKET_IFNAME"
    for host in _first_of_nodes(found):
        with_address = [interface.name for interface in host.interfaces if interface.address]
        if len(with_address) > 1 and variable not in host.variables:
            yield (
                f"{host.name} has several networks ({', '.join(with_address)}): name the fast one in {variable}, "
                "or ranks may wait for each other on two that do not meet"
            )


def mtu_differs(found: Diagnosis) -> Iterator[str]:
    """Within one network: other networks may well have other sizes."""
    networks = defaultdict[str, dict[int, list[str]]](lambda: defaultdict(list))
    for host in _first_of_nodes(found):
        for interface in host.interfaces:
            if interface.network:
                networks[interface.network][interface.mtu].append(f"{host.name}/{interface.name}")
    for network, sizes in networks.items():
        if len(sizes) > 1:
            each = "; ".join(f"{mtu} on {', '.join(names)}" for mtu, names in sorted(sizes.items()))
            yield f"packets in {network} differ in size (MTU {each}): large messages may never arrive; set one MTU"


def long_timeout(found: Diagnosis) -> Iterator[str]:
    if found.nodes > 1 and VARIABLE not in found.hosts[0].variables:
        minutes = collective_timeout().total_seconds() / 60
        yield (
            f"a link that is cut shows after {minutes:.0f} minutes: set {VARIABLE}=600, or somewhat more than the "
            "longest wait of one rank for another"
        )


def folders_not_shared(found: Diagnosis) -> Iterator[str]:
    for folder, hosts in found.not_shared.items():
        yield f"{folder} is another folder on {', '.join(hosts)}: runs need one that all machines share"


def no_direct_reach(found: Diagnosis) -> Iterator[str]:
    for host in found.hosts:
        if host.reaches and not all(host.reaches):
            yield (
                f"rank {host.rank} ({host.device}) does not reach {host.reaches.count(False)} of its neighbours "
                "directly: data goes through the CPU's memory. Prefer fsdp2 or zero2 to tensor parallelism there"
            )


def clocks_differ(found: Diagnosis) -> Iterator[str]:
    for node, skew in (found.links.skews if found.links else {}).items():
        if abs(skew) > _SKEW:
            yield (
                f"the clock of node {node} is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} node 0's: logs "
                "do not line up, and caches on a shared disk look newer or older than they are; start chrony or ntpd"
            )


def slow_links(found: Diagnosis) -> Iterator[str]:
    """One pair far behind its like: a cable, a switch or a route."""
    pairs = found.links.pairs if found.links else []
    for between, words in ((False, "within a node"), (True, "between nodes")):
        alike = sorted((pair for pair in pairs if pair.between_nodes == between), key=lambda pair: pair.bandwidth)
        if len(alike) >= 3 and alike[0].bandwidth < alike[len(alike) // 2].bandwidth / 2:
            yield (
                f"ranks {_listed(alike[0].ranks)} reach each other at {alike[0].bandwidth / 1e9:.2f} GB/s, the median "
                f"{words} is {alike[len(alike) // 2].bandwidth / 1e9:.2f}: look at that path first"
            )


def slow_disk(found: Diagnosis) -> Iterator[str]:
    for disk in found.disks:
        if disk.write < _SLOW_DISK:
            yield (
                f"{disk.folder} takes {disk.write / 1e6:,.0f} MB/s: a checkpoint of {_CHECKPOINT / 1e9:.0f} GB takes "
                f"{_CHECKPOINT / disk.write / 60:.0f} minutes. Put run.dir on a faster disk, or save less often"
            )
        if disk.free < _ROOM:
            yield f"{disk.folder} has {disk.free / 2**30:,.1f} GiB left: a run that cannot save stops"


RULES: tuple[Callable[[Diagnosis], Iterator[str]], ...] = (
    versions_differ,
    devices_differ,
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


def advice(found: Diagnosis) -> list[str]:
    """Everything worth changing, in the order of the table; empty where nothing is."""
    return [line for rule in RULES for line in rule(found)]


def _first_of_nodes(found: Diagnosis) -> list[Host]:
    return [next(host for host in found.hosts if host.node == node) for node in sorted({h.node for h in found.hosts})]


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
