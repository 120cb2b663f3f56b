"""Bytes on a device while operations run, by phase."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCK = 512  # bytes: CUDA's allocator rounds up to a multiple (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)


class Meter(TorchDispatchMode):
    """Weighs the storages that operations give, until they are freed.

    count: is called with each operator, its arguments and its result.
    """

    def __init__(
        self, device: str = "cuda", block: int = BLOCK, count: Callable[[Any, Any, Any], None] = lambda *_: None
    ):
        super().__init__()
        self.phase, self.peaks, self.now = "begin", defaultdict[str, int](int), 0
        self._device, self._block, self._count = device, block, count
        self._sizes: dict[int, int] = {}

    def begin(self, phase: str) -> None:
        self.phase = phase
        self.peaks[phase] = max(self.peaks[phase], self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # questions about a tensor
            for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self._weigh(leaf)
            self._count(func, args, out)
        return out

    def _weigh(self, tensor: Tensor) -> None:
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if device_type(tensor) != self._device:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._freed, key)
        self._resized(key, storage.nbytes())

    def _resized(self, key: int, size: int) -> None:
        rounded = -(-size // self._block) * self._block
        self.now += rounded - self._sizes[key]
        self._sizes[key] = rounded
        self.peaks[self.phase] = max(self.peaks[self.phase], self.now)

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def __enter__(self) -> Any:
        resize = self._resize = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:  # how FSDP2 frees what it has gathered
            resized = resize(storage, size)
            if storage._cdata in self._sizes:
                self._resized(storage._cdata, storage.nbytes())
            return resized

        torch.UntypedStorage.resize_ = resize_  # pyright: ignore[reportAttributeAccessIssue]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)


def device_type(tensor: Tensor) -> str:
    """Returns where a tensor lies. Asked for its `device`, a fake one dispatches a question."""
    return (getattr(tensor, "fake_device", None) or tensor.device).type
