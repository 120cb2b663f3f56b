"""What a device does while operations run: bytes that lie there, waits for it, copies, casts, collectives; by phase."""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

BLOCK = 512  # bytes: CUDA's allocator rounds up to a multiple (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)


@dataclass
class PhaseCounts:
    """What the device did in a phase."""

    peak_bytes: int = 0
    end_bytes: int = 0
    waits: Counter[str] = field(default_factory=Counter)  # of the process for the device, by where they are
    host_copies: Counter[str] = field(default_factory=Counter)  # between device and host, by direction
    host_copy_bytes: int = 0
    cast_bytes: int = 0  # read and written by changes of type on the device
    collectives: Counter[tuple[str, str]] = field(default_factory=Counter)  # by name and device
    collective_bytes: Counter[str] = field(default_factory=Counter)  # of what each is given, by name


_ACTIVE: list[Meter] = []


def waits(what: str) -> None:
    """Count that the process waits for the device."""
    for meter in _ACTIVE:
        meter.wait(what)


class Meter(TorchDispatchMode):
    """Weighs the storages that operations give, until they are freed; counts waits, copies, casts and collectives.

    count: is called with each operator, its arguments and its result. fakes: makes fake tensors, without being entered:
    operators pass one mode instead of two, an eighth of the time that they take.
    """

    def __init__(
        self,
        device: str = "cuda",
        block: int = BLOCK,
        count: Callable[[Any, Any, Any], None] | None = None,
        fakes: FakeTensorMode | None = None,
    ):
        super().__init__()
        self._count, self._fakes = count, fakes
        self.phase, self.phases = "begin", defaultdict[str, PhaseCounts](PhaseCounts)
        self.told: Callable[[str], None] = lambda phase: None  # of each phase that begins
        self.may_read = False  # whether values may be asked for, which are then made up
        self.now = self.peak = 0  # bytes
        self.at_peak: Counter[str] = Counter()  # bytes by shape, type and phase of what was there
        self._device, self._block, self._listed = device, block, 0
        self._sizes: dict[int, int] = {}
        self._what: dict[int, str] = {}

    def begin(self, phase: str) -> None:
        self.phases[self.phase].end_bytes = self.now
        self.phase = phase
        self.told(phase)
        self.phases[phase].peak_bytes = max(self.phases[phase].peak_bytes, self.now)

    @property
    def counts(self) -> PhaseCounts:
        return self.phases[self.phase]

    def wait(self, what: str) -> None:
        self.counts.waits[f"{what} in {_caller()}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # questions about a tensor
            return self._call(func, types, args, kwargs)
        if func is torch.ops.aten._to_copy.default and getattr(args[0], "constant", None) is not None:
            args[0].constant = None  # fake tensors that are made of numbers keep them, and would copy these as well
        out = self._call(func, types, args, kwargs)
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._weigh(leaf)
        if self._count is not None:
            self._count(func, args, out)
        if func is torch.ops.aten._to_copy.default or func is torch.ops.aten.copy_.default:
            self._copied(func, args, kwargs or {}, out)
        elif func.namespace in ("c10d", "_c10d_functional"):
            self._collective(func, args)
        return out

    def _call(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self._fakes is None:
            return func(*args, **(kwargs or {}))
        return self._fakes.dispatch(func, types, args, kwargs or {})

    def _copied(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        source, target = (args[1], args[0]) if func is torch.ops.aten.copy_.default else (args[0], out)
        here, there = _device_type(source), _device_type(target)
        if here == there == self._device and source.dtype != target.dtype:
            self.counts.cast_bytes += source.nbytes + target.nbytes
        if here != there and "meta" not in (here, there):
            self.counts.host_copies[f"{here} to {there}"] += 1
            self.counts.host_copy_bytes += target.nbytes
            if not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
                self.wait(f"copy from {here} to {there}")

    def _collective(self, func: Any, args: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        name = func.name().split("::")[1]
        for kind in {_device_type(tensor) for tensor in tensors}:
            self.counts.collectives[name, kind] += 1
        self.counts.collective_bytes[name] += max((tensor.nbytes for tensor in tensors), default=0)

    # --- bytes

    def _weigh(self, tensor: Tensor) -> None:
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if _device_type(tensor) != self._device:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            self._what[key] = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}, {self.phase}"
            weakref.finalize(storage, self._freed, key)
        self._resized(key, storage.nbytes())

    def _resized(self, key: int, size: int) -> None:
        rounded = -(-size // self._block) * self._block
        self.now += rounded - self._sizes[key]
        self._sizes[key] = rounded
        counts = self.counts
        counts.peak_bytes = max(counts.peak_bytes, self.now)
        if self.now > self.peak:
            self.peak = self.now
            if self.now > 1.01 * self._listed:  # a list of all storages at each new peak would take most of the time
                self._listed, self.at_peak = self.now, Counter()
                for one, held in self._sizes.copy().items():  # a garbage collection may free some meanwhile
                    self.at_peak[self._what.get(one, "freed meanwhile")] += held

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        del self._what[key]

    def __enter__(self) -> Any:
        resize = self._resize = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:  # how FSDP2 frees what it has gathered
            resized = resize(storage, size)
            if storage._cdata in self._sizes:
                self._resized(storage._cdata, storage.nbytes())
            return resized

        torch.UntypedStorage.resize_ = resize_  # pyright: ignore[reportAttributeAccessIssue]
        _ACTIVE.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _ACTIVE.remove(self)
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)


def _device_type(tensor: Tensor) -> str:
    """Returns where a tensor lies. Asked for its `device`, a fake one dispatches a question."""
    return (getattr(tensor, "fake_device", None) or tensor.device).type


_OURS = (__file__, str(Path(__file__).with_name("fake_devices.py")))
_PLUMBING = tuple(f"torch{os.sep}{part}" for part in ("_dynamo", "_ops.py", "_compile.py", "utils", "_subclasses"))


def _caller() -> str:
    """Returns file and line of the innermost frame outside of torch; in autograd's thread there may be none."""
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    others = [place for place in frames if place[0] not in _OURS]
    below = [place for place in others if not any(part in place[0] for part in _PLUMBING)]
    file, line = next((place for place in below if f"{os.sep}torch{os.sep}" not in place[0]), below[0])
    return f"{'/'.join(Path(file).parts[-2:])}:{line}"
