"""Fake tensors whose commonest operators take a fraction of the time.

torch's own mode asks a cache, decompositions and implementations in Python for each result. Views have kernels for
shapes in C++, and are made by these at once; what products and sums give is remembered by the shapes of their inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_aten, _CPU = torch.ops.aten, torch.device("cpu")
# What is common in a decoder layer, forward and backward. These share the storage of their first argument,
VIEWS = frozenset(
    {
        *(_aten.view.default, _aten._unsafe_view.default, _aten.t.default, _aten.transpose.int, _aten.detach.default),
        *(_aten.unsqueeze.default, _aten.select.int, _aten.slice.Tensor, _aten.expand.default, _aten.permute.default),
        *(_aten.split.Tensor, _aten.split_with_sizes.default),
    }
)
# these change it and return it,
IN_PLACE = frozenset(
    {_aten.addmm_.default, _aten.mul_.Tensor, _aten.mul_.Scalar, _aten.add_.Tensor, _aten.exp_.default}
)
# and these return one new tensor, whose shape follows from those of the arguments.
NEW = frozenset(
    {
        *(_aten.mm.default, _aten.bmm.default, _aten.mul.Tensor, _aten.add.Tensor, _aten.sub.Tensor, _aten.div.Tensor),
        *(_aten.mul.Scalar, _aten.neg.default, _aten.pow.Tensor_Scalar, _aten.rsqrt.default, _aten.mean.dim),
        *(_aten.sum.dim_IntList, _aten.silu.default, _aten.sigmoid.default, _aten.cat.default, _aten.clone.default),
        *(_aten._to_copy.default, _aten.slice_backward.default, _aten.select_backward.default),
    }
)
_KNOWN = VIEWS | IN_PLACE | NEW
_KEYWORDS = {"dtype", "memory_format", "alpha"}  # others may name a device

_results: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}  # of NEW, by operator and arguments


class ShapeMode(FakeTensorMode):
    """Fake tensors on the CPU."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and not self.in_kernel_invocation:
            return args[0].fake_device  # two of three calls ask for it
        if func not in _KNOWN or not _KEYWORDS.issuperset(kwargs) or (shapes := _shapes(args)) is None:
            return super().dispatch(func, types, args, kwargs)
        if func in IN_PLACE:
            return args[0]
        key = (func, shapes, *kwargs.items())
        if func in NEW and key in _results:
            shape, stride, dtype = _results[key]
            return FakeTensor(self, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), _CPU)
        with in_kernel_invocation_manager(self):
            result = func(*args, **kwargs)
        if func in NEW:
            _results[key] = result.shape, result.stride(), result.dtype
        if isinstance(result, Tensor):
            return FakeTensor(self, result, _CPU)
        return [FakeTensor(self, one, _CPU) for one in result]


def _shapes(args: Sequence[Any]) -> tuple[Any, ...] | None:
    """Returns arguments with shapes in place of tensors; None where a tensor is not fake, or keeps its numbers."""
    found: list[Any] = []
    for arg in args:
        if isinstance(arg, Tensor):
            if type(arg) is not FakeTensor or arg.constant is not None:
                return None
            found += (arg.shape, arg.stride(), arg.dtype)
        elif isinstance(arg, list):
            inner = _shapes(arg)
            if inner is None:
                return None
            found.append(inner)
        else:
            found += (type(arg), arg)
    return tuple(found)
