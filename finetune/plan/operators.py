"""Operators that a part of a micro-batch executes, counted while `timeline.py` runs it on fake tensors.

FLOPs of matrix products and of attention are in `models/flops.py`; here are how many operators there are, each of
which the host has to start, and the bytes that those without a product read and write.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm")
_PRODUCTS += ("grouped_mm_fallback", "grouped_mm_fallback_backward")  # transformers'
_ATTENTION = ("scaled_dot_product", "attention", "varlen")


@dataclass(frozen=True)
class Work:
    """Bytes are those that are read and written, by the size of an operator: (bytes of one, how many such)."""

    operators: float = 0.0  # that compute
    views: float = 0.0
    moved: tuple[tuple[float, float], ...] = ()
    multiplied: tuple[tuple[float, float], ...] = ()  # of matrix products

    def times(self, operators: float, tokens: float = 1.0) -> Work:
        """Returns so many times this work. tokens: by which each operator is larger."""
        both = self.moved, self.multiplied
        moved, multiplied = (tuple((size * tokens, count * operators) for size, count in sizes) for sizes in both)
        return Work(self.operators * operators, self.views * operators, moved, multiplied)

    @property
    def bytes(self) -> float:
        return sum(size * count for size, count in self.moved)


NO_WORK = Work()


def together(parts: Sequence[Work]) -> Work:
    moved = tuple(one for part in parts for one in part.moved)
    multiplied = tuple(one for part in parts for one in part.multiplied)
    return Work(sum(part.operators for part in parts), sum(part.views for part in parts), moved, multiplied)


@dataclass
class _Counts:
    operators: int = 0
    views: int = 0
    # By powers of two: bytes, operators.
    moved: dict[int, list[float]] = field(default_factory=dict)
    multiplied: dict[int, list[float]] = field(default_factory=dict)


class OperatorCounter(TorchDispatchMode):
    """Counts what is dispatched, part by part."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[str, _Counts] = {}
        self.part = ""

    def work(self, part: str) -> Work:
        counts = self._parts.get(part, _Counts())
        moved, multiplied = (
            tuple((size / n, n) for size, n in sizes.values()) for sizes in (counts.moved, counts.multiplied)
        )
        return Work(counts.operators, counts.views, moved, multiplied)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # questions about a tensor
            self.count(func, args, out)
        return out

    def count(self, func: Any, args: Any, out: Any) -> None:
        """func: an operator that was called with these arguments. Another mode may call this, instead of two modes."""
        counts, name = self._parts.setdefault(self.part, _Counts()), func.name().partition("::")[2].partition(".")[0]
        if func.is_view or name in _FREE:
            counts.views += 1
            return
        counts.operators += 1
        if any(word in name for word in _ATTENTION):
            return
        size = sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in _tensors((*args, out)))
        sizes = counts.multiplied if name in _PRODUCTS else counts.moved
        of_size = sizes.setdefault(int(size).bit_length(), [0.0, 0])
        of_size[0] += size
        of_size[1] += 1


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


_FREE = ("detach", "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view", "set_")
_FREE += ("resize_", "record_stream", "lift_fresh", "sym_size", "is_same_size", "_local_scalar_dense")
