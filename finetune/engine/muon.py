"""Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon/) for matrices of which a rank may have a part.

    rank 0   rows 0-2 of A, B     ->   all of A   ->   A orthogonalized   ->   rows 0-2 of A, B
    rank 1   rows 3-5 of A, B     ->   all of B   ->   B orthogonalized   ->   rows 3-5 of A, B
             momentum                  Newton-Schulz iteration                 weight decay, update

Momentum, decay and update are element-wise and stay with the shards. The iteration needs a whole matrix, so ranks that
together have all of a model share the matrices out: in a round each gathers one, and each matrix is orthogonalized
once. Dion's repository does this with rows of DTensors (https://github.com/microsoft/dion), Essential AI calls it layer
sharding (https://essential.ai/blog/muon-layer-sharding). Here a part is a `Range`, so rows, columns and pieces of
DeepSpeed's flat groups are one case. Both ways are bf16, the iteration's type: the numbers are those of one process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from finetune.engine.ranks import gather_objects
from finetune.engine.state_shards import Range, ShardPart
from finetune.engine.timing import Stopwatch

# Jordan's coefficients, number of iterations and smallest norm, which are also torch.optim.Muon's defaults.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS, _SMALLEST_NORM = 5, 1e-7

# This rank's parts of matrices that are stepped together, and the flat tensor that all of them are in, if there is one:
# DeepSpeed steps one after the other. As many on every rank, which may have no part of some matrices.
Batches = Iterable[tuple[Tensor | None, list[ShardPart]]]


class Muon(Optimizer):
    """torch.optim.Muon with Nesterov momentum and AdamW's size of update, to the last bit, which also steps shards.

    Without `shared`, every tensor that it steps is a whole matrix. The state is torch's: `momentum_buffer`.
    """

    def __init__(self, params: Any, names: frozenset[str], lr: float, weight_decay: float, momentum: float):
        """names: of the parameters in `params`, by which a rank's parts of them are found."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.names = names
        self.shared: SharedMatrices | None = None

    def share(self, batches: Batches, group: Any, device: torch.device, stopwatch: Stopwatch) -> None:
        """Step the matrices from parts; arguments of `SharedMatrices`. Parts of other parameters are ignored.
        Collective."""
        own = [(flat, [part for part in parts if part.name in self.names]) for flat, parts in batches]
        self.shared = SharedMatrices(own, group, device, stopwatch)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        groups = {id(tensor): group for group in self.param_groups for tensor in group["params"]}
        stepped = [tensor for group in self.param_groups for tensor in group["params"] if tensor.grad is not None]
        for tensor in stepped:
            state = self.state[tensor]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(tensor.grad)
            state["momentum_buffer"].lerp_(tensor.grad, 1 - groups[id(tensor)]["momentum"])
        if self.shared is None:
            for tensor in stepped:
                momentum, group = self.state[tensor]["momentum_buffer"], groups[id(tensor)]
                direction = orthogonalized(tensor.grad.lerp(momentum, group["momentum"]))
                _update(tensor, direction, tensor.shape, group)
            return
        for matrices in self.shared.rounds(groups.keys()):
            directions = self.shared.orthogonalized(matrices, [self._direction(m.part, groups) for m in matrices])
            for matrix, direction in zip(matrices, directions, strict=True):
                if (part := matrix.part) is not None and part.stepped.grad is not None:
                    weight, group = part.view(part.stepped), groups[id(part.stepped)]
                    _update(weight, direction.to(weight.device), matrix.shape, group)

    def _direction(self, part: ShardPart | None, groups: dict[int, dict[str, Any]]) -> Tensor | None:  # (numel,) bf16
        """Returns this rank's part of a matrix to orthogonalize; zeros without a gradient, as other ranks wait."""
        if part is None:
            return None
        stepped = part.stepped
        if stepped.grad is None:
            return part.view(stepped).new_zeros(part.numel, dtype=torch.bfloat16)
        momentum = part.view(self.state[stepped]["momentum_buffer"])
        return part.view(stepped.grad).lerp(momentum, groups[id(stepped)]["momentum"]).bfloat16()


def orthogonalized(matrix: Tensor) -> Tensor:  # of the shape of `matrix`, bf16
    """Returns about U V^T of a matrix U S V^T, by Jordan's quintic iteration on the side with fewer rows.

    Its operations are those of torch.optim.Muon, in the same order and type, or weights would change in their last
    bits. Overwrites a bf16 `matrix`.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16().T if is_tall else matrix.bfloat16()
    x.div_(x.norm().clamp(min=_SMALLEST_NORM))
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if is_tall else x


def iteration_flops(rows: int, columns: int) -> int:
    """Returns the FLOPs to orthogonalize a matrix: three products an iteration."""
    side = min(rows, columns)
    return _ITERATIONS * (2 * 2 * side * rows * columns + 2 * side**3)


def _update(weight: Tensor, direction: Tensor, shape: Sequence[int], group: dict[str, Any]) -> None:
    """Decay and update a matrix of `shape` or a part of it, by AdamW's root mean square (Liu et al. 2025,
    https://arxiv.org/abs/2502.16982, section 2.2)."""
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.add_(direction, alpha=-group["lr"] * (0.2 * math.sqrt(max(shape))))


# --- sharing out matrices


@dataclass(frozen=True)
class Matrix:
    """A matrix in parts."""

    shape: tuple[int, ...]
    held: tuple[Range | None, ...]  # by rank of the group
    part: ShardPart | None  # this rank's

    @functools.cached_property
    def sent(self) -> list[int]:
        """Elements that each rank sends. A range that several have (tensor parallel leaves some matrices whole) is sent
        by the first of them."""
        first: dict[Range | None, int] = {}
        return [r.numel if r and first.setdefault(r, i) == i else 0 for i, r in enumerate(self.held)]

    @functools.cached_property
    def returned(self) -> list[int]:
        """Elements that each rank receives."""
        return [0 if r is None else r.numel for r in self.held]

    @property
    def work(self) -> int:
        """Size of the iteration's products."""
        return math.prod(self.shape) * min(self.shape)


class SharedMatrices:
    """Exchange of whole matrices in a group of ranks."""

    def __init__(self, batches: Batches, group: Any, device: torch.device, stopwatch: Stopwatch):
        """group: None for a rank by itself. device: of exchange and iteration, also if shards are in host memory.
        Collective."""
        self._group, self._device, self._stopwatch = group, device, stopwatch
        self._size, self._rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        self._rounds: list[tuple[Tensor | None, list[list[Matrix]]]] = []
        for flat, parts in batches:
            own = {part.name: part for part in parts}
            ranges = {name: (part.shape, part.range) for name, part in own.items()}
            everyone = gather_objects(ranges, self._size, group)
            shapes = {name: shape for held in everyone for name, (shape, _) in held.items()}
            matrices = [
                Matrix(shape, tuple(held[name][1] if name in held else None for held in everyone), own.get(name))
                for name, shape in sorted(shapes.items())
            ]
            matrices.sort(key=lambda matrix: matrix.work, reverse=True)  # those of a round take about equally long
            rounds = [matrices[i : i + self._size] for i in range(0, len(matrices), self._size)]
            self._rounds.append((flat, rounds))

    def rounds(self, stepped: Container[int]) -> Iterator[list[Matrix]]:
        """Yields the matrices to exchange at a time: rank i of the group orthogonalizes the i-th. stepped: ids of the
        tensors that the optimizer steps now."""
        for flat, rounds in self._rounds:
            if flat is None or id(flat) in stepped:
                yield from rounds

    def orthogonalized(self, matrices: list[Matrix], own: list[Tensor | None]) -> list[Tensor]:
        """Returns this rank's parts of each matrix of a round, orthogonalized; empty if it has none of it. Collective.

        own: its parts before, None if it has none. The list is emptied, to free them.
        """
        mine = matrices[self._rank] if self._rank < len(matrices) else None
        sent = [matrix.sent[self._rank] for matrix in matrices]
        pieces = [piece.to(self._device) for piece, n in zip(own, sent, strict=True) if piece is not None and n]
        arrived = self._exchange(pieces, sent, mine.sent if mine else [])
        own.clear()
        pieces.clear()
        if mine is not None:
            whole = torch.empty(mine.shape, dtype=torch.bfloat16, device=self._device)
            for piece, held in zip(arrived, mine.held, strict=True):
                if held is not None and piece.numel():
                    _runs(whole, held).copy_(piece.view(held.count, held.run))
            arrived.clear()
            whole = orthogonalized(whole).contiguous()
            pieces = [_runs(whole, held).reshape(-1) for held in mine.held if held is not None]
        returned = [matrix.returned[self._rank] for matrix in matrices]
        return self._exchange(pieces, mine.returned if mine else [], returned)[: len(matrices)]

    def _exchange(self, pieces: list[Tensor], sent: list[int], received: list[int]) -> list[Tensor]:
        """Returns the elements from each rank. sent: elements to each rank, in `pieces` one after the other; received:
        from each. Shorter lists end in zeros."""
        sent, received = ([*numels, *[0] * (self._size - len(numels))] for numels in (sent, received))
        leaving = torch.cat([torch.empty(0, dtype=torch.bfloat16, device=self._device), *pieces])
        if self._group is None:
            return list(leaving.split(received))
        arriving = leaving.new_empty(sum(received))
        with self._stopwatch.waiting():
            dist.all_to_all_single(arriving, leaving, received, sent, group=self._group)
        return list(arriving.split(received))


def _runs(matrix: Tensor, held: Range) -> Tensor:  # (count, run)
    """Returns a view of the elements of a range in a contiguous matrix."""
    return matrix.as_strided((held.count, held.run), (held.stride, 1), held.start)


def muon_of(optimizers: Iterable[Optimizer]) -> Muon | None:
    return next((optimizer for optimizer in optimizers if isinstance(optimizer, Muon)), None)
