"""A diagnosis as tables."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from finetune.engine.links import Links
from finetune.planning.cache import readable_bytes
from finetune.planning.doctor.diagnosis import Diagnosis
from finetune.planning.doctor.disk import Disk


def show_diagnosis(console: Console, found: Diagnosis, advice: list[str]) -> None:
    console.print(_ranks(found))
    for topology in dict.fromkeys(host.topology for host in found.hosts if host.topology):  # alike on most machines
        console.print(topology, markup=False, highlight=False)
    console.print(_networks(found))
    if found.links:
        console.print(_collectives(found.links))
        console.print(_pairs(found.links))
        for node, skew in found.links.skews.items():
            console.print(f"the clock of node {node} is {1000 * skew:+,.1f} ms from node 0's", highlight=False)
    console.print(_disks(found.disks))
    console.print(
        "versions: " + ", ".join(f"{name} {v}" for name, v in found.hosts[0].versions.items()), highlight=False
    )
    for name, value in found.hosts[0].variables.items():
        console.print(f"{name}={escape(value)}", highlight=False)
    if not advice:
        console.print("[green]nothing to change[/green]")
    for line in advice:
        console.print(f"[yellow]change:[/yellow] {escape(line)}", highlight=False)


def _ranks(found: Diagnosis) -> Table:
    table = Table(
        "rank", "node", "host", "device", "memory", "host memory", "cores", title="who is here", title_justify="left"
    )
    for host in found.hosts:
        memory = readable_bytes(host.device_memory) if host.device_memory else "-"
        cells = (host.name, host.device, memory, readable_bytes(host.memory), str(host.cores))
        table.add_row(str(host.rank), str(host.node), *map(escape, cells))
    return table


def _networks(found: Diagnosis) -> Table:
    table = Table("node", "network", "address", "speed", "MTU", title="networks", title_justify="left")
    seen = set[int]()
    for host in found.hosts:
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
    title = f"all ranks at once, over {links.backend}"
    table = Table("", "4 KiB", "message", "time", "bus bandwidth", "1 GB", title=title, title_justify="left")
    for one in links.collectives:
        per_gigabyte = one.seconds / one.bytes * 1e9
        cells = (f"{1e6 * one.latency:,.0f} µs", readable_bytes(one.bytes), f"{1e3 * one.seconds:,.1f} ms")
        table.add_row(one.name, *cells, f"{one.bus_bandwidth / 1e9:.2f} GB/s", f"{per_gigabyte:.2f} s")
    return table


def _pairs(links: Links) -> Table:
    table = Table("ranks", "", "4 KiB", "bandwidth", title="from rank to rank, one way", title_justify="left")
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
