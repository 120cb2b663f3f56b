"""Lets kernels in Triton's interpreter take Python's floats, which it hands on as they are, and call `rsqrt` and `tanh`
of CUDA's libdevice, which it does not have; and rounds to bf16 to the nearest, as a GPU does, where it cuts off (triton
3.7, liger-kernel 0.8)."""

# pyright: reportMissingImports=false
from __future__ import annotations

import liger_kernel.ops.cross_entropy as cross_entropy
import liger_kernel.ops.rms_norm as rms_norm
import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

_convert = interpreter._implicit_cvt


def _with_floats(argument: object) -> object:
    if isinstance(argument, float):
        return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
    return _convert(argument)


_convert_bits = interpreter._convert_float


def _rounded(values: np.ndarray, source: object, target: object, mode: object) -> np.ndarray:
    if (source, target) != (tl.float32, tl.bfloat16):
        return _convert_bits(values, source, target, mode)
    floats = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
    return floats.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


interpreter._implicit_cvt, interpreter._convert_float = _with_floats, _rounded
rms_norm.rsqrt, cross_entropy.tanh = tl.rsqrt, _tanh
