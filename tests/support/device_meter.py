"""What a device does while operations run: bytes on it, waits for it, copies, casts, collectives; by phase."""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from finetune.plan import meter
from finetune.plan.meter import BLOCK, Meter, device_type


@dataclass
class PhaseCounts:
    """What the device did in a phase."""

    waits: Counter[str] = field(default_factory=Counter)  # of the process for the device, by where they are
    host_copies: Counter[str] = field(default_factory=Counter)  # between device and host, by direction
    host_copy_bytes: int = 0
    cast_bytes: int = 0  # read and written by changes of type on the device
    collectives: Counter[tuple[str, str]] = field(default_factory=Counter)  # by name and device
    collective_bytes: Counter[str] = field(default_factory=Counter)  # of what each is given, by name
    operators: Counter[str] = field(default_factory=Counter)  # that torch dispatches, views included, by name


_ACTIVE: list[DeviceMeter] = []


def waits(what: str) -> None:
    """Count that the process waits for the device."""
    for one in _ACTIVE:
        one.wait(what)


class DeviceMeter(Meter):
    """Weighs storages, lists those of the highest peak, and counts waits, copies, casts and collectives."""

    def __init__(self, block: int = BLOCK):
        super().__init__("cuda", block)
        self.phases = defaultdict[str, PhaseCounts](PhaseCounts)
        self.may_read = False  # whether values may be asked for, which are then made up
        self.at_peak: Counter[str] = Counter()  # bytes by shape, type and phase of what was there
        self._listed = 0
        self._what: dict[int, str] = {}

    @property
    def counts(self) -> PhaseCounts:
        return self.phases[self.phase]

    def wait(self, what: str) -> None:
        self.counts.waits[f"{what} in {_caller()}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and getattr(args[0], "constant", None) is not None:
            args[0].constant = None  # fake tensors that are made of numbers keep them, and would copy these as well
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace != "prim":  # properties of a tensor
            self.counts.operators[func.name().partition(".")[0]] += 1
        if func is torch.ops.aten._to_copy.default or func is torch.ops.aten.copy_.default:
            self._copied(func, args, kwargs or {}, out)
        elif func.namespace in ("c10d", "_c10d_functional"):
            self._collective(func, args)
        return out

    def _copied(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        source, target = (args[1], args[0]) if func is torch.ops.aten.copy_.default else (args[0], out)
        here, there = device_type(source), device_type(target)
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
        for kind in {device_type(tensor) for tensor in tensors}:
            self.counts.collectives[name, kind] += 1
        self.counts.collective_bytes[name] += max((tensor.nbytes for tensor in tensors), default=0)

    def _weigh(self, tensor: Tensor) -> None:
        local = getattr(tensor, "_local_tensor", tensor)
        if device_type(local) == self._device and (key := local.untyped_storage()._cdata) not in self._sizes:
            self._what[key] = f"{tuple(local.shape)} {str(local.dtype).removeprefix('torch.')}, {self.phase}"
        super()._weigh(local)

    def _resized(self, key: int, size: int) -> None:
        super()._resized(key, size)
        if self.now > 1.01 * self._listed:  # a list of all storages at each new peak would take most of the time
            self._listed, self.at_peak = self.now, Counter()
            for one, held in self._sizes.copy().items():  # a garbage collection may free some meanwhile
                self.at_peak[self._what.get(one, "freed meanwhile")] += held

    def __enter__(self) -> Any:
        _ACTIVE.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _ACTIVE.remove(self)
        super().__exit__(*error)


_OURS = (__file__, meter.__file__, str(Path(__file__).with_name("fake_devices.py")))
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
