"""Meters of dispatched operators: bytes of storages by phase, and operators by part of a micro-batch."""

from __future__ import annotations

import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

# torch documents both, and has them under no other name.
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode  # as above
from torch.utils._pytree import tree_leaves  # as this function

BLOCK = 512  # bytes: CUDA's allocator rounds up to a multiple (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)
_PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm")
_PRODUCTS += ("grouped_mm_fallback", "grouped_mm_fallback_backward")  # transformers'
# FLOPs a byte. Below, as of adapters of low rank, a product waits for memory: each GPU of engine/hardware.yaml has more
# in 16 bits.
_FEW_FLOPS = 100
_ATTENTION = ("scaled_dot_product", "attention", "varlen")
_FREE = ("detach", "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view", "set_")
_FREE += ("resize_", "record_stream", "lift_fresh", "sym_size", "is_same_size", "_local_scalar_dense")


def device_type(tensor: Tensor) -> str:
    """Returns the device type of a tensor; reading `device` of a fake one would dispatch an operator."""
    return (getattr(tensor, "fake_device", None) or tensor.device).type


class Meter(TorchDispatchMode):
    """Weighs the storages that operators return, until they are freed.

    count: called with each operator, the arguments that it reads, and its result.
    """

    def __init__(
        self, device: str = "cuda", block: int = BLOCK, count: Callable[[Any, Any, Any], None] = lambda *_: None
    ):
        super().__init__()
        self.phase, self.peaks, self.now = "begin", defaultdict[str, int](int), 0
        self._device, self._block, self._count = device, block, count
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}  # the storages, by the keys of their sizes

    def begin(self, phase: str) -> None:
        self.phase = phase
        self.peaks[phase] = max(self.peaks[phase], self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):  # more often than all others
            return args[0].fake_device
        named = kwargs or {}
        # torch 2.11 has no shapes for this operator.
        out = named["out"] if func is torch.ops.aten.addmm.dtype_out else func(*args, **named)
        if func.namespace != "prim":  # properties of a tensor
            for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
                # `to_local` would dispatch an operator, and this is called from within one.
                tensor = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
                if not isinstance(tensor, Tensor) or device_type(tensor) != self._device:
                    continue
                storage = tensor.untyped_storage()
                key = storage._cdata  # of the storage itself: torch makes a new Python object for it at each access
                if key not in self._sizes:
                    self._sizes[key] = 0
                    self._alive[key] = weakref.ref(storage, partial(self._freed, key))
                self._resized(key, storage.nbytes())
            self._count(func, args[1:] if named.get("beta") == 0 else args, out)
        return out

    def _resized(self, key: int, size: int) -> None:
        rounded = -(-size // self._block) * self._block
        self.now += rounded - self._sizes[key]
        self._sizes[key] = rounded
        self.peaks[self.phase] = max(self.peaks[self.phase], self.now)

    def _freed(self, key: int, _storage: object) -> None:
        self.now -= self._sizes.pop(key)
        del self._alive[key]

    def __enter__(self) -> Any:
        resize = self._resize = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:  # how FSDP2 frees gathered weights
            resized = resize(storage, size)
            if storage._cdata in self._sizes:
                self._resized(storage._cdata, storage.nbytes())
            return resized

        torch.UntypedStorage.resize_ = resize_  # pyright: ignore[reportAttributeAccessIssue]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)


@dataclass(frozen=True)
class Work:
    """Operators of a part of a micro-batch, and the bytes that they read and write: (bytes of one, number)."""

    operators: float = 0.0  # that compute
    views: float = 0.0
    moved: tuple[tuple[float, float], ...] = ()
    multiplied: tuple[tuple[float, float], ...] = ()  # by matrix products

    def times(self, operators: float, tokens: float = 1.0) -> Work:
        """Returns this work `operators` times. tokens: factor on the size of each operator."""
        both = self.moved, self.multiplied
        moved, multiplied = (tuple((size * tokens, count * operators) for size, count in sizes) for sizes in both)
        return Work(self.operators * operators, self.views * operators, moved, multiplied)

    @property
    def bytes(self) -> float:
        return sum(size * count for size, count in self.moved)


def together(parts: Sequence[Work]) -> Work:
    moved = tuple(one for part in parts for one in part.moved)
    multiplied = tuple(one for part in parts for one in part.multiplied)
    return Work(sum(part.operators for part in parts), sum(part.views for part in parts), moved, multiplied)


class _Kind(NamedTuple):
    name: str
    is_free: bool  # it moves nothing
    is_attention: bool


@functools.cache
def _kind(func: Any) -> _Kind:
    name = func.name().partition("::")[2].partition(".")[0]
    return _Kind(name, func.is_view or name in _FREE, any(word in name for word in _ATTENTION))


class OperatorCounter:
    """Counts operators by part: those that the host starts, and the bytes of those that wait for memory.

    FLOPs of matrix products and of attention are in `models/flops.py`.
    """

    def __init__(self) -> None:
        self.part = ""
        self._operators, self._views = defaultdict[str, int](int), defaultdict[str, int](int)
        # {(part, whether a product): {power of two: [bytes, operators]}}
        self._sizes = defaultdict[tuple[str, bool], dict[int, list[float]]](dict)

    def work(self, part: str) -> Work:
        moved, multiplied = (
            tuple((size / n, n) for size, n in self._sizes[part, is_product].values()) for is_product in (False, True)
        )
        return Work(self._operators[part], self._views[part], moved, multiplied)

    def count(self, func: Any, args: Any, out: Any) -> None:
        """Counts an operator that was called with these arguments; to be given to a `Meter`."""
        kind = _kind(func)
        if kind.is_free:
            self._views[self.part] += 1
            return
        self._operators[self.part] += 1
        if kind.is_attention:
            return
        size = sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in _tensors((*args, out)))
        is_product = kind.name in _PRODUCTS and _flops(kind.name, args) >= _FEW_FLOPS * size
        sums = self._sizes[self.part, is_product].setdefault(int(size).bit_length(), [0.0, 0])
        sums[0] += size
        sums[1] += 1


def _flops(name: str, args: Any) -> float:
    """Returns the FLOPs of a product of two matrices, its last tensors; inf for other products."""
    if name not in ("mm", "addmm", "addmm_"):
        return math.inf
    left, right = _tensors(args)[-2:]
    return 2.0 * left.numel() * right.shape[-1]


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Returns the tensors among values and in their lists, without those of other containers."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += _tensors(value)
    return tensors
