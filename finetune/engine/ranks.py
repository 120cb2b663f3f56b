"""Collectives for everything above a backend: sums, and values of every rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import cache
from itertools import product
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from finetune.engine.parallelism import DIMENSIONS, Parallelism
from finetune.engine.timing import Stopwatch
from finetune.utils import copied_to

BUCKET_BYTES = 25 * 2**20  # gradients per all-reduce, as DDP's buckets
SIDE_TIMEOUT = timedelta(hours=6)  # for the slowest rank's disk, in a thread outside the training loop


class Ranks:
    """The processes of a run. Every method is collective."""

    def __init__(self, accelerator: Accelerator, parallelism: Parallelism, stopwatch: Stopwatch):
        self._accelerator, self._stopwatch = accelerator, stopwatch
        self._size, self._device = accelerator.num_processes, accelerator.device
        self._rank = accelerator.process_index
        self._copies = parallelism.tensor  # ranks that compute the same values

    def sum(self, *values: float | Tensor) -> list[float]:
        """Returns each value summed over all ranks, in fp64. One collective, one synchronization."""
        numbers = torch.tensor([v for v in values if not isinstance(v, Tensor)], dtype=torch.float64)
        tensors = [v.detach().double() for v in values if isinstance(v, Tensor)]
        copied = [copied_to(numbers, self._device)] if len(numbers) else []  # one copy for all
        local = torch.cat([*([torch.stack(tensors)] if tensors else []), *copied])
        summed = self._all_reduced(local).tolist()
        of_tensors, of_numbers = iter(summed[: len(tensors)]), iter(summed[len(tensors) :])
        return [next(of_tensors if isinstance(v, Tensor) else of_numbers) for v in values]

    def total(self, named: Mapping[str, Tensor], largest: Collection[str] = ()) -> dict[str, Tensor]:
        """Returns each tensor summed over all ranks, in fp64 on the CPU. One collective, one synchronization.

        Ranks that compute the same values (tensor parallel) count as one. Tensors may lie on the device or the CPU.
        largest: names of numbers () of which the largest of any rank is returned.
        """
        if largest:  # each rank has an element of its own, and the others add 0 to it
            own = {name: named[name].new_zeros(self._size) for name in largest}
            for name, of_ranks in own.items():
                of_ranks[self._rank] = named[name].detach() * self._copies
            return {
                name: tensor.amax() if name in largest else tensor
                for name, tensor in self.total({**named, **own}).items()
            }
        of_device = [name for name, tensor in named.items() if tensor.device.type == self._device.type]
        names = [*of_device, *(name for name in named if name not in of_device)]
        flat = [(named[name].detach().double() / self._copies).reshape(-1) for name in names]
        here, there = flat[: len(of_device)], flat[len(of_device) :]
        local = torch.cat([*here, *([copied_to(torch.cat(there), self._device)] if there else [])])
        pieces = self._all_reduced(local).cpu().split([part.numel() for part in flat])
        summed = {name: piece.view(named[name].shape) for name, piece in zip(names, pieces, strict=True)}
        return {name: summed[name] for name in named}

    def gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        """Returns the numbers of every rank, equally many, in rank order, in fp64. One collective."""
        if self._size == 1:
            return [list(values)]
        local = copied_to(torch.tensor(values, dtype=torch.float64), self._device)
        everyone = [torch.empty_like(local) for _ in range(self._size)]
        with self._stopwatch.waiting():
            torch.distributed.all_gather(everyone, local)
        return torch.stack(everyone).tolist()

    def gather(self, value: Any) -> list[Any]:
        """Returns a small picklable value of every rank, in rank order; in memory, between our own processes."""
        return gather_objects(value, self._size)

    def side_gather(self) -> Callable[[Any], list[Any]]:
        """Returns a `gather` over a separate process group on the CPU, for a thread outside the loop."""
        group = torch.distributed.new_group(backend="gloo", timeout=SIDE_TIMEOUT) if self._size > 1 else None
        return lambda value: gather_objects(value, self._size, group)

    def barrier(self) -> None:
        self._accelerator.wait_for_everyone()

    def _all_reduced(self, local: Tensor) -> Tensor:
        if self._size > 1:
            with self._stopwatch.waiting():
                torch.distributed.all_reduce(local)
        return local


def group_along(dimension: str, parallelism: Parallelism, rank: int) -> Any:
    """Returns the ranks that differ from this one in one dimension only; None if it has size 1. Collective."""
    return group_over((dimension,), parallelism, rank)


def group_over(dimensions: tuple[str, ...], parallelism: Parallelism, rank: int) -> Any:
    """Returns the ranks that differ from this one in these dimensions only; None if there are no others. Collective."""
    if all(getattr(parallelism, dimension) == 1 for dimension in dimensions):
        return None
    return _groups(torch.distributed.group.WORLD, dimensions, parallelism)[rank]


@cache
def _groups(world: Any, dimensions: tuple[str, ...], parallelism: Parallelism) -> dict[int, Any]:
    """Returns the groups over dimensions by rank, created once in the process group `world`. Collective."""
    others = [name for name in DIMENSIONS if name not in dimensions]
    groups: dict[int, Any] = {}
    for coordinates in product(*(range(getattr(parallelism, name)) for name in others)):
        fixed = dict(zip(others, coordinates, strict=True))
        ranks = [r for r in range(parallelism.processes) if fixed.items() <= parallelism.coordinates(r).items()]
        groups |= dict.fromkeys(ranks, torch.distributed.new_group(ranks))
    return groups


def gather_objects(value: Any, size: int, group: Any = None) -> list[Any]:
    """Returns the value of each of `size` ranks. Collective."""
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def all_reduced(tensor: Tensor, *groups: Any) -> Tensor:
    """Returns the sum over the ranks of each group in turn. Collective."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    for group in groups:
        torch.distributed.all_reduce(total, group=group)
    return total


def sum_gradients(gradients: list[Tensor], group: Any, device: torch.device) -> None:
    """Sum gradients over a group in place, by all-reduces of flat buckets on `device`. Collective."""
    bucket: list[Tensor] = []
    for i, gradient in enumerate(gradients):
        bucket.append(gradient)
        is_full = sum(one.nbytes for one in bucket) >= BUCKET_BYTES
        if is_full or i == len(gradients) - 1 or gradients[i + 1].dtype != gradient.dtype:
            flat = torch.cat([one.reshape(-1) for one in bucket]).to(device)
            torch.distributed.all_reduce(flat, group=group)
            pieces = flat.split([one.numel() for one in bucket])
            torch._foreach_copy_(bucket, [piece.view(one.shape) for piece, one in zip(pieces, bucket, strict=True)])
            bucket = []
