"""Communication between the ranks of a launch, measured: collectives, pairs of ranks, clock skew."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from finetune.engine.launch import collective_timeout
from finetune.engine.ranks import gather_objects

_SMALL = 4 * 2**10  # bytes: latency
_LARGE = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}  # bytes: bandwidth
_TRIES = 5
_MOST_PAIRS = 28  # all pairs of 8 ranks; with more, neighbours and the first ranks of the nodes


@dataclass(frozen=True)
class LaunchGroup:
    """The ranks of this launch, without a model. `node` is the index of the machine."""

    rank: int
    world_size: int
    node: int
    device: torch.device

    def gather(self, value: Any) -> list[Any]:
        """Returns a small value from every rank, in rank order."""
        return gather_objects(value, self.world_size)


@dataclass(frozen=True)
class Collective:
    """bus_bandwidth: bytes/s that each link carried, comparable between sizes of the group
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md)."""

    name: str
    latency: float  # seconds, of a message of 4 KiB
    bytes: int  # size of the large message: reduced, or on every rank afterwards
    seconds: float  # for it, on the slowest rank
    bus_bandwidth: float


@dataclass(frozen=True)
class Pair:
    ranks: tuple[int, int]
    between_nodes: bool
    latency: float  # seconds, one way
    bandwidth: float  # bytes/s, one way


@dataclass(frozen=True)
class Links:
    backend: str
    collectives: list[Collective]
    pairs: list[Pair]
    skews: dict[int, float]  # seconds that the clock of a node is ahead of node 0's


def join_group() -> LaunchGroup:
    """Returns the process group from the launcher's environment variables; a group of one without them."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local, per_node = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # gloo for clocks and objects
        dist.init_process_group(backend, timeout=min(collective_timeout(), timedelta(minutes=5)))
    return LaunchGroup(rank, world_size, rank // per_node, device)


def measure_links(group: LaunchGroup) -> Links | None:
    """Measures the links, which takes seconds. Collective. Returns None for one process."""
    if group.world_size == 1:
        return None
    n, large = group.world_size, _LARGE[group.device.type]
    share = large // n // 4 * 4  # bytes of each rank, in fp32
    gathered = {size: torch.zeros(n, size // 4, device=group.device) for size in (_SMALL, share)}  # not timed

    def all_gather(tensor: Tensor) -> None:
        dist.all_gather(list(gathered[tensor.nbytes]), tensor)

    latency, seconds = (_slowest(group, dist.all_reduce, size) for size in (_SMALL, large))
    collectives = [Collective("all-reduce", latency, large, seconds, large * 2 * (n - 1) / n / seconds)]
    latency, seconds = (_slowest(group, all_gather, size) for size in (_SMALL, share))
    collectives.append(Collective("all-gather", latency, share * n, seconds, share * (n - 1) / seconds))
    nodes = group.gather(group.node)
    pairs = []
    for ranks in chosen_pairs(nodes):
        latency, seconds = (_round_trip(group, ranks, size) / 2 for size in (_SMALL, large))
        pairs.append(Pair(ranks, nodes[ranks[0]] != nodes[ranks[1]], latency, large / seconds))
    # Skew of each node against the first: as in NTP, from the fastest of several round trips (RFC 5905, section 8).
    leaders = {node: nodes.index(node) for node in sorted(set(nodes)) if node != nodes[0]}
    skews = {node: _skew(group, rank) for node, rank in leaders.items()}
    return Links("nccl" if group.device.type == "cuda" else "gloo", collectives, pairs, skews)


def chosen_pairs(nodes: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the pairs of ranks to measure, by the node of each.

    >>> chosen_pairs([0, 0, 1, 1])
    [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    """
    every = list(combinations(range(len(nodes)), 2))
    if len(every) <= _MOST_PAIRS:
        return every
    first = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
    leaders = [first[node] for node in sorted(first)]
    ring = list(pairwise(leaders))
    return sorted({*((rank, rank + 1) for rank in range(len(nodes) - 1) if nodes[rank] == nodes[rank + 1]), *ring})


def _slowest(group: LaunchGroup, run: Callable[[Tensor], Any], size: int) -> float:
    """Returns median seconds of a collective on the slowest rank."""
    tensor = torch.zeros(size // 4, device=group.device)  # fp32
    seconds = [_seconds(group, lambda: run(tensor)) for _ in range(_TRIES + 2)][2:]  # the first ones connect
    return max(group.gather(statistics.median(seconds)))


def _seconds(group: LaunchGroup, run: Callable[[], object]) -> float:
    synchronize = torch.cuda.synchronize if group.device.type == "cuda" else lambda: None
    dist.barrier()
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - began


def _round_trip(group: LaunchGroup, ranks: tuple[int, int], size: int) -> float:
    """Returns the median round trip in seconds, on every rank; the other ranks wait."""
    first, second = ranks
    tensor = torch.zeros(size // 4, device=group.device)

    def run() -> None:
        if group.rank == first:
            dist.send(tensor, second)
            dist.recv(tensor, second)
        elif group.rank == second:
            dist.recv(tensor, first)
            dist.send(tensor, first)

    seconds = [_seconds(group, run) for _ in range(_TRIES + 1)][1:]
    return group.gather(statistics.median(seconds))[first]


def _skew(group: LaunchGroup, other: int) -> float:
    round_trips: list[tuple[float, float]] = []  # duration, offset
    clock = torch.zeros(1, dtype=torch.float64)  # on the CPU: gloo
    for _ in range(20):
        if group.rank == 0:
            sent = time.time()
            dist.send(clock, other)
            dist.recv(clock, other)
            received = time.time()
            round_trips.append((received - sent, clock.item() - (sent + received) / 2))
        elif group.rank == other:
            dist.recv(clock, 0)
            clock.fill_(time.time())
            dist.send(clock, 0)
    return group.gather(min(round_trips)[1] if round_trips else 0.0)[0]
